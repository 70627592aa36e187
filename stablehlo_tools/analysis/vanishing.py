"""Uses that compilers fold away: a value that is used by nothing else is deleted all the same.

Only what is plain to see counts here: `x * 0`, `x - x` of integers, a select on a constant. What
merely might fold is a matter of order (`forced_dependence`), not of whether a collective stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.forced_dependence import constant_elements
from stablehlo_tools.bindings import ir

_SAME_CANCELS = frozenset(f"stablehlo.{name}" for name in ("compare", "subtract", "xor"))
_BOUNDED = frozenset({"stablehlo.maximum", "stablehlo.minimum"})
_SELECT = "stablehlo.select"
_CANDIDATES = (
    _SAME_CANCELS
    | _BOUNDED
    | {_SELECT}
    | {f"stablehlo.{name}" for name in ("and", "clamp", "multiply", "or", "power")}
)


def surviving_operands(result: ir.Value) -> Sequence[ir.Value]:
    """The operands of an op's result that it still depends on once compilers have simplified it."""
    owner = result.owner
    assert not isinstance(owner, ir.Block)
    op = owner.operation
    if op.name not in _CANDIDATES:
        return op.operands
    if op.name == _SELECT:
        return _selected(list(op.operands))
    return [] if _folds(op.name, list(op.operands)) else op.operands


def may_vanish(op: ir.Operation) -> bool:
    """Whether some operand's use may be folded away."""
    if op.name not in _CANDIDATES:
        return False
    return len(surviving_operands(op.results[0])) < len(op.operands)


def _selected(operands: list[ir.Value]) -> Sequence[ir.Value]:
    predicate = constant_elements(operands[0])
    if predicate is None or predicate.dtype != np.bool_:
        return operands
    if predicate.all():
        return [operands[1]]
    return operands if predicate.any() else [operands[2]]


def _folds(name: str, operands: list[ir.Value]) -> bool:
    """Whether the result is a constant, whatever the computed operands are."""
    constants = [constant_elements(value) for value in operands]
    known = [constant for constant in constants if constant is not None]
    if name == "stablehlo.power":
        return constants[1] is not None and not constants[1].any()
    if name == "stablehlo.clamp":
        low, high = constants[0], constants[2]
        if low is None or high is None or not low.size or not high.size:
            return False
        return bool(low.min() >= high.max())
    if name in _BOUNDED and _is_float(operands[0]):
        limit = np.inf if name.endswith("maximum") else -np.inf
        return any(bool(np.all(constant == limit)) for constant in known)
    if _is_float(operands[0]):
        return False
    if name in _SAME_CANCELS:
        return operands[0] == operands[1]
    return any(_absorbs(name, constant) for constant in known)


def _absorbs(name: str, constant: np.ndarray) -> bool:
    """Whether every element of an integer constant settles the result."""
    if name in ("stablehlo.multiply", "stablehlo.and"):
        return not constant.any()
    if constant.dtype == np.bool_:
        return name == "stablehlo.or" and bool(constant.all())
    limits = np.iinfo(constant.dtype)
    settled = {
        "stablehlo.or": -1 if limits.min < 0 else limits.max,
        "stablehlo.maximum": limits.max,
        "stablehlo.minimum": limits.min,
    }
    return name in settled and bool((constant == settled[name]).all())


def _is_float(value: ir.Value) -> bool:
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType):
        return False
    return isinstance(kind.element_type, ir.FloatType | ir.ComplexType)
