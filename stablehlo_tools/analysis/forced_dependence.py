"""Which collectives must be over before a value can exist, whatever a compiler simplifies.

For each value two sets of collectives are kept, as bits: those that *each* element depends on, and
those that the *whole* does (one element of it at least). One more bit, `VARIES`, says that the
value surely depends on what is known only at run time, so that no compiler makes it a constant.

An op hands them on from its operands to its results where it is listed here, and where no identity
may take the dependence away: `x * 0`, `x - x` and `(x + y) - x` of integers, `pow(x, 0)`, a select
on a constant or by its predicate alone, the part of a concatenation that a slice leaves out, an
index, an element of a barrier that nobody uses. Float `x * 0` and `x - x` stay: XLA keeps NaN.
Sound against XLA's simplifier, not complete: what is left out can only lead to a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

import numpy as np

from stablehlo_tools.analysis.trip_counts import MIRRORED, comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.constants import value_of
from stablehlo_tools.ir.values import is_float

BARRIER = "stablehlo.optimization_barrier"
VARIES = 1  # the lowest bit: no collective's


class Dependence(NamedTuple):
    """Sets of collectives as bits, and `VARIES`; `each` is part of `whole`."""

    each: int = 0
    whole: int = 0

    def common(self, other: Dependence) -> Dependence:
        """What holds of a value that is the one or the other."""
        return Dependence(self.each & other.each, self.whole & other.whole)

    def both(self, other: Dependence) -> Dependence:
        """What holds of a value that is computed from the two."""
        return Dependence(self.each | other.each, self.whole | other.whole)

    def without(self, bits: int) -> Dependence:
        """All but some."""
        return Dependence(self.each & ~bits, self.whole & ~bits)

    def with_all(self, bits: int) -> Dependence:
        """With collectives that every element depends on besides."""
        return Dependence(self.each | bits, self.whole | bits)


NOTHING = Dependence()
GIVEN = Dependence(VARIES, VARIES)  # a value that comes from outside of the program
Known = Mapping[ir.Value, Dependence]


def _names(text: str) -> frozenset[str]:
    return frozenset(f"stablehlo.{name}" for name in text.split())


# What the result takes of its operands. What is not listed hands nothing on.
_RULES = {
    **dict.fromkeys(
        _names(
            "abs after_all async_done bitcast_convert broadcast_in_dim cbrt ceil cholesky convert "
            "cosine count_leading_zeros custom_call dynamic_broadcast_in_dim dynamic_reshape "
            "exponential exponential_minus_one fft floor log log_plus_one logistic negate not "
            "popcnt reduce_precision reshape reverse rng_bit_generator round_nearest_afz "
            "round_nearest_even rsqrt sign sine sqrt tan tanh transpose triangular_solve"
        )
        | {"sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier"}
        | {f"chlo.{name}" for name in ("erf", "erfc", "erf_inv", "square", "lgamma", "digamma")}
        | {f"chlo.{name}" for name in ("sinh", "cosh", "tan", "asin", "acos", "atan", "asinh")}
        | {f"chlo.{name}" for name in ("acosh", "atanh")},
        "all",
    ),
    **dict.fromkeys(
        _names("add and atan2 divide dot dot_general multiply or remainder subtract xor"),
        "arithmetic",
    ),
    **dict.fromkeys(
        _names("clamp maximum minimum power shift_left shift_right_arithmetic shift_right_logical"),
        "limiting",
    ),
    **dict.fromkeys(_names("slice dynamic_slice gather"), "slice"),
    **dict.fromkeys(_names("real imag"), "part"),
    **dict.fromkeys(_names("concatenate pad complex scatter dynamic_update_slice"), "assembly"),
    "stablehlo.compare": "compare",
    "stablehlo.convolution": "convolution",
    "stablehlo.reduce": "reduction",
    "stablehlo.reduce_window": "reduction",
    "stablehlo.select": "select",
    "stablehlo.sort": "own",
}
_UPDATE = "stablehlo.dynamic_update_slice"
_REDUCERS = _names("add and maximum minimum multiply or")
_HANDS_ON = _names("broadcast_in_dim reshape convert transpose reverse negate")
_DEEPEST_CONSTANT = 8
# Comparisons with a constant on the right that hold, or fail, for no range that XLA knows.
_OPEN = frozenset({"EQ", "NE", "GT", "LE"})


def rule_of(name: str) -> str | None:
    """By which rule an op of this name hands dependences on; None: it hands on none."""
    return _RULES.get(name)


class Transfer:
    """Hands dependences on through ops that neither communicate nor control."""

    def __init__(self, find_live: Callable[[], set[ir.Value]]) -> None:
        self.find_live = find_live
        self.live: set[ir.Value] | None = None
        self.empty: dict[ir.Type, bool] = {}

    def results(self, op: ir.Operation, name: str, known: Known) -> list[Dependence] | None:
        """The dependences of the results of an op of this name; None where no operand has any."""
        found = [known.get(value) for value in op.operands]
        if not any(found):
            return None
        operands = [part or NOTHING for part in found]
        if name == BARRIER:
            return self.of_elements(op, self._barrier(op, operands))
        rule = _RULES.get(name)
        if rule == "own":  # one sorted list for each operand
            return operands
        result = NOTHING if rule is None else self._ordinary(op, name, rule, operands)
        return self.of_elements(op, [result] * len(op.results))

    def of_elements(self, op: ir.Operation, found: Sequence[Dependence]) -> list[Dependence]:
        """Dependences of the results; of a tensor without elements nothing is ever computed."""
        return [
            NOTHING if self._is_empty(value.type) else part
            for value, part in zip(op.results, found, strict=True)
        ]

    def _barrier(self, op: ir.Operation, operands: list[Dependence]) -> list[Dependence]:
        """Every element waits for all that the compiler keeps; tokens it always keeps."""
        if len(operands) == 1:
            return operands
        kept = 0
        for result, part in zip(op.results, operands, strict=True):
            if part.whole & ~kept == 0:
                continue
            if _is_token(result) or self._is_used(result):
                kept |= part.whole
        kept &= ~VARIES  # each element keeps its own value
        return [part.with_all(kept) for part in operands]

    def _is_used(self, value: ir.Value) -> bool:
        if self.live is None:
            self.live = self.find_live()
        return value in self.live

    def _ordinary(
        self, op: ir.Operation, name: str, rule: str, operands: Sequence[Dependence]
    ) -> Dependence:
        if rule == "all":
            return reduce(Dependence.both, operands)
        if rule == "slice":  # an index may be clamped, or all elements may be alike
            return Dependence(operands[0].each, operands[0].each)
        if rule == "part":
            is_complex = _is_complex(op.operands[0].type)
            return Dependence(operands[0].each, operands[0].each) if is_complex else NOTHING
        if rule == "assembly":
            return self._assembled(op, name, operands)
        if rule == "select":
            return _selected(op, operands)
        if rule == "convolution":
            return NOTHING if _may_read_padding_only(op) else _computed(op, operands)
        if rule == "reduction":
            whole = len(op.results) == 1 and _is_plain_reduction(op)
            return operands[0] if whole and not _may_read_padding_only(op) else NOTHING
        if rule == "compare":
            return NOTHING if _is_decided(op, operands) else _unrelated(operands)
        if rule == "limiting" and _may_limit(op, name, operands):
            return NOTHING
        return _computed(op, operands)

    def _assembled(self, op: ir.Operation, name: str, operands: Sequence[Dependence]) -> Dependence:
        """Each element comes from one of the operands."""
        values = list(op.operands)
        if name == _UPDATE:  # all but the indices
            values, operands = values[:2], operands[:2]
            if values[0].type == values[1].type:
                return operands[1]
        parts = [
            part
            for part, value in zip(operands, values, strict=True)
            if not self._is_empty(value.type)
        ]
        each = reduce(and_, (part.each for part in parts), -1) if parts else 0
        drops = name == "stablehlo.pad" and _crops(op)
        whole = each if drops else reduce(or_, (part.whole for part in parts), 0)
        return Dependence(each, whole)

    def _is_empty(self, kind: ir.Type) -> bool:
        if kind not in self.empty:
            self.empty[kind] = has_no_elements(kind)
        return self.empty[kind]


def _computed(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Of arithmetic: of floats, all operands; of integers, what cannot cancel or be absorbed."""
    if is_float(op.operands[-1].type):
        return reduce(Dependence.both, operands)
    for value, part in zip(op.operands, operands, strict=True):
        if not part.whole & VARIES and _may_absorb(op.name, constant_elements(value)):
            return NOTHING
    return _unrelated(operands)


def _unrelated(operands: Sequence[Dependence]) -> Dependence:
    """All operands, but for what two of them have in common: `x - x`."""
    one, *others = operands
    result = one
    for other in others:
        shared = one.whole & other.whole
        result = result.without(shared).both(other.without(shared))
        one = one.both(other)
    return result


def _selected(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Both sides where the predicate surely varies; of a select of a select, not even then.

    The predicate itself does not count: the two sides may be the same.
    """
    _, one, other = operands
    nested = any(_producer_name(value) == op.name for value in list(op.operands)[1:])
    if operands[0].each & VARIES and not nested:
        return one.both(other)
    return one.common(other)


def _may_limit(op: ir.Operation, name: str, operands: Sequence[Dependence]) -> bool:
    """Whether what is no run-time value may be a bound or an exponent that leaves nothing open."""
    fixed = [
        constant_elements(v)
        for v, p in zip(op.operands, operands, strict=True)
        if not p.whole & VARIES
    ]
    if name == "stablehlo.power" or "shift" in name:
        return bool(fixed)
    if name == "stablehlo.clamp":
        return len(fixed) > 1
    if not is_float(op.operands[0].type):
        return False  # as other integers
    return any(constant is None or not np.isfinite(constant).all() for constant in fixed)


def _may_absorb(name: str, constant: np.ndarray | None) -> bool:
    """Whether an integer constant, or one not known, may take the other's influence away."""
    if name in ("stablehlo.add", "stablehlo.subtract", "stablehlo.xor"):
        return False
    if (
        constant is None
        or constant.dtype == object
        or not np.issubdtype(constant.dtype, np.integer)
    ):
        return True
    if name == "stablehlo.multiply":  # a product of odd numbers never overflows to zero
        return bool((constant % 2 == 0).any())
    if name == "stablehlo.divide":
        return bool((constant == 0).any())
    if name == "stablehlo.remainder":
        return bool((abs(constant) < 2).any())
    if name in ("stablehlo.maximum", "stablehlo.minimum"):
        limits = np.iinfo(constant.dtype)
        return bool(np.isin(constant, (limits.min, limits.max)).any())
    return True


def _is_decided(compare: ir.Operation, operands: Sequence[Dependence]) -> bool:
    """Whether the range of one side may decide a comparison with what is no run-time value."""
    left, right = compare.operands
    varies = [bool(part.whole & VARIES) for part in operands]
    if all(varies):
        return False
    name = comparison_direction(compare)
    constant = constant_elements(right)
    if constant is None:
        name, constant = MIRRORED[name], constant_elements(left)
    if constant is None or name not in _OPEN or not np.isfinite(constant).all():
        return True
    if not np.issubdtype(constant.dtype, np.integer) or name in ("EQ", "NE"):
        return False
    limits = np.iinfo(constant.dtype)
    return bool(np.isin(constant, (limits.min, limits.max)).any())


def _is_plain_reduction(op: ir.Operation) -> bool:
    """Whether the region combines its two arguments in one op that loses neither."""
    body = op.regions[0].blocks[0]
    end = terminator(body).operands[0]
    combined = _producer_name(end) in _REDUCERS
    return combined and set(end.owner.operation.operands) == set(body.arguments)


def _may_read_padding_only(op: ir.Operation) -> bool:
    """Whether a window op crops what it reads."""
    padding = op.attributes.get("padding")
    return padding is not None and bool((np.array(ir.DenseIntElementsAttr(padding)) < 0).any())


def _producer_name(value: ir.Value) -> str:
    return "" if isinstance(value.owner, ir.Block) else value.owner.operation.name


def constant_elements(value: ir.Value, depth: int = 0) -> np.ndarray | None:
    """The elements, or some of the same values, of a value made of constants alone."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    op = owner.operation
    if op.name == "stablehlo.constant":
        return _elements(value_of(op))
    if op.name == "stablehlo.iota":
        return np.arange(2)
    if op.name not in _HANDS_ON or depth == _DEEPEST_CONSTANT:
        return None
    inner = constant_elements(op.operands[0], depth + 1)
    return None if inner is None else inner


def _elements(attribute: ir.Attribute | None) -> np.ndarray:
    """The elements of a constant; of a splat, one of them; infinity where they cannot be read."""
    if attribute is None:
        return np.array(math.inf)
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


def _is_complex(kind: ir.Type) -> bool:
    return isinstance(ir.ShapedType(kind).element_type, ir.ComplexType)


def _is_token(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.RankedTensorType)


def has_no_elements(kind: ir.Type) -> bool:
    """Whether a type is that of a tensor with a dimension of size 0."""
    return isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and 0 in kind.shape
