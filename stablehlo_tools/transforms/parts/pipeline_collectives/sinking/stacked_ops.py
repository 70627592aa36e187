"""Ops on one row for each iteration of a loop, stacked along a new first dimension.

  %y = stablehlo.transpose %x, dims = [0, 2, 1]             // tensor<1x8x128>, of one iteration
==>
  %y = stablehlo.transpose %x, dims = [0, 1, 3, 2]          // tensor<3x1x8x128>, of all three
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stablehlo_tools.analysis.loops import LoopBody, values_used
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with

Attributes = dict[str, ir.Attribute]


def has_rule(op: ir.Operation) -> bool:
    """Whether it is known how to run an op on stacked rows."""
    return op.name in ELEMENTWISE or op.name in _RULES


def parameters_of(op: ir.Operation) -> range:
    """The operands that must be the same in all iterations, by number."""
    count = len(op.operands)
    if op.name in ("stablehlo.pad", "stablehlo.dynamic_slice"):
        return range(1, count)
    return range(count // 2 if op.name == "stablehlo.reduce" else count, count)


def captured_by(body: LoopBody, op: ir.Operation) -> list[ir.Value]:
    """What an op's region reads of the body around it."""
    inner = values_used(op)[len(op.operands) :]
    return [value for value in dict.fromkeys(inner) if body.is_inside(value)]


def run_stacked(
    op: ir.Operation,
    trips: int,
    operands: Sequence[tuple[ir.Value, bool]],
    captured: Mapping[ir.Value, ir.Value],
    point: ir.InsertionPoint,
) -> list[ir.Value]:
    """Writes an op for all iterations, and returns its results.

    `operands` come with whether they are stacked; `captured` is what its region reads from outside.
    """
    builder = Builder(point, op.location)
    fixed = parameters_of(op)
    shape = shape_of(op.results[0])
    given = [
        value if number in fixed else _stacked(op, value, is_stacked, trips, shape, builder)
        for number, (value, is_stacked) in enumerate(operands)
    ]
    if op.name == "stablehlo.dynamic_slice":
        return [_window(op, given, trips, builder)]
    copy = copy_with(op, captured, point)
    for name, attribute in _RULES.get(op.name, _unchanged)(op, trips, builder).items():
        copy.attributes[name] = attribute
    for number, value in enumerate(given):
        copy.operands[number] = value
    for result in copy.results:
        result.set_type(builder.tensor([trips, *shape_of(result)], element_of(result)))
    return list(copy.results)


def _stacked(
    op: ir.Operation,
    value: ir.Value,
    is_stacked: bool,
    trips: int,
    shape: Sequence[int],
    builder: Builder,
) -> ir.Value:
    """An operand with a row for each iteration; scalars beside tensors become tensors."""
    rank = len(shape_of(value)) - is_stacked
    if op.name in ELEMENTWISE and rank == 0 and len(shape):
        if not is_stacked:
            return value
        return builder.broadcast(value, [trips, *shape], [0])
    if is_stacked:
        return value
    return builder.broadcast(value, [trips, *shape_of(value)], range(1, rank + 1))


def _window(op: ir.Operation, operands: Sequence[ir.Value], trips: int, b: Builder) -> ir.Value:
    """A dynamic_slice at the same place of all rows."""
    value, *starts = operands
    if not starts:
        return value
    first = b.splat(0, [], element_of(starts[0]))
    return b.dynamic_slice(value, [first, *starts], [trips, *_list(op, "slice_sizes")])


def _unchanged(_op: ir.Operation, _trips: int, _builder: Builder) -> Attributes:
    return {}


def _next_dimension(*names: str) -> Callable[[ir.Operation, int, Builder], Attributes]:
    """A rule: attributes that count one dimension count it from the new first one."""

    def rule(op: ir.Operation, _trips: int, builder: Builder) -> Attributes:
        found = ((name, ir.IntegerAttr(op.attributes[name]).value) for name in names)
        return {name: builder.integer(dimension + 1) for name, dimension in found}

    return rule


def _next_dimensions(name: str, first: Sequence[int]) -> Callable[..., Attributes]:
    """A rule: a list of dimensions, behind those that it begins with."""

    def rule(op: ir.Operation, _trips: int, builder: Builder) -> Attributes:
        return {name: builder.integers([*first, *(d + 1 for d in _list(op, name))])}

    return rule


def _slice(op: ir.Operation, trips: int, builder: Builder) -> Attributes:
    first = {"start_indices": 0, "limit_indices": trips, "strides": 1}
    return {name: builder.integers([n, *_list(op, name)]) for name, n in first.items()}


def _pad(op: ir.Operation, _trips: int, builder: Builder) -> Attributes:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return {name: builder.integers([0, *_list(op, name)]) for name in names}


def _list(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


_RULES: dict[str, Callable[[ir.Operation, int, Builder], Attributes]] = {
    "stablehlo.all_gather": _next_dimension("all_gather_dim"),
    "stablehlo.all_reduce": _unchanged,
    "stablehlo.all_to_all": _next_dimension("split_dimension", "concat_dimension"),
    "stablehlo.bitcast_convert": _unchanged,
    "stablehlo.broadcast_in_dim": _next_dimensions("broadcast_dimensions", [0]),
    "stablehlo.collective_broadcast": _unchanged,
    "stablehlo.collective_permute": _unchanged,
    "stablehlo.concatenate": _next_dimension("dimension"),
    "stablehlo.dynamic_slice": _unchanged,
    "stablehlo.pad": _pad,
    "stablehlo.reduce": _next_dimensions("dimensions", []),
    "stablehlo.reduce_scatter": _next_dimension("scatter_dimension"),
    "stablehlo.reshape": _unchanged,
    "stablehlo.reverse": _next_dimensions("dimensions", []),
    "stablehlo.slice": _slice,
    "stablehlo.transpose": _next_dimensions("permutation", [0]),
}
