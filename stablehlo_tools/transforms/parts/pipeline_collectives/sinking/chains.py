"""Chains of linear ops from a collective to an accumulator, which may run on a sum of many.

A chain f is linear for an accumulation ⊕ if f(x) ⊕ f(y) = f(x ⊕ y), and if it makes the identity
of ⊕ of the identity, for then a loop that never ran is no exception. With ⊕ an addition: whatever
moves elements or drops some, negation, multiplication and division by what does not change in the
loop, and collectives that add or move; a device that is sent nothing has zeros, the identity. With
⊕ a maximum, a minimum, `and` or `or`: what moves elements, and collectives that do so or combine
by ⊕.

The rewritten chain has the accumulator's element type throughout. Conversions to it from a
narrower type of its own kind are no obstacle, and fall away: of floats they are exact, of integers
too unless something before them may have wrapped around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.channels import channel_number
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.reducers import identity_of, is_identity_of, reducer_kind
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.constants import splat_of
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import named
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.refusals import is_static_tensor

REDUCING = frozenset({"stablehlo.all_reduce", "stablehlo.reduce_scatter"})
_COMPLETE = frozenset({"stablehlo.all_gather", "stablehlo.all_to_all"})
_SENDING = frozenset({"stablehlo.collective_permute", "stablehlo.collective_broadcast"})
_MOVING = frozenset(
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "dynamic_slice", "reshape", "reverse", "slice", "transpose")
)
_SCALING = frozenset({"stablehlo.multiply", "stablehlo.divide"})
CONVERT = "stablehlo.convert"
_LEAST_FLOAT = 16  # bits of an accumulator of floats
_WIDER = {"bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",)}


@dataclass(frozen=True, eq=False)
class ChainOp:
    """An op of a chain, and the number of the operand that the chain comes through."""

    op: ir.Operation
    through: int


def why_not_linear(
    body: LoopBody, steps: Sequence[ChainOp], kind: str, element: ir.Type
) -> str | None:
    """Why a chain is not linear for accumulation by `kind` in elements of a type."""
    if not _accumulates(kind, element):
        return f"it is accumulated by {kind} of {element}"
    for step in steps:
        reason = _why_not(body, step, kind)
        if reason:
            return reason
    return _why_not_widened(steps, kind)


def signature(step: ChainOp) -> tuple[object, ...]:
    """What two steps have in common that do the same; their types may differ, and their channels,
    as long as ids count the same."""
    op = step.op
    attributes = [
        (name, str(value)) for name, value in op.attributes.items() if name != "channel_handle"
    ]
    others = [_described(value) for i, value in enumerate(op.operands) if i != step.through]
    in_partitions = channel_number(op) > 0
    shape = tuple(shape_of(op.results[0]))
    return (op.name, step.through, tuple(sorted(attributes)), in_partitions, tuple(others), shape)


def takes_number(op: ir.Operation) -> bool:
    """Whether what an op of a chain reads besides is of the chain's element type."""
    return op.name in _SCALING or op.name == "stablehlo.pad"


def _described(value: ir.Value) -> object:
    splat = splat_of(value)
    return value if splat is None else (repr(splat), str(value.type))


def _accumulates(kind: str, element: ir.Type) -> bool:
    """Whether the identity of an accumulation is known, and a total of it is well defined."""
    if isinstance(element, ir.FloatType):
        wide = element.width >= _LEAST_FLOAT
        return wide and kind in ("add", "maximum", "minimum")
    if not isinstance(element, ir.IntegerType) or (kind == "add" and element.width == 1):
        return False
    return identity_of(kind, element) is not None


def _why_not(body: LoopBody, step: ChainOp, kind: str) -> str | None:
    op = step.op
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return f"the {named(op)} has a value without a static shape"
    others = [value for i, value in enumerate(op.operands) if i != step.through]
    if not all(body.is_indexed(value) and not body.is_moving(value) for value in others):
        return f"the {named(op)} has another operand that changes in the loop"
    if op.name in REDUCING:
        return _why_not_reduced(op, kind)
    if op.name in _MOVING | _COMPLETE:
        return None if step.through == 0 else f"the {named(op)} reads it as an index"
    if op.name == CONVERT:
        return _why_not_converted(op)
    if kind == "add" and _is_additive(step, others):
        return None
    return f"the {named(op)} is not linear for {kind}"


def _why_not_reduced(op: ir.Operation, kind: str) -> str | None:
    if len(op.operands) != 1:
        return f"the {named(op)} has several operands"
    if reducer_kind(op.regions[0].blocks[0]) != kind:
        return f"the {named(op)} reduces otherwise than by {kind}"
    if element_of(op.operands[0]) != element_of(op.results[0]):
        return f"the {named(op)} changes the element type"
    return None


def _is_additive(step: ChainOp, others: Sequence[ir.Value]) -> bool:
    """Whether an op is linear for addition alone."""
    op = step.op
    if op.name == "stablehlo.negate" or op.name in _SENDING:
        return True
    if op.name == "stablehlo.pad":
        return step.through == 0 and is_identity_of("add", others[0])
    if op.name not in _SCALING:
        return False
    if op.name == "stablehlo.multiply":
        return True
    return step.through == 0 and isinstance(element_of(op.results[0]), ir.FloatType)


def _why_not_converted(op: ir.Operation) -> str | None:
    """Conversions are to a type that has all values of the one before, and is of its kind."""
    before, after = element_of(op.operands[0]), element_of(op.results[0])
    if isinstance(before, ir.FloatType) and isinstance(after, ir.FloatType):
        return None if _is_wider(before, after) else f"the {named(op)} rounds"
    if isinstance(before, ir.IntegerType) and isinstance(after, ir.IntegerType):
        from_unsigned = before.is_unsigned or before.width == 1
        keeps = from_unsigned == after.is_unsigned or from_unsigned
        if keeps and before.width < after.width:
            return None
        return f"the {named(op)} does not keep every integer"
    return f"the {named(op)} changes the kind of number"


def _is_wider(before: ir.FloatType, after: ir.FloatType) -> bool:
    """Whether every float of one type is one of the other."""
    return before == after or str(after) in _WIDER.get(str(before), ())


def _why_not_widened(steps: Sequence[ChainOp], kind: str) -> str | None:
    """Integers that wrap around before they are widened would not do so afterwards."""
    if kind != "add" or not isinstance(element_of(steps[0].op.operands[0]), ir.IntegerType):
        return None
    computed: ir.Operation | None = None
    for step in steps:
        if step.op.name == CONVERT and computed is not None:
            return f"the {named(computed)} may wrap around before the {named(step.op)}"
        if step.op.name in REDUCING | _SCALING or step.op.name == "stablehlo.negate":
            computed = step.op
    return None
