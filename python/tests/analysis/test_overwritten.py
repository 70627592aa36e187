"""Values that are overwritten, put together and taken apart, or changed in the text alone."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from order_cases import all_reduce, main, read, rule, verdict

from stablehlo_tools.analysis.elements.boxes import (
    Box,
    boxes_of,
    boxes_outside,
    common_range,
    reshape_box,
)

T = "tensor<8xf32>"
PERMUTE = (
    '"stablehlo.collective_permute"(%v) <{source_target_pairs = '
    f"dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}}> : ({T}) -> {T}"
)
SET = """({
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      stablehlo.return %r : tensor<f32>
    })"""
WINDOW = "#stablehlo.scatter<update_window_dims = [0], scatter_dims_to_operand_dims = [0]>"


def linked(body: str) -> str:
    """A program that sums `%x` to `%g`, makes `%v` of it, permutes that and returns both."""
    return main(
        f"{all_reduce('%g', '%x', T)}\n{body}\n%h = {PERMUTE}\nreturn %g, %h : {T}, {T}",
        arguments=f"%x: {T}, %y: {T}, %i: tensor<1xi32>, %j: tensor<i32>",
        results=f"{T}, {T}",
    )


def set_at(index: str, size: int = 8) -> str:
    """`g.at[index:index + size].set(y)`."""
    part = f"tensor<{size}xf32>"
    return f"""%u = stablehlo.slice %y [0:{size}] : ({T}) -> {part}
        %c = stablehlo.constant dense<0> : tensor<1xi32>
        %v = "stablehlo.scatter"(%g, {index}, %u) <{{scatter_dimension_numbers = {WINDOW}}}> {SET}
            : ({T}, tensor<1xi32>, {part}) -> {T}"""


def joined(after: str) -> str:
    """What `after` makes of `%a`, which is `%g` and then `%y`."""
    return f"""%a = stablehlo.concatenate %g, %y, dim = 0 : ({T}, {T}) -> tensor<16xf32>
        {after}"""


TURNED = """%b = stablehlo.reshape %a : (tensor<16xf32>) -> tensor<2x8xf32>
    %d = stablehlo.transpose %b, dims = [1, 0] : (tensor<2x8xf32>) -> tensor<8x2xf32>
    %e = stablehlo.reverse %d, dims = [1] : tensor<8x2xf32>
    %f = stablehlo.slice %e [0:8, {}] : (tensor<8x2xf32>) -> tensor<8x1xf32>
    %v = stablehlo.reshape %f : (tensor<8x1xf32>) -> tensor<8xf32>"""
REVERSED = """%b = stablehlo.reverse %a, dims = [0] : tensor<16xf32>
    %v = stablehlo.slice %b [{}] : (tensor<16xf32>) -> tensor<8xf32>"""
MASK = f"""%k = stablehlo.iota dim = 0 : tensor<8xi32>
    %n = stablehlo.constant dense<4> : tensor<8xi32>
    %p = stablehlo.compare LT, %k, %n : (tensor<8xi32>, tensor<8xi32>) -> tensor<8xi1>
    %m = stablehlo.select %p, %g, %y : tensor<8xi1>, {T}
    %s = stablehlo.slice %m [{{}}] : ({T}) -> tensor<4xf32>
    %v = stablehlo.concatenate %s, %s, dim = 0 : (tensor<4xf32>, tensor<4xf32>) -> {T}"""
PARTS = f"""%a = stablehlo.complex %g, %y : tensor<8xcomplex<f32>>
    %b = stablehlo.reverse %a, dims = [0] : tensor<8xcomplex<f32>>
    %v = stablehlo.{{}} %b : (tensor<8xcomplex<f32>>) -> {T}"""
PADDED = f"""%c = stablehlo.constant dense<0.5> : tensor<f32>
    %a = stablehlo.pad %g, %c, low = [0], high = [1], interior = [1]
        : ({T}, tensor<f32>) -> tensor<16xf32>
    %v = stablehlo.slice %a [{{}}:16:2] : (tensor<16xf32>) -> {T}"""
UPDATED = f"""%v = stablehlo.dynamic_update_slice %g, %{{}}, %j : ({T}, {{}}, tensor<i32>) -> {T}"""
HALF = f"%u = stablehlo.slice %y [0:4] : ({T}) -> tensor<4xf32>\n"
LOST = {
    "set_whole": set_at("%c"),
    "set_whole_at_an_unknown_place": set_at("%i"),
    "updated_whole": UPDATED.format("y", T),
    "turned": joined(TURNED.format("0:1")),
    "reversed": joined(REVERSED.format("0:8")),
    "masked": MASK.format("4:8"),
    "imaginary_part": PARTS.format("imag"),
    "between": PADDED.format("1"),
    "bounded_by_what_bounds_it": f"""%a = stablehlo.maximum %g, %y : {T}
        %v = stablehlo.minimum %a, %y : {T}""",
    "padding_that_is_nowhere": f"""%s = stablehlo.slice %g [0:1] : ({T}) -> tensor<1xf32>
        %c = stablehlo.reshape %s : (tensor<1xf32>) -> tensor<f32>
        %v = stablehlo.pad %y, %c, low = [0], high = [0], interior = [0]
            : ({T}, tensor<f32>) -> {T}""",
}
KEPT = {
    "set_in_part": set_at("%c", 4),
    "set_in_part_at_an_unknown_place": set_at("%i", 4),
    "updated_in_part": HALF + UPDATED.format("u", "tensor<4xf32>"),
    "turned": joined(TURNED.format("1:2")),
    "reversed": joined(REVERSED.format("8:16")),
    "masked": MASK.format("0:4"),
    "real_part": PARTS.format("real"),
    "every_second": PADDED.format("0"),
    "clipped": f"""%c = stablehlo.constant dense<0.0> : {T}
        %d = stablehlo.constant dense<6.0> : {T}
        %a = stablehlo.maximum %g, %c : {T}
        %v = stablehlo.minimum %a, %d : {T}""",
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_overwritten_or_not_taken_orders_nothing(name: str) -> None:
    text = linked(LOST[name])
    assert rule(verdict(read(text, text))) == "unordered"


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_orders(name: str) -> None:
    text = linked(KEPT[name])
    assert rule(verdict(read(text, text))) == "ordered"


def alone(body: str, *, kept: bool) -> str:
    """A program that sums `%x` and returns what `body` makes of the sum, or the sum."""
    end = f"return %{'g' if kept else 'v'} : {T}"
    return main(
        f"{all_reduce('%g', '%x', T)}\n{body}\n{end}",
        arguments=f"%x: {T}, %y: {T}, %i: tensor<1xi32>, %j: tensor<i32>",
        results=T,
    )


NEVER_TAKEN = f"""%p = stablehlo.constant dense<false> : tensor<i1>
    %v = "stablehlo.if"(%p) ({{
      stablehlo.return %g : {T}
    }}, {{
      stablehlo.return %y : {T}
    }}) : (tensor<i1>) -> {T}"""


@pytest.mark.parametrize("name", ["set_whole", "imaginary_part", "reversed", "turned", "masked"])
def test_a_collective_used_by_nothing_that_is_left_may_be_deleted(name: str) -> None:
    """By the compiler of the one program: the other waits for it."""
    found = rule(verdict(read(alone(LOST[name], kept=False), alone(LOST[name], kept=True))))
    assert found == "rewritten"
    assert rule(verdict(read(alone(KEPT["turned"], kept=False), alone("", kept=True)))) == "ordered"


def test_nor_by_a_branch_that_is_never_taken() -> None:
    found = rule(verdict(read(alone(NEVER_TAKEN, kept=False), alone(NEVER_TAKEN, kept=True))))
    assert found == "rewritten"


def loop(changed: str) -> str:
    """A loop of unknown length that sums a carry which the body returns as `%d`."""
    body = f"""%unit = stablehlo.constant dense<1.0> : {T}
        %zero = stablehlo.constant dense<0> : tensor<i32>
        {all_reduce("%limit", "%j", "tensor<i32>")}
        %f = stablehlo.convert %limit : (tensor<i32>) -> tensor<f32>
        %q = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> {T}
        %first = stablehlo.add %x, %q : {T}
        %w:3 = stablehlo.while(%k = %zero, %a = %first, %b = %y) : tensor<i32>, {T}, {T} cond {{
          %p = stablehlo.compare LT, %k, %limit : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          %s = stablehlo.constant dense<1> : tensor<i32>
          %n = stablehlo.add %k, %s : tensor<i32>
          {all_reduce("%g", "%a", T)}
          %e = stablehlo.add %b, %g : {T}
          %d = {changed}
          stablehlo.return %n, %d, %e : tensor<i32>, {T}, {T}
        }}
        return %w#2 : {T}"""
    return main(body, arguments=f"%x: {T}, %y: {T}, %j: tensor<i32>", results=T)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (f"stablehlo.multiply %a, %unit : {T}", "overlapping-iterations"),
        (f"stablehlo.tanh %e : {T}", "ordered"),
    ],
)
def test_a_carry_that_changes_in_the_text_alone_is_none(changed: str, expected: str) -> None:
    """What is summed does not change: compilers move the sum out of the loop."""
    text = loop(changed)
    assert rule(verdict(read(text, text))) == expected


def some_range(rng: random.Random, size: int) -> range:
    start = rng.randrange(size)
    numbers = range(start, rng.randint(start + 1, size), rng.randint(1, 3))
    return range(numbers.start, numbers[-1] + 1, numbers.step if len(numbers) > 1 else 1)


def mask_of(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, np.bool_)
    mask[np.ix_(*box)] = True
    return mask


def test_boxes_hold_no_element_that_is_not_meant() -> None:
    rng = random.Random(0)
    shapes = [
        s for s in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=3) if np.prod(s) == 24
    ]
    exact = 0
    for _ in range(500):
        before, after = rng.choice(shapes), rng.choice(shapes)
        box = tuple(some_range(rng, size) for size in before)
        meant = mask_of(box, before)
        moved = mask_of(reshape_box(box, before, after), after)
        assert not (moved.ravel() & ~meant.ravel()).any()
        exact += bool((moved.ravel() == meant.ravel()).all())
        other = tuple(some_range(rng, size) for size in before)
        for one, two in zip(box, other, strict=True):
            assert list(common_range(one, two)) == sorted({*one} & {*two})
        for outside in boxes_outside(before, [box]):
            assert not (mask_of(outside, before) & meant).any()
        for inside in boxes_of(meant):
            assert not (mask_of(inside, before) & ~meant).any()
    assert exact > 350


def test_tokens_read_op_by_op() -> None:
    """A token that only `after_all` hands on orders, beside values that are taken apart."""
    body = f"""%t = stablehlo.after_all : !stablehlo.token
        {all_reduce("%a", "%x", T)}
        %b:2 = stablehlo.optimization_barrier %a, %t : {T}, !stablehlo.token
        %u = stablehlo.after_all %b#1 : !stablehlo.token
        %c = stablehlo.concatenate %b#0, %y, dim = 0 : ({T}, {T}) -> tensor<16xf32>
        %e = stablehlo.slice %c [0:8] : (tensor<16xf32>) -> {T}
        %d:2 = stablehlo.optimization_barrier %y, %u : {T}, !stablehlo.token
        {all_reduce("%f", "%d#0", T)}
        return %e, %f : {T}, {T}"""
    text = main(body, arguments=f"%x: {T}, %y: {T}", results=f"{T}, {T}")
    assert rule(verdict(read(text, text))) == "ordered"
