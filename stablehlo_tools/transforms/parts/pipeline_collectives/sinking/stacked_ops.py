"""Ops on one row for each iteration of a loop, stacked along a new first dimension.

  %y = stablehlo.transpose %x, dims = [0, 2, 1]             // tensor<1x8x128>, of one iteration
==>
  %y = stablehlo.transpose %x, dims = [0, 1, 3, 2]          // tensor<3x1x8x128>, of all three
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.loops import FORMATTING, LoopBody, values_used
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_SLICE, PAD, REDUCE, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import COLLECTIVES, ELEMENTWISE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.reshaped_clone import reshaped_clone

# A constraint would have to say how the new dimension is sharded.
_STACKABLE = ELEMENTWISE | COLLECTIVES | {REDUCE} | (FORMATTING - {SHARDING_CONSTRAINT})

# What attributes of these ops say of dimensions: the number of one, the numbers of some, a number
# for each that the operand has, an entry for each (here what it is of the new first one).
_ONE_DIMENSION = frozenset(
    {"all_gather_dim", "concat_dimension", "dimension", "scatter_dimension", "split_dimension"}
)
_DIMENSIONS = frozenset({"dimensions"})
_EVERY_DIMENSION = frozenset({"broadcast_dimensions", "permutation"})
_FOR_EACH = {
    "start_indices": 0,
    "limit_indices": None,  # as many as there are iterations
    "strides": 1,
    "edge_padding_low": 0,
    "edge_padding_high": 0,
    "interior_padding": 0,
}


def has_rule(op: ir.Operation) -> bool:
    """Whether it is known how to run an op on stacked rows."""
    return op.name in _STACKABLE


def parameters_of(op: ir.Operation) -> range:
    """The operands that must be the same in all iterations, by number."""
    count = len(op.operands)
    if op.name in (PAD, DYNAMIC_SLICE):
        return range(1, count)
    return range(count // 2 if op.name == REDUCE else count, count)


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
    if op.name == DYNAMIC_SLICE:
        return [_window(op, given, trips, builder)]
    types = [builder.tensor([trips, *shape_of(old)], element_of(old)) for old in op.results]
    copy = reshaped_clone(op, given, types, point, captured=captured)
    _count_from_next(copy, trips, builder)
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
    return b.dynamic_slice(value, [first, *starts], [trips, *shape_of(op.results[0])])


def _count_from_next(op: ir.Operation, trips: int, builder: Builder) -> None:
    """Makes the attributes of an op speak of tensors with one more dimension in front."""
    for name, attribute in list(op.attributes.items()):
        if name in _ONE_DIMENSION:
            op.attributes[name] = builder.integer(ir.IntegerAttr(attribute).value + 1)
        elif name in _DIMENSIONS or name in _EVERY_DIMENSION:
            first = [0] if name in _EVERY_DIMENSION else []
            numbers = [dim + 1 for dim in ir.DenseI64ArrayAttr(attribute)]
            op.attributes[name] = builder.integers([*first, *numbers])
        elif name in _FOR_EACH:
            of_new = _FOR_EACH[name]
            first = trips if of_new is None else of_new
            op.attributes[name] = builder.integers([first, *ir.DenseI64ArrayAttr(attribute)])
