"""Terms of a sum: which ops come before the reduction, which stay behind, and what is none."""

from __future__ import annotations

import pytest
from named_ops import NamedOps, in_function, names_of

from stablehlo_tools.analysis.collective_likeness import Groups
from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.transforms.reassociate_collectives import (
    Term,
    merged_bytes,
    term_of,
    why_not_merged,
)

F8, F4 = "tensor<8xf32>", "tensor<4xf32>"


def reduced(
    name: str, operand: str, kind: str = "add", element: str = "f32", groups: str = "[[0, 1]]"
) -> str:
    """An all_reduce of eight elements over the devices of a group."""
    rows = groups.count("],") + 1
    scalar, tensor = f"tensor<{element}>", f"tensor<8x{element}>"
    return f"""
    %{name} = "stablehlo.all_reduce"({operand}) ({{
      ^bb0(%l: {scalar}, %r: {scalar}):
        %s = stablehlo.{kind} %l, %r : {scalar}
        stablehlo.return %s : {scalar}
    }}) {{replica_groups = dense<{groups}> : tensor<{rows}x{2 // rows}xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      use_global_device_ids}} : ({tensor}) -> {tensor} loc("{name}")"""


def terms(
    lines: str, left: str, right: str, type_: str = F8, kind: str = "add"
) -> list[Term | None]:
    """The two terms of an op that combines two values behind some lines."""
    named = combined(lines, left, right, type_, kind)
    combine = named["combine"]
    classify, groups = classify_communication(named.module.context), Groups(named.facts)
    return [term_of(value, combine, kind, classify, groups) for value in combine.operands]


def combined(lines: str, left: str, right: str, type_: str, kind: str) -> NamedOps:
    """A program that ends in the op."""
    last = f'    %c = stablehlo.{kind} {left}, {right} : {type_} loc("combine")'
    arguments = f"%x: {F8}, %y: {F8}, %n: tensor<8xi8>, %h: tensor<8xbf16>, %i: tensor<i32>"
    return in_function(arguments, f"{lines}\n{last}", f"%c : {type_}", partitions=2)


def only(lines: str, left: str, type_: str = F8, kind: str = "add") -> Term | None:
    """The left one of two terms, of which the other is an argument or itself a plain reduction."""
    element = type_.rsplit("x", maxsplit=1)[-1].rstrip(">")
    other = f"%o = stablehlo.constant dense<{'0.0' if 'f' in element else 0}> : {type_}\n"
    return terms(other + lines, left, "%o", type_, kind)[0]


SLICE = f'\n%b = stablehlo.slice %a [0:4] : ({F8}) -> {F4} loc("slice")'
HALF = "\n%half = stablehlo.constant dense<0.5> : "


def test_a_reduction_alone_is_a_term():
    term = only(reduced("a", "%x"), "%a")
    assert term is not None
    assert (names_of([term.collective.op]), term.before, term.after) == (["a"], (), ())
    assert term.between == term.collective.op.results[0]


@pytest.mark.parametrize(
    ("op", "type_"),
    [
        (f"stablehlo.slice %a [0:4] : ({F8}) -> {F4}", F4),
        (f"stablehlo.reshape %a : ({F8}) -> tensor<2x4xf32>", "tensor<2x4xf32>"),
        (f"stablehlo.reverse %a, dims = [0] : {F8}", F8),
        (f"stablehlo.negate %a : {F8}", F8),
    ],
)
def test_what_moves_elements_comes_before_a_sum(op: str, type_: str):
    term = only(f'{reduced("a", "%x")}\n%b = {op} loc("b")', "%b", type_)
    assert term is not None
    assert (names_of(term.before), names_of(term.after)) == (["b"], [])


def test_a_scale_and_what_follows_it_stay_behind():
    lines = (
        reduced("a", "%x")
        + f'\n%v = stablehlo.reverse %a, dims = [0] : {F8} loc("reverse")'
        + HALF
        + f'{F8}\n%m = stablehlo.multiply %half, %v : {F8} loc("scale")'
        + f'\n%b = stablehlo.slice %m [0:4] : ({F8}) -> {F4} loc("slice")'
    )
    term = only(lines, "%b", F4)
    assert term is not None
    assert (names_of(term.before), names_of(term.after)) == (["reverse"], ["scale", "slice"])
    assert names_of(term.ops) == ["slice", "scale", "reverse", "a"]


def test_the_operand_that_is_not_the_same_everywhere_is_scaled():
    lines = reduced("a", "%x") + HALF + f"{F8}\n%b = stablehlo.divide %half, %a : {F8}"
    assert only(lines, "%b") is None
    lines = reduced("a", "%x") + HALF + f"{F8}\n%b = stablehlo.divide %a, %half : {F8}"
    assert only(lines, "%b") is not None


def test_a_scale_of_maxima_is_no_maximum_of_a_scale():
    lines = reduced("a", "%x", "maximum") + HALF + f"{F8}\n%b = stablehlo.multiply %a, %half : {F8}"
    assert only(lines, "%b", kind="maximum") is None


def test_a_negated_maximum_is_no_term():
    lines = reduced("a", "%x", "maximum") + f"\n%b = stablehlo.negate %a : {F8}"
    assert only(lines, "%b", kind="maximum") is None


def test_a_sum_of_maxima_is_no_term():
    assert only(reduced("a", "%x", "maximum"), "%a") is None


@pytest.mark.parametrize(
    ("kind", "filled", "is_term"),
    [
        ("add", "0.0", True),
        ("add", "1.0", False),
        ("maximum", "1.0", True),
        ("multiply", "1.0", False),
    ],
)
def test_a_pad_comes_before_where_the_reduction_ignores_it(kind: str, filled: str, is_term: bool):
    lines = (
        reduced("a", "%x", kind)
        + f"\n%f = stablehlo.constant dense<{filled}> : tensor<f32>"
        + f"\n%b = stablehlo.pad %a, %f, low = [0], high = [1], interior = [0]"
        f" : ({F8}, tensor<f32>) -> tensor<9xf32>"
    )
    assert (only(lines, "%b", "tensor<9xf32>", kind) is not None) == is_term


@pytest.mark.parametrize(
    ("narrow", "operand", "wide", "kind", "is_term"),
    [
        ("bf16", "%h", "f32", "add", True),
        ("i8", "%n", "i32", "add", False),  # sums of i8 wrap around
        ("i8", "%n", "i32", "maximum", True),
        ("i8", "%n", "ui32", "maximum", False),
        ("f32", "%x", "bf16", "add", False),
        ("f32", "%x", "i32", "maximum", False),
    ],
)
def test_a_convert_comes_before_where_it_keeps_every_value(
    narrow: str, operand: str, wide: str, kind: str, is_term: bool
):
    lines = (
        reduced("a", operand, kind, narrow)
        + f"\n%b = stablehlo.convert %a : (tensor<8x{narrow}>) -> tensor<8x{wide}>"
    )
    assert (only(lines, "%b", f"tensor<8x{wide}>", kind) is not None) == is_term


def test_what_something_else_uses_is_no_term():
    lines = reduced("a", "%x") + f"\n%b = stablehlo.tanh %a : {F8}"
    assert terms(lines, "%a", "%b") == [None, None]


def test_a_square_is_no_term():
    assert only(reduced("a", "%x") + f"\n%b = stablehlo.multiply %a, %a : {F8}", "%b") is None


@pytest.mark.parametrize(("count", "is_term"), [(15, True), (16, False)])
def test_a_term_is_followed_through_fifteen_ops(count: int, is_term: bool):
    lines, value = reduced("a", "%x"), "%a"
    for number in range(count):
        lines += f"\n%v{number} = stablehlo.negate {value} : {F8}"
        value = f"%v{number}"
    assert (only(lines, value) is not None) == is_term


def why(lines: str, type_: str = F8) -> str | None:
    """Why the terms %p and %q are not merged."""
    one, other = terms(lines, "%p", "%q", type_)
    assert one is not None
    assert other is not None
    return why_not_merged(one, other)


def sliced(name: str, of: str, start: int = 0) -> str:
    """Half of a value."""
    return f"\n%{name} = stablehlo.slice {of} [{start}:{start + 4}] : ({F8}) -> {F4}"


def divided(name: str, of: str, by: str) -> str:
    """A mean."""
    return (
        f"\n%k{name} = stablehlo.constant dense<{by}> : {F8}"
        f"\n%{name} = stablehlo.divide {of}, %k{name} : {F8}"
    )


def test_like_reductions_are_merged():
    assert why(reduced("p", "%x") + reduced("q", "%y")) is None


def test_what_comes_before_need_not_be_the_same():
    both = reduced("a", "%x") + reduced("b", "%y")
    assert why(both + sliced("p", "%a") + sliced("q", "%b", 4), F4) is None


def test_what_stays_behind_has_to_be_the_same():
    both = reduced("a", "%x") + reduced("b", "%y")
    assert why(both + divided("p", "%a", "2.0") + divided("q", "%b", "2.0")) is None
    refusal = "the ops on their results differ"
    assert why(both + divided("p", "%a", "2.0") + divided("q", "%b", "4.0")) == refusal
    assert why(both.replace("%b", "%q") + divided("p", "%a", "2.0")) == refusal


def test_reductions_over_other_devices_stay_apart():
    lines = reduced("p", "%x") + reduced("q", "%y", groups="[[0], [1]]")
    assert why(lines) == "their process groups differ (C4)"


def test_no_more_is_moved_than_before():
    wide = "tensor<24xf32>"
    spread = "stablehlo.broadcast_in_dim"
    lines = reduced("a", "%x") + reduced("b", "%y")
    for name, of in (("u", "a"), ("w", "b")):
        lines += f"\n%{name} = {spread} %{of}, dims = [1] : ({F8}) -> tensor<3x8xf32>"
    for name, of in (("p", "u"), ("q", "w")):
        lines += f"\n%{name} = stablehlo.reshape %{of} : (tensor<3x8xf32>) -> {wide}"
    assert why(lines, wide) == "one collective would move more bytes than both do"
    assert why(lines.replace("3x8", "2x8").replace("<24", "<16"), "tensor<16xf32>") is None


def test_what_is_moved_is_counted_as_the_collective_would_take_it():
    term = only(reduced("a", "%x") + SLICE, "%b", F4)
    assert term is not None
    assert merged_bytes(term) == 4 * 4
