"""Which collectives must be over before a value can exist, whatever a compiler simplifies.

For each value two sets of collectives are kept, as bits: those that *each* element depends on, and
those that the *whole* does (one element of it at least). An op hands them on from its operands to
its results, except where an identity may take the dependence away: `x * 0` and `x - x` of integers,
`pow(x, 0)`, a select on a constant, the part of a concatenation that a slice leaves out, an element
of a barrier that nobody uses. Sound against XLA's simplifier, not complete: a dependence that is
left out can only lead to a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

import numpy as np

from stablehlo_tools.bindings import ir

BARRIER = "stablehlo.optimization_barrier"


class Dependence(NamedTuple):
    """Sets of collectives as bits; `each` is part of `whole`."""

    each: int = 0
    whole: int = 0

    def common(self, other: Dependence) -> Dependence:
        """What holds of a value that is the one or the other."""
        return Dependence(self.each & other.each, self.whole & other.whole)

    def with_all(self, bits: int) -> Dependence:
        """With collectives that every element depends on besides."""
        return Dependence(self.each | bits, self.whole | bits)


NOTHING = Dependence()
Known = Mapping[ir.Value, Dependence]

# Ops that some constant operand, or equal operands, may turn into a constant.
_FOLDING = frozenset(
    f"stablehlo.{name}"
    for name in (
        "and",
        "clamp",
        "compare",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "or",
        "power",
        "remainder",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "subtract",
        "xor",
    )
)
_UPDATE = "stablehlo.dynamic_update_slice"
_SELECT = "stablehlo.select"
# What the result takes of its operands, where that is not all of each.
_SPECIAL = {
    **dict.fromkeys(_FOLDING, "folding"),
    **dict.fromkeys(("stablehlo.get_dimension_size", "stablehlo.get_tuple_element"), "sizes"),
    **dict.fromkeys(("stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.gather"), "slice"),
    **dict.fromkeys(("stablehlo.real", "stablehlo.imag"), "part"),
    **dict.fromkeys(
        ("stablehlo.concatenate", "stablehlo.pad", "stablehlo.complex", "stablehlo.scatter"),
        "assembly",
    ),
    _UPDATE: "assembly",
}
_HANDS_ON = frozenset(
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "reshape", "convert", "transpose", "reverse", "negate")
)
_DEEPEST_CONSTANT = 8


class Transfer:
    """Hands dependences on through ops that neither communicate nor control."""

    def __init__(self, find_live: Callable[[], set[ir.Value]], *, trust_uses: bool) -> None:
        self.find_live = find_live
        self.trust_uses = trust_uses  # beside a token, a value with a use is not dropped
        self.live: set[ir.Value] | None = None
        self.empty: dict[ir.Type, bool] = {}
        self.foldable: set[ir.Value] = set()  # may be constants although computed

    def results(self, op: ir.Operation, name: str, known: Known) -> list[Dependence] | None:
        """The dependences of the results of an op of this name; None where no operand has any."""
        found = [known.get(value) for value in op.operands]
        if not any(found):
            return None
        operands = [part or NOTHING for part in found]
        if name == BARRIER:
            return self._barrier(op, operands)
        result = self._ordinary(op, name, operands)
        if result == NOTHING:
            self.foldable.update(op.results)
        return [NOTHING if self._is_empty(value.type) else result for value in op.results]

    def _barrier(self, op: ir.Operation, operands: list[Dependence]) -> list[Dependence]:
        """Every element waits for all that the compiler keeps; tokens it always keeps."""
        if len(operands) == 1:
            return operands
        results = list(op.results)
        trusted = self.trust_uses and any(_is_token(result) for result in reversed(results))
        kept = 0
        for result, part in zip(results, operands, strict=True):
            if part.whole & ~kept == 0:
                continue
            if self._is_used(result, trusted=trusted) or _is_token(result):
                kept |= part.whole
        whole = Dependence(kept, kept)
        return [whole if part.whole & ~kept == 0 else part.with_all(kept) for part in operands]

    def _is_used(self, value: ir.Value, *, trusted: bool) -> bool:
        if trusted:
            return any(True for _ in value.uses)
        if self.live is None:
            self.live = self.find_live()
        return value in self.live

    def _ordinary(self, op: ir.Operation, name: str, operands: Sequence[Dependence]) -> Dependence:
        special = _SPECIAL.get(name)
        if special == "sizes":
            return NOTHING
        if special == "slice":
            indices = reduce(or_, (part.whole for part in operands[1:]), 0)
            return Dependence(operands[0].each, operands[0].each).with_all(indices)
        if special == "part":
            return Dependence(operands[0].each, operands[0].each)
        if name == _UPDATE and op.operands[1].type == op.operands[0].type:
            return operands[1]
        if special == "assembly":
            return self._assembled(op, operands)
        if name == _SELECT and self._may_be_constant(op.operands[0]):
            return operands[1].common(operands[2])
        if special == "folding" and self._may_fold(op):
            return NOTHING
        if len(operands) == 1:
            return operands[0]
        return Dependence(
            reduce(or_, (part.each for part in operands)),
            reduce(or_, (part.whole for part in operands)),
        )

    def _assembled(self, op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
        """Each element comes from one of the operands."""
        parts = [
            part
            for part, value in zip(operands, op.operands, strict=True)
            if not self._is_empty(value.type)
        ]
        each = reduce(and_, (part.each for part in parts), -1) if parts else 0
        drops = op.name == "stablehlo.pad" and _crops(op)
        whole = each if drops else reduce(or_, (part.whole for part in parts), 0)
        return Dependence(each, whole)

    def _may_fold(self, op: ir.Operation) -> bool:
        """Whether an identity may make the op's result independent of a computed operand."""
        values = list(op.operands)
        integral = not _is_float(values[-1].type)
        if integral and len(set(values)) < len(values):
            return True
        if any(value in self.foldable for value in values):
            return True
        constants = [_constant(value) for value in values]
        if all(constant is None for constant in constants):
            return False
        if integral:
            return any(c is not None and _is_absorbing(op.name, c) for c in constants)
        if op.name == "stablehlo.power":
            return True
        if op.name == "stablehlo.clamp":
            return constants[0] is not None and constants[2] is not None
        extreme = op.name in ("stablehlo.maximum", "stablehlo.minimum")
        return extreme and any(c is not None and bool(np.isinf(c).any()) for c in constants)

    def _is_empty(self, kind: ir.Type) -> bool:
        if kind not in self.empty:
            self.empty[kind] = _has_no_elements(kind)
        return self.empty[kind]

    def _may_be_constant(self, value: ir.Value) -> bool:
        return value in self.foldable or _constant(value) is not None


def _is_absorbing(name: str, constant: np.ndarray) -> bool:
    """Whether an integer constant may take the other operand's influence away."""
    if name in ("stablehlo.subtract", "stablehlo.xor"):
        return False
    if not np.issubdtype(constant.dtype, np.integer):
        return True
    if name == "stablehlo.multiply":
        return bool((constant == 0).any())
    if name in ("stablehlo.and", "stablehlo.or"):
        return bool(np.isin(constant, (0, -1, np.iinfo(constant.dtype).max)).any())
    if name in ("stablehlo.compare", "stablehlo.maximum", "stablehlo.minimum"):
        limits = np.iinfo(constant.dtype)
        return bool(np.isin(constant, (limits.min, limits.max)).any())
    return True


def _constant(value: ir.Value, depth: int = 0) -> np.ndarray | None:
    """The elements, or some of the same values, of a value made of constants alone."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    op = owner.operation
    if op.name == "stablehlo.constant":
        return _elements(op.attributes["value"])
    if op.name == "stablehlo.iota":
        return np.zeros(1, np.int64)
    if op.name not in _HANDS_ON or depth == _DEEPEST_CONSTANT:
        return None
    inner = _constant(op.operands[0], depth + 1)
    return None if inner is None else inner


def _elements(attribute: ir.Attribute) -> np.ndarray:
    """The elements of a constant; of a splat, one of them; infinity where they cannot be read."""
    try:
        if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
            splat = attribute.get_splat_value()
            if isinstance(splat, ir.FloatAttr | ir.BoolAttr):
                return np.array(splat.value)
        elements = np.array(ir.DenseElementsAttr(attribute))
    except (ValueError, TypeError, BufferError):
        return np.array(math.inf)
    # An element type without a NumPy counterpart comes as an object.
    return np.array(math.inf) if elements.dtype == object else elements


def _crops(pad: ir.Operation) -> bool:
    edges = (pad.attributes[name] for name in ("edge_padding_low", "edge_padding_high"))
    return any(amount < 0 for edge in edges for amount in ir.DenseI64ArrayAttr(edge))


def _is_float(kind: ir.Type) -> bool:
    if not isinstance(kind, ir.RankedTensorType):
        return False
    return isinstance(kind.element_type, ir.FloatType | ir.ComplexType)


def _is_token(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.RankedTensorType)


def _has_no_elements(kind: ir.Type) -> bool:
    return isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and 0 in kind.shape
