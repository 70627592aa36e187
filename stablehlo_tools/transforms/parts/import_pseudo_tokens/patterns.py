"""The pieces of arithmetic that pseudo-tokens are made of, recognised by structure alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.constants import splat_element

ADD = "stablehlo.add"
OR = "stablehlo.or"  # the sum of two booleans
MULTIPLY = "stablehlo.multiply"
COMPARE = "stablehlo.compare"
CONSTANT = "stablehlo.constant"
ALL_REDUCE = "stablehlo.all_reduce"
CONVERT = "stablehlo.convert"
# Ops that hand a zero on, in another element type or shape.
RESHAPING = frozenset({CONVERT, "stablehlo.broadcast_in_dim", "stablehlo.reshape"})

# The collectives that torch-xla hands its token by an addition; an all_reduce has it as an operand.
FED_BY_ADDITION = frozenset(
    f"stablehlo.{kind}"
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "collective_permute")
)
TOKENED = FED_BY_ADDITION | {ALL_REDUCE}
# Reductions of zeros that are zero.
ZERO_KEEPING = frozenset({"add", "multiply", "maximum", "minimum", "and", "or"})

# Ops between a collective's result and the element of it that a token is multiplied by.
_ON_THE_WAY = frozenset({CONVERT, "stablehlo.reshape", "stablehlo.transpose"})


@dataclass(frozen=True, eq=False)
class FirstElement:
    """One element of a collective's result, and the ops that pick and scale it, last one first."""

    collective: ir.Operation
    path: tuple[ir.Operation, ...]


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op that a value is a result of; None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def element_type(value: ir.Value) -> ir.Type | None:
    """The element type of a tensor, None for a value of another type."""
    kind = value.type
    return kind.element_type if isinstance(kind, ir.RankedTensorType) else None


def is_scalar(value: ir.Value) -> bool:
    """Whether a value is a tensor of rank 0."""
    kind = value.type
    return isinstance(kind, ir.RankedTensorType) and kind.rank == 0


def is_zero_constant(op: ir.Operation) -> bool:
    """Whether an op is a constant that is +0 in every element, or false."""
    if op.name != CONSTANT:
        return False
    # The attribute of a constant of another element type cannot even be read.
    if not isinstance(element_type(op.results[0]), ir.FloatType | ir.IntegerType):
        return False
    splat = splat_element(op)
    if isinstance(splat, ir.FloatAttr):
        return splat.value == 0 and math.copysign(1, splat.value) > 0
    return isinstance(splat, ir.IntegerAttr | ir.BoolAttr) and not splat.value


def is_zero(value: ir.Value) -> bool:
    """Whether a value is shown to be zero in every element by constants alone."""
    source = _reshaped(value)
    return source is not None and is_zero_constant(source)


def is_uniform_constant(value: ir.Value) -> bool:
    """Whether a value is a constant that is the same in every element."""
    source = _reshaped(value)
    if source is None or source.name != CONSTANT:
        return False
    return isinstance(element_type(source.results[0]), ir.FloatType | ir.IntegerType) and (
        splat_element(source) is not None
    )


def is_test_for_zero(op: ir.Operation, position: int) -> bool:
    """Whether an op is `operand != 0`, torch-xla's conversion to a boolean."""
    if op.name != COMPARE or "NE" not in str(op.attributes["comparison_direction"]):
        return False
    return is_zero(op.operands[1 - position])


def first_element(value: ir.Value) -> FirstElement | None:
    """The collective that a scalar is the first element of, as torch-xla picks and scales it."""
    path: list[ir.Operation] = []
    op = defining_op(value) if is_scalar(value) else None
    while op is not None and op.name not in TOKENED:
        source = _step_back(op)
        if source is None:
            return None
        path.append(op)
        op = defining_op(source)
    return None if op is None else FirstElement(op, tuple(path))


def _step_back(op: ir.Operation) -> ir.Value | None:
    """The array that an op on the way to a first element picks from, None for another op."""
    if op.name in _ON_THE_WAY or _picks_first(op):
        return op.operands[0]
    if op.name != MULTIPLY:
        return None
    for position in (0, 1):
        if is_uniform_constant(op.operands[1 - position]):
            return op.operands[position]
    return None


def _picks_first(op: ir.Operation) -> bool:
    name = op.name
    if name == "stablehlo.slice":
        starts, limits = op.attributes["start_indices"], op.attributes["limit_indices"]
        return _all_are(starts, 0) and _all_are(limits, 1)
    if name in ("stablehlo.gather", "stablehlo.dynamic_slice"):
        indices = list(op.operands)[1:]
        return _all_are(op.attributes["slice_sizes"], 1) and all(map(is_zero, indices))
    return False


def _all_are(numbers: ir.Attribute, number: int) -> bool:
    entries: Sequence[int] = list(ir.DenseI64ArrayAttr(numbers))
    return all(entry == number for entry in entries)


def _reshaped(value: ir.Value) -> ir.Operation | None:
    """The op that a value is made of by reshaping and converting alone."""
    op = defining_op(value)
    while op is not None and op.name in RESHAPING:
        op = defining_op(op.operands[0])
    return op
