"""What stands between two collectives, and whether the second must wait for the first through it.

Each case is StableHLO that makes `%v` of `%g`, 8 elements that a collective gathered, beside `%x`,
4 elements that are given. In the bodies T is the type of `%g` and E its element type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`counts`: `%v`, of type `result`, surely waits for `%g`, whatever a compiler simplifies."""

    name: str
    body: str
    element: str
    result: str
    counts: bool

    def text(self, number: int) -> str:
        """The body with names of its own."""
        body = re.sub(r"%([a-z]\w*)", rf"%\1_{number}", self.body)
        return body.replace(f"%g_{number}", f"%g{number}").replace(f"%x_{number}", f"%x{number}")


def _cases(text: str, *, counts: bool) -> list[Case]:
    """`name: TYPE [-> RESULT]` and the lines of its body, blank lines between."""
    found: list[Case] = []
    for block in text.strip().split("\n\n"):
        head, *lines = block.splitlines()
        name, types = head.strip().split(": ", 1)
        elements, _, result = types.partition(" -> ")
        for element in elements.split():
            body, kind = (
                re.sub(r"\bT\b", "tensor<8xE>", part).replace("xE>", f"x{element}>")
                for part in ("\n".join(line.strip() for line in lines), result or "T")
            )
            body, kind = (re.sub(r"\bE\b", element, part) for part in (body, kind))
            found.append(Case(f"{name}_{element}", body, element, kind, counts))
    return found


# An identity takes the operand away, or may.
LOST = _cases(
    """
    times_zero: i32
      %c = stablehlo.constant dense<0> : T
      %v = stablehlo.multiply %g, %c : T

    times_computed_zero: i32
      %a = stablehlo.constant dense<1> : T
      %c = stablehlo.subtract %a, %a : T
      %v = stablehlo.multiply %g, %c : T

    times_what_cancels: i32
      %a = stablehlo.subtract %x, %x : tensor<4xE>
      %b = stablehlo.concatenate %a, %a, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %v = stablehlo.multiply %b, %g : T

    overflows_to_zero: i32
      %c = stablehlo.constant dense<65536> : T
      %a = stablehlo.multiply %g, %c : T
      %v = stablehlo.multiply %a, %c : T

    minus_itself: i32
      %v = stablehlo.subtract %g, %g : T

    minus_itself_twice_negated: i32
      %a = stablehlo.not %g : T
      %b = stablehlo.not %a : T
      %v = stablehlo.subtract %b, %g : T

    added_and_subtracted: i32
      %c = stablehlo.constant dense<3> : T
      %a = stablehlo.add %g, %c : T
      %v = stablehlo.subtract %a, %g : T

    subtracted_and_added: i32
      %c = stablehlo.constant dense<3> : T
      %a = stablehlo.subtract %c, %g : T
      %v = stablehlo.add %a, %g : T

    equal_subexpressions: i32
      %a = stablehlo.add %g, %g : T
      %b = stablehlo.add %g, %g : T
      %v = stablehlo.subtract %a, %b : T

    and_with_zero: i32
      %c = stablehlo.constant dense<0> : T
      %v = stablehlo.and %g, %c : T

    or_with_all_bits: i32
      %c = stablehlo.constant dense<-1> : T
      %v = stablehlo.or %g, %c : T

    xor_with_itself: i32
      %v = stablehlo.xor %g, %g : T

    remainder_by_one: i32
      %c = stablehlo.constant dense<1> : T
      %v = stablehlo.remainder %g, %c : T

    integer_dot_with_zero: i32 -> tensor<E>
      %c = stablehlo.constant dense<0> : T
      %v = stablehlo.dot_general %g, %c, contracting_dims = [0] x [0] : (T, T) -> tensor<E>

    power_of_zero: i32 f32
      %c = stablehlo.constant dense<0> : tensor<8xi32>
      %d = stablehlo.convert %c : (tensor<8xi32>) -> T
      %v = stablehlo.power %g, %d : T

    compared_with_itself: i32 -> tensor<8xi1>
      %v = stablehlo.compare GE, %g, %g : (T, T) -> tensor<8xi1>

    unsigned_below_zero: ui32 -> tensor<8xi1>
      %c = stablehlo.constant dense<0> : T
      %v = stablehlo.compare LT, %g, %c : (T, T) -> tensor<8xi1>

    exponential_below_zero: f32 -> tensor<8xi1>
      %c = stablehlo.constant dense<0.0> : T
      %e = stablehlo.exponential %g : T
      %v = stablehlo.compare LT, %e, %c : (T, T) -> tensor<8xi1>

    select_on_a_constant: i32 f32
      %p = stablehlo.constant dense<false> : tensor<8xi1>
      %c = stablehlo.iota dim = 0 : T
      %v = stablehlo.select %p, %g, %c : tensor<8xi1>, T

    select_on_what_holds_always: i32
      %c = stablehlo.iota dim = 0 : T
      %d = stablehlo.compare EQ, %x, %x : (tensor<4xE>, tensor<4xE>) -> tensor<4xi1>
      %p = stablehlo.concatenate %d, %d, dim = 0 : (tensor<4xi1>, tensor<4xi1>) -> tensor<8xi1>
      %v = stablehlo.select %p, %c, %g : tensor<8xi1>, T

    select_of_equals_by_it: f32
      %c = stablehlo.constant dense<0.5> : T
      %p = stablehlo.compare GT, %g, %c : (T, T) -> tensor<8xi1>
      %v = stablehlo.select %p, %c, %c : tensor<8xi1>, T

    select_of_a_select: f32
      %c = stablehlo.constant dense<0.5> : tensor<4xE>
      %d = stablehlo.constant dense<1.5> : T
      %p = stablehlo.compare GT, %x, %c : (tensor<4xE>, tensor<4xE>) -> tensor<4xi1>
      %q = stablehlo.concatenate %p, %p, dim = 0 : (tensor<4xi1>, tensor<4xi1>) -> tensor<8xi1>
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %a = stablehlo.select %q, %y, %g : tensor<8xi1>, T
      %v = stablehlo.select %q, %a, %d : tensor<8xi1>, T

    if_with_equal_sides: f32
      %a = stablehlo.slice %g [0:1] : (T) -> tensor<1xE>
      %b = stablehlo.reshape %a : (tensor<1xE>) -> tensor<E>
      %c = stablehlo.constant dense<0.5> : tensor<E>
      %p = stablehlo.compare GT, %b, %c : (tensor<E>, tensor<E>) -> tensor<i1>
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %v = "stablehlo.if"(%p) ({
        stablehlo.return %y : T
      }, {
        stablehlo.return %y : T
      }) : (tensor<i1>) -> T

    the_other_part_of_a_concatenation: f32
      %c = stablehlo.iota dim = 0 : T
      %a = stablehlo.concatenate %g, %c, dim = 0 : (T, T) -> tensor<16xE>
      %v = stablehlo.slice %a [8:16] : (tensor<16xE>) -> T

    the_other_part_by_dynamic_slice: f32
      %c = stablehlo.iota dim = 0 : T
      %a = stablehlo.concatenate %g, %c, dim = 0 : (T, T) -> tensor<16xE>
      %i = stablehlo.constant dense<8> : tensor<i32>
      %v = stablehlo.dynamic_slice %a, %i, sizes = [8] : (tensor<16xE>, tensor<i32>) -> T

    padding_around_it: i32 -> tensor<4xE>
      %c = stablehlo.constant dense<0> : tensor<E>
      %a = stablehlo.pad %g, %c, low = [4], high = [0], interior = [0]
        : (T, tensor<E>) -> tensor<12xE>
      %v = stablehlo.slice %a [0:4] : (tensor<12xE>) -> tensor<4xE>

    cropped_away: f32
      %c = stablehlo.constant dense<0.0> : tensor<E>
      %v = stablehlo.pad %g, %c, low = [-8], high = [8], interior = [0] : (T, tensor<E>) -> T

    overwritten: f32
      %c = stablehlo.iota dim = 0 : T
      %i = stablehlo.constant dense<0> : tensor<i32>
      %v = stablehlo.dynamic_update_slice %g, %c, %i : (T, T, tensor<i32>) -> T

    index_of_a_whole_slice: i32
      %a = stablehlo.slice %g [0:1] : (T) -> tensor<1xE>
      %i = stablehlo.reshape %a : (tensor<1xE>) -> tensor<E>
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %v = stablehlo.dynamic_slice %y, %i, sizes = [8] : (T, tensor<E>) -> T

    real_part_of_an_imaginary: f32
      %c = stablehlo.iota dim = 0 : T
      %a = stablehlo.complex %c, %g : tensor<8xcomplex<E>>
      %v = stablehlo.real %a : (tensor<8xcomplex<E>>) -> T

    imaginary_part_of_a_real: f32
      %v = stablehlo.imag %g : (T) -> T

    unused_element_of_a_barrier: f32
      %c = stablehlo.iota dim = 0 : T
      %b:2 = stablehlo.optimization_barrier %c, %g : T, T
      %v = stablehlo.negate %b#0 : T

    size: f32 -> tensor<i32>
      %v = stablehlo.get_dimension_size %g, dim = 0 : (T) -> tensor<i32>

    reduction_that_ignores_it: f32 -> tensor<E>
      %c = stablehlo.constant dense<0.5> : tensor<E>
      %v = stablehlo.reduce(%g init: %c) across dimensions = [0] : (T, tensor<E>) -> tensor<E>
       reducer(%a: tensor<E>, %b: tensor<E>) {
        stablehlo.return %c : tensor<E>
      }

    reduction_of_nothing: f32 -> tensor<E>
      %a = stablehlo.slice %g [0:0] : (T) -> tensor<0xE>
      %c = stablehlo.constant dense<0.0> : tensor<E>
      %v = stablehlo.reduce(%a init: %c) applies stablehlo.add across dimensions = [0]
        : (tensor<0xE>, tensor<E>) -> tensor<E>

    sorted_by_another: f32
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %s:2 = "stablehlo.sort"(%g, %y) <{dimension = 0 : i64}> ({
      ^bb0(%a: tensor<E>, %b: tensor<E>, %c: tensor<E>, %d: tensor<E>):
        %p = stablehlo.compare LT, %c, %d : (tensor<E>, tensor<E>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }) : (T, T) -> (T, T)
      %v = stablehlo.negate %s#1 : T

    loop_that_never_runs: f32
      %i = stablehlo.constant dense<0> : tensor<i32>
      %c = stablehlo.iota dim = 0 : T
      %w:2 = stablehlo.while(%a = %i, %b = %c) : tensor<i32>, T cond {
        %n = stablehlo.constant dense<0> : tensor<i32>
        %p = stablehlo.compare LT, %a, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %o = stablehlo.constant dense<1> : tensor<i32>
        %d = stablehlo.add %a, %o : tensor<i32>
        stablehlo.return %d, %g : tensor<i32>, T
      }
      %v = stablehlo.negate %w#1 : T
    """,
    counts=False,
)

KEPT = _cases(
    """
    negated: f32 i32
      %v = stablehlo.negate %g : T

    converted: f32 i32 -> tensor<8xbf16>
      %v = stablehlo.convert %g : (T) -> tensor<8xbf16>

    float_times_zero: f32
      %c = stablehlo.constant dense<0.0> : T
      %v = stablehlo.multiply %g, %c : T

    float_minus_itself: f32
      %v = stablehlo.subtract %g, %g : T

    times_an_odd_number: i32
      %c = stablehlo.constant dense<3> : T
      %v = stablehlo.multiply %g, %c : T

    sum_with_an_argument: i32 f32
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %v = stablehlo.add %y, %g : T

    relu: f32
      %c = stablehlo.constant dense<0.0> : T
      %v = stablehlo.maximum %g, %c : T

    masked_where_another_is_positive: f32
      %c = stablehlo.constant dense<0.0> : T
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %p = stablehlo.compare GT, %y, %c : (T, T) -> tensor<8xi1>
      %v = stablehlo.select %p, %g, %c : tensor<8xi1>, T

    chosen_by_the_device: f32
      %i = stablehlo.replica_id : tensor<ui32>
      %k = stablehlo.constant dense<1> : tensor<ui32>
      %c = stablehlo.iota dim = 0 : T
      %p = stablehlo.compare EQ, %i, %k : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
      %v = stablehlo.select %p, %g, %c : tensor<i1>, T

    both_sides_of_a_select: f32
      %n = stablehlo.negate %g : T
      %p = stablehlo.constant dense<false> : tensor<8xi1>
      %v = stablehlo.select %p, %g, %n : tensor<8xi1>, T

    slice_of_a_whole: f32 -> tensor<1xE>
      %v = stablehlo.slice %g [3:4] : (T) -> tensor<1xE>

    slice_of_two_that_both_wait: f32 -> tensor<4xE>
      %n = stablehlo.negate %g : T
      %a = stablehlo.concatenate %g, %n, dim = 0 : (T, T) -> tensor<16xE>
      %v = stablehlo.slice %a [6:10] : (tensor<16xE>) -> tensor<4xE>

    dynamic_slice: f32 -> tensor<1xE>
      %i = stablehlo.constant dense<5> : tensor<i32>
      %v = stablehlo.dynamic_slice %g, %i, sizes = [1] : (T, tensor<i32>) -> tensor<1xE>

    a_whole_concatenation: f32 -> tensor<12xE>
      %v = stablehlo.concatenate %x, %g, dim = 0 : (tensor<4xE>, T) -> tensor<12xE>

    update: f32 -> tensor<8xE>
      %i = stablehlo.constant dense<2> : tensor<i32>
      %v = stablehlo.dynamic_update_slice %g, %x, %i : (T, tensor<4xE>, tensor<i32>) -> T

    product: f32 -> tensor<E>
      %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xE>, tensor<4xE>) -> T
      %v = stablehlo.dot_general %g, %y, contracting_dims = [0] x [0] : (T, T) -> tensor<E>

    gather: f32 -> tensor<2xE>
      %i = stablehlo.constant dense<[[1], [5]]> : tensor<2x1xi32>
      %v = "stablehlo.gather"(%g, %i) <{
        dimension_numbers = #stablehlo.gather<
          collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
        slice_sizes = array<i64: 1>}> : (T, tensor<2x1xi32>) -> tensor<2xE>

    sum: f32 i32 -> tensor<E>
      %z = stablehlo.constant dense<0> : tensor<i32>
      %c = stablehlo.convert %z : (tensor<i32>) -> tensor<E>
      %v = stablehlo.reduce(%g init: %c) applies stablehlo.add across dimensions = [0]
        : (T, tensor<E>) -> tensor<E>

    sorted: f32
      %v = "stablehlo.sort"(%g) <{dimension = 0 : i64}> ({
      ^bb0(%a: tensor<E>, %b: tensor<E>):
        %p = stablehlo.compare LT, %a, %b : (tensor<E>, tensor<E>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }) : (T) -> T

    used_element_of_a_barrier: f32
      %c = stablehlo.iota dim = 0 : T
      %b:2 = stablehlo.optimization_barrier %c, %g : T, T
      %v = stablehlo.add %b#0, %b#1 : T

    real_part_of_both: f32
      %a = stablehlo.complex %g, %g : tensor<8xcomplex<E>>
      %v = stablehlo.real %a : (tensor<8xcomplex<E>>) -> T

    loop: f32
      %i = stablehlo.constant dense<0> : tensor<i32>
      %w:2 = stablehlo.while(%a = %i, %b = %g) : tensor<i32>, T cond {
        %n = stablehlo.constant dense<3> : tensor<i32>
        %p = stablehlo.compare LT, %a, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %o = stablehlo.constant dense<1> : tensor<i32>
        %d = stablehlo.add %a, %o : tensor<i32>
        %e = stablehlo.tanh %b : T
        stablehlo.return %d, %e : tensor<i32>, T
      }
      %v = stablehlo.negate %w#1 : T
    """,
    counts=True,
)


def program(cases: list[Case], *, follow: bool) -> str:
    """A program of two replicas that gathers for each case, and returns what came of it.

    With `follow`, a second collective exchanges the `%v` of each case, and `%g` is returned too.
    """
    lines: list[str] = []
    returned: list[tuple[str, str]] = []
    for n, case in enumerate(cases):
        gathered = f"tensor<8x{case.element}>"
        lines.append(
            f'%g{n} = "stablehlo.all_gather"(%x{n}) <{{all_gather_dim = 0 : i64, '
            "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> : "
            f'(tensor<4x{case.element}>) -> {gathered} loc("{case.name}")'
        )
        lines.append(case.text(n))
        if follow:
            lines.append(
                f'%h{n} = "stablehlo.collective_permute"(%v_{n}) <{{source_target_pairs = '
                f"dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}}> : ({case.result}) -> {case.result}"
            )
            returned += [(f"%g{n}", gathered), (f"%h{n}", case.result)]
        else:
            returned.append((f"%v_{n}", case.result))
    arguments = ", ".join(f"%x{n}: tensor<4x{case.element}>" for n, case in enumerate(cases))
    values, types = (", ".join(column) for column in zip(*returned, strict=True))
    return (
        "module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {\n"
        f"func.func @main({arguments}) -> ({types}) {{\n"
        + "\n".join(lines)
        + f"\nreturn {values} : {types}\n}}\n}}\n"
    )
