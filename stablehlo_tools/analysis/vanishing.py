"""Uses that compilers fold away: a value that is used by nothing else is deleted all the same.

Judged op by op, by the rules of `forced_dependence`, each operand but constants taken to vary.
Where those rules leave out a predicate, an index or the key of a reduction, it counts as used here:
that the order through it is not sure does not mean that compilers see through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.forced_dependence import (
    VARIES,
    Dependence,
    Transfer,
    constant_elements,
    rule_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import is_float

OPAQUE = "stablehlo_tools.keeps_alive"  # unit: made so that no compiler sees through the op
_TRANSFER = Transfer(set)  # asked of no barrier, for which alone it needs live values


def surviving_operands(result: ir.Value) -> Sequence[ir.Value]:
    """The operands of an op's result that it still depends on once compilers have simplified it."""
    owner = result.owner
    assert not isinstance(owner, ir.Block)
    op = owner.operation
    if not _may_fold(op):
        return op.operands
    operands = list(op.operands)
    computed = [value for value in operands if constant_elements(value) is None]
    known: dict[ir.Value, Dependence] = {}
    for position, value in enumerate(computed):
        bits = VARIES | 2 << position
        known[value] = Dependence(bits, bits)
    found = _TRANSFER.results(op, op.name, known)
    if found is None:
        return operands
    left = found[ir.OpResult(result).result_number].whole
    survivors = [value for i, value in enumerate(computed) if left >> (i + 1) & 1]
    return [*survivors, *_steering(op, operands)]


def may_vanish(op: ir.Operation) -> bool:
    """Whether some computed operand's use may be folded away."""
    if not _may_fold(op):
        return False
    computed = {value for value in op.operands if constant_elements(value) is None}
    return any(computed.difference(surviving_operands(result)) for result in op.results)


def _may_fold(op: ir.Operation) -> bool:
    rule = rule_of(op.name)
    if rule in (None, "all", "own", "convolution") or OPAQUE in op.attributes:
        return False
    if rule == "reduction":
        return len(op.results) == 1
    return rule != "arithmetic" or not is_float(op.results[0].type)


def _steering(op: ir.Operation, operands: list[ir.Value]) -> list[ir.Value]:
    """Predicates and indices, which decide what is taken."""
    rule = rule_of(op.name)
    if rule == "select":
        is_open = operands[1] != operands[2] and constant_elements(operands[0]) is None
        return operands[:1] if is_open else []
    if rule == "slice":
        return operands[1:]
    return operands[2:] if op.name == "stablehlo.dynamic_update_slice" else []
