"""Finds the collectives that must finish before a value can exist, whatever XLA simplifies.

For each value, three sets of collectives are kept as bits: those that *each* element depends on,
those that the elements of a *part* depend on, and those that the *whole* does (at least one
element). One more bit, `VARIES`, says that the value depends on run-time data, so that no compiler
folds it to a constant.

Ops that move elements pass on the dependences of the elements that remain
(`elements.element_moves`). Elements that are overwritten, sliced off or not selected lose theirs.
Other ops pass dependences on only if they are listed here and no identity can remove the
dependence. Such identities are `x * 0`, `x - x` and `(x + y) - x` of integers, `pow(x, 0)` and
`max(min(x, y), y)`. Predicates of selects, indices and unused elements of barriers are not passed
on either. Float `x * 0` and `x - x` keep theirs, because XLA preserves NaN. Sound against XLA's
simplifier, not complete: a missing rule can only lead to a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from operator import and_, or_
from typing import NamedTuple

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import is_annotation
from stablehlo_tools.analysis.elements.boxes import Box, contains, shape_of, size_of, whole_box
from stablehlo_tools.analysis.elements.element_links import (
    OF_CONVOLUTION,
    OF_REDUCE_WINDOW,
    UNFOLLOWED,
    Link,
    identity,
    link_of,
    reach_of,
)
from stablehlo_tools.analysis.elements.element_moves import moves_of, scatter_writes
from stablehlo_tools.analysis.loops import comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shape
from stablehlo_tools.dialect.integer_arithmetic import MIRRORED
from stablehlo_tools.dialect.names import (
    AFTER_ALL,
    ASYNC_DONE,
    BARRIER,
    BITCAST_CONVERT,
    COMPARE,
    CONSTANT,
    CONVERT,
    CONVOLUTION,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    POWER,
    SCATTER,
    SELECT,
)
from stablehlo_tools.dialect.reducers import integer_bounds, reducer_kind
from stablehlo_tools.dialect.traits import LAYOUT, Trait, full_names, ops_with, ops_with_any
from stablehlo_tools.ir.values import is_float, producer, splat_of, value_of
from stablehlo_tools.ir.views import Combining

VARIES = 1  # the lowest bit, which belongs to no collective
_MOST_PARTS = 8  # of one value; the largest are kept

Parts = tuple[tuple[Box, int], ...]


class Dependence(NamedTuple):
    """Sets of collectives as bits, and `VARIES` if the value depends on run-time data.

    `each` holds of every element, the bits of a part of every element in its box, and `whole` of at
    least one element, anywhere. `whole` includes the other two.
    """

    each: int = 0
    whole: int = 0
    parts: Parts = ()

    def common(self, other: Dependence) -> Dependence:
        """Returns the dependences of a value that is either this one or the other.

        Only this value's parts are kept, so that a fixed-point iteration ends.
        """
        each = self.each & other.each
        parts = [(box, bits & other.bits_in_box(box)) for box, bits in self.parts]
        return Dependence(each, self.whole & other.whole, merge_parts(parts, each))

    def both(self, other: Dependence) -> Dependence:
        """Returns the dependences of a value whose elements are each computed from both values."""
        each = self.each | other.each
        parts = merge_parts(self.parts + other.parts, each)
        return Dependence(each, self.whole | other.whole, parts)

    def map_bits(self, change: Callable[[int], int]) -> Dependence:
        """Returns the dependences with `change` applied to each set of bits."""
        each = change(self.each)
        parts = merge_parts([(box, change(bits | self.each)) for box, bits in self.parts], each)
        return Dependence(each, change(self.whole), parts)

    def only(self, bits: int) -> Dependence:
        """Returns the dependences restricted to these bits."""
        return self.map_bits(lambda held: held & bits)

    def with_all(self, bits: int) -> Dependence:
        """Returns the dependences, with these bits added to every element."""
        return self.map_bits(lambda held: held | bits)

    def bits_in_box(self, box: Box) -> int:
        """Returns the bits that every element of a box depends on."""
        bits = self.each
        for outer, inner in self.parts:
            if contains(outer, box):
                bits |= inner
        return bits


NOTHING = Dependence()
GIVEN = Dependence(VARIES, VARIES)  # a value from outside of the program


def merge_parts(parts: Iterable[tuple[Box, int]], each: int) -> Parts:
    """Returns parts in canonical order, merged by box, without the bits of `each`."""
    if not parts:
        return ()
    by_box: dict[Box, int] = {}
    for box, bits in parts:
        if bits & ~each:
            by_box[box] = by_box.get(box, 0) | bits & ~each
    if len(by_box) < 2:
        return tuple(by_box.items())
    ordered = sorted(
        by_box.items(),
        key=lambda part: (-size_of(part[0]), [(n.start, n.stop, n.step) for n in part[0]]),
    )
    return tuple(ordered[:_MOST_PARTS])


Known = Mapping[ir.Value, Dependence]


_BOUNDING = full_names("clamp maximum minimum")
# The rule by which the result depends on its operands. Ops that are not listed pass nothing on.
_RULES = {
    **dict.fromkeys(
        ops_with(Trait.UNARY) - ops_with_any(Trait.PREDICATE | Trait.COMPLEX_PART) - UNFOLLOWED
        | ops_with(Trait.SHARDING_ONLY)
        | {AFTER_ALL, ASYNC_DONE},
        "all",
    ),
    **dict.fromkeys(
        ops_with(Trait.LIBRARY | Trait.COSTLY) | full_names("rng_bit_generator"), "mixing"
    ),
    **dict.fromkeys(full_names("dynamic_broadcast_in_dim dynamic_reshape"), "first"),
    **dict.fromkeys(
        (ops_with_any(Trait.COMMUTATIVE | Trait.CONTRACTION) - _BOUNDING - {CONVOLUTION})
        | full_names("atan2 divide remainder subtract"),
        "arithmetic",
    ),
    **dict.fromkeys(ops_with(Trait.SHIFT) | {POWER}, "limiting"),
    **dict.fromkeys(_BOUNDING, "bounding"),
    **dict.fromkeys(LAYOUT, "order"),
    **dict.fromkeys(ops_with_any(Trait.COMPLEX_PART | Trait.JOIN), "assembly"),
    **dict.fromkeys(ops_with(Trait.PIECE), "slice"),
    **dict.fromkeys(ops_with(Trait.REDUCTION), "reduction"),
    BITCAST_CONVERT: "bitcast",
    COMPARE: "compare",
    CONVOLUTION: "convolution",
    SCATTER: "scatter",
    SELECT: "select",
    "stablehlo.sort": "own",
}
_HANDS_ON = LAYOUT | {CONVERT, "stablehlo.negate"}
_CONSTANT = frozenset({CONSTANT, IOTA})
_DEEPEST_CONSTANT = 8
# Comparisons with a constant on the right that no range known to XLA decides.
_OPEN = frozenset({"EQ", "NE", "GT", "LE"})
_LAYOUT = LAYOUT | {CONVERT}
_MIXING = ops_with(Trait.JOIN) | {GATHER, SCATTER, SELECT}
_COMPUTED = (
    frozenset(
        name
        for name, rule in _RULES.items()
        if rule in ("all", "arithmetic", "bounding", "limiting")
    )
    - ops_with(Trait.CONTRACTION)
    - {AFTER_ALL, ASYNC_DONE}
)
_SUMS = full_names("add multiply")  # floats keep all dependences through these
_SMALL = 100  # the largest whole number that is used as a value of every type except single bits
_MOST_LOOKED_AT = 64  # ops before a reduction


def rule_of(name: str) -> str | None:
    """Returns the rule by which an op of this name passes dependences on; None if it does not."""
    return _RULES.get(name)


class DependenceTransfer:
    """Passes dependences through ops that neither communicate nor control."""

    def __init__(self, find_live: Callable[[], set[ir.Value]]) -> None:
        self.find_live = find_live
        self.empty: dict[ir.Type, bool] = {}

    def results(self, op: ir.Operation, name: str, known: Known) -> list[Dependence] | None:
        """Returns the dependences of an op's results; None if no operand has any."""
        of_operands = [known.get(value) for value in op.operands]
        if not any(of_operands):
            return None
        operands = [part or NOTHING for part in of_operands]
        if name == BARRIER:
            return self.of_elements(op, self._barrier(op, operands))
        rule = _RULES.get(name)
        if rule == "own":  # one sorted list for each operand
            return [Dependence(part.each, part.whole) for part in operands]
        result = NOTHING if rule is None else _ordinary(op, rule, operands)
        return self.of_elements(op, [result] * len(op.results))

    def of_elements(self, op: ir.Operation, dependences: Sequence[Dependence]) -> list[Dependence]:
        """Returns the dependences of an op's results; empty tensors are never computed."""
        for value in op.results:
            if value.type not in self.empty:
                self.empty[value.type] = has_no_elements(value.type)
        return [
            NOTHING if self.empty[value.type] else part
            for value, part in zip(op.results, dependences, strict=True)
        ]

    def _barrier(self, op: ir.Operation, operands: list[Dependence]) -> list[Dependence]:
        """Makes every element wait for tokens and live values: the compiler keeps those."""
        if len(operands) == 1:
            return operands
        kept = 0
        for result, part in zip(op.results, operands, strict=True):
            if part.whole & ~kept == 0:
                continue
            if not isinstance(result.type, ir.RankedTensorType) or result in self._live:
                kept |= part.whole
        kept &= ~VARIES  # each element keeps its own value
        return [part.with_all(kept) for part in operands]

    @cached_property
    def _live(self) -> set[ir.Value]:
        return self.find_live()


def _ordinary(op: ir.Operation, rule: str, operands: Sequence[Dependence]) -> Dependence:
    """Returns the dependences of an op's result, by its rule."""
    first = operands[0]
    if rule == "order":
        return _move_dependence(op, operands) if first.parts else first
    if rule == "slice" and not first.parts:  # wherever it begins
        return Dependence(first.each, first.each)
    if rule in ("assembly", "slice"):
        return _move_dependence(op, operands)
    if rule == "select":
        # Both sides, if the predicate surely varies and no side is a select itself.
        # The predicate itself does not count: the two sides may be the same.
        varies, names = first.each & VARIES, frozenset({op.name})
        if not varies and moves_of(op) is not None:
            return _move_dependence(op, operands)
        if not varies or any(_is_made_by(value, names) for value in list(op.operands)[1:]):
            return operands[1].common(operands[2])
        return _union_dependence(op, [NOTHING, *operands[1:]], -1)
    if rule == "scatter":
        return _scatter_dependence(op, operands)
    if rule == "first":
        return Dependence(first.each, first.whole)
    if rule == "bitcast":  # to more elements: some of them may be padding
        rank = len(shape_of(op.operands[0].type) or ())
        is_split = len(shape_of(op.results[0].type) or ()) > rank
        return Dependence(0 if is_split else first.each, first.whole)
    if rule == "mixing" and not is_annotation(op):
        each = reduce(or_, (part.each for part in operands))
        return Dependence(each, each)
    if rule == "convolution":
        return _convolution_dependence(op, operands)
    if rule == "reduction":
        return _reduce_dependence(op, operands)
    if rule in ("arithmetic", "bounding", "compare", "limiting"):
        return _union_dependence(op, operands, _surviving(op, rule, operands))
    return _union_dependence(op, operands, -1)


def _surviving(op: ir.Operation, rule: str, operands: Sequence[Dependence]) -> int:
    """Returns the bits, of all that the operands depend on, that no identity can remove.

    `x - x` and comparisons lose the bits that two operands share. `max(min(x, y), y)` keeps only
    those of y, because it equals y for any x.
    """
    if rule == "compare":
        if _is_decided(op, operands):
            return 0
    elif rule == "bounding":
        if _may_bound(op, operands):
            return 0
    else:
        if rule == "limiting" and not all(part.whole & VARIES for part in operands):
            return 0  # an exponent of 0 or a shift by the full width makes the result constant
        if is_float(op.operands[-1].type):
            return -1
        if "dot" in op.name and any(_is_mixed(value, op.name) for value in op.operands):
            return 0
        for value, part in zip(op.operands, operands, strict=True):
            if not part.whole & VARIES and _may_absorb(op, value):
                return 0
    seen = shared = 0
    for part in operands:
        shared |= seen & part.whole
        seen |= part.whole
    if rule == "bounding" and shared & ~VARIES:
        return shared
    return seen if rule == "bounding" else seen & ~shared


def _union_dependence(
    op: ir.Operation, operands: Sequence[Dependence], surviving: int
) -> Dependence:
    """Returns the surviving bits of all operands; also of parts, if the op is elementwise."""
    if len(operands) == 1 and not operands[0].parts and surviving == -1:
        first = operands[0]
        is_part = op.name == "stablehlo.convert" and isinstance(
            ir.ShapedType(op.operands[0].type).element_type, ir.ComplexType
        )
        return Dependence(first.each, first.each) if is_part else first
    each = reduce(or_, (part.each for part in operands)) & surviving
    whole = reduce(or_, (part.whole for part in operands)) & surviving
    if not any(part.parts for part in operands):
        return Dependence(each, whole)
    links = [(i, link_of(op, i)) for i, part in enumerate(operands) if part.parts]
    parts = _link_dependence(op, [(i, link) for i, link in links if link is not None], operands)
    return Dependence(each, whole, parts.only(surviving & ~each).parts)


def _move_dependence(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Returns the dependences of the elements that a move keeps, wherever they are."""
    moves = moves_of(op)
    if moves is None:
        # The shapes are unknown.
        rule = rule_of(op.name)
        if rule == "order":
            return Dependence(operands[0].each, operands[0].whole)
        if op.name in ops_with(Trait.UNARY | Trait.COMPLEX_PART):
            return NOTHING
        count = 1 if rule == "slice" else 2 if op.name == DYNAMIC_UPDATE_SLICE else len(operands)
        each = reduce(and_, (part.each for part in operands[:count]))
        return Dependence(each, each)
    each = reduce(and_, (operands[i].each for i in moves.sources), -1) if moves.sources else 0
    whole = reduce(or_, (operands[i].whole for i in moves.kept), each)
    whole |= reduce(or_, (operands[i].each for i in moves.left), 0)
    return _link_dependence(op, moves.links, operands).both(Dependence(each, whole))


def _link_dependence(
    op: ir.Operation, links: Sequence[tuple[int, Link]], operands: Sequence[Dependence]
) -> Dependence:
    """Returns the dependences of the result's elements that links carry over from the operands."""
    shape = shape_of(op.results[0].type)
    assert shape is not None, "of every op that has links"
    parts: list[tuple[Box, int]] = []
    for position, link in links:
        part, given = operands[position], shape_of(op.operands[position].type)
        each = [(whole_box(given), part.each)] if part.each and given is not None else []
        for box, bits in [*part.parts, *each]:
            pushed = link.push(box)
            if pushed is not None:
                parts.append((pushed, bits))
    each, everything = 0, whole_box(shape)
    for box, bits in parts:
        each |= bits if box == everything else 0
    return Dependence(each, reduce(or_, (bits for _, bits in parts), 0), merge_parts(parts, each))


def _scatter_dependence(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Returns the dependences of a scatter; only float sums keep those of both sides."""
    if moves_of(op) is not None:
        return _move_dependence(op, operands)
    shapes = [shape_of(value.type) for value in op.operands]
    known = [shape for shape in shapes if shape is not None]
    is_sum = is_float(op.results[0].type) and _reducer(op) in _SUMS
    if len(known) != len(shapes) or len(known) != 3 or not is_sum:
        return NOTHING
    written = scatter_writes(op, known)
    links: list[tuple[int, Link]] = [(0, identity(known[0]))]
    links += [] if written is None else written[0]
    everywhere = Dependence(operands[0].each, operands[0].whole)
    return _link_dependence(op, links, operands).both(everywhere)


def _convolution_dependence(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Returns the dependences of a convolution, none if a window may hold only padding."""
    shapes = [shape_of(value.type) for value in op.operands]
    if None in shapes or not is_float(op.results[0].type):
        return NOTHING
    numbers = bindings.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = [(shapes[0] or ())[d] for d in numbers.input_spatial_dimensions]
    windows = [(shapes[1] or ())[d] for d in numbers.kernel_spatial_dimensions]
    reach = reach_of(op, sizes, windows, OF_CONVOLUTION)
    one, other = operands
    each = one.each | other.each if reach.every_window else 0
    whole = one.whole if reach.every_element else 0
    return Dependence(each, each | whole | (other.whole if reach.every_place else 0))


def _reduce_dependence(op: ir.Operation, operands: Sequence[Dependence]) -> Dependence:
    """Returns the dependences on the reduced operand, if the region keeps them."""
    first, shape = operands[0], shape_of(op.operands[0].type)
    reducer = _reducer(op) if len(op.results) == 1 else None
    if reducer is None or shape is None:
        return NOTHING
    value, initial = op.operands[0], op.operands[1]
    is_sum = is_float(value.type) and reducer in _SUMS
    if not is_sum and (_may_end(reducer, initial) or _is_mixed(value, reducer)):
        return NOTHING
    if op.name == "stablehlo.reduce":
        return _union_dependence(op, [first, NOTHING], -1)
    windows = list(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"]))
    reach = reach_of(op, list(shape), windows, OF_REDUCE_WINDOW)
    each = first.each if reach.every_window else 0
    return Dependence(each, each | (first.whole if reach.every_element else 0))


def _reducer(op: ir.Operation) -> str | None:
    """Returns the op by which the region combines its two arguments; None if it may lose one."""
    kind = reducer_kind(Combining(op).combiner)
    return None if kind in (None, "xor") else f"stablehlo.{kind}"


def _may_end(reducer: str, initial: ir.Value) -> bool:
    """Returns True if the initial value of a reduction may decide its result."""
    if reducer == "stablehlo.add":
        return False
    number = _number(initial)
    if number is None:
        return True
    low, high = _limits(initial.type)
    if reducer == "stablehlo.maximum":
        return not number < high
    if reducer == "stablehlo.minimum":
        return not number > low
    if reducer == "stablehlo.multiply":
        return number % 2 == 0
    return (number == 0) == (reducer == "stablehlo.and")


def _is_mixed(value: ir.Value, reducer: str) -> bool:
    """Returns True if reduced elements may be interdependent, or if one may decide the result.

    For floats, the reducer is a minimum or maximum, and only infinite elements matter.
    """
    of_floats = is_float(value.type)
    pending, seen, is_mixture = [value], {value}, False
    while pending:
        op = producer(pending.pop())
        if op is None:
            continue
        if len(seen) > _MOST_LOOKED_AT:
            return True
        if op.name in _MIXING or (op.name == "stablehlo.broadcast_in_dim" and not of_floats):
            if not of_floats:
                return True
            is_mixture = True
        elif rule_of(op.name) not in ("order", "slice") and op.name not in _COMPUTED:
            continue
        constants = [constant_elements(operand) for operand in op.operands]
        if of_floats and is_mixture:
            if op.name in _COMPUTED and not any(constant is None for constant in constants):
                return True  # a constant that is computed
            known = [constant for constant in constants if constant is not None]
            harmless = -math.inf if reducer == "stablehlo.maximum" else math.inf
            if op.name in _MIXING and any(
                constant.dtype.kind not in "fiub"
                or (~np.isfinite(constant) & (constant != harmless)).any()
                for constant in known
            ):
                return True  # an element of it may decide any minimum or maximum
        for operand, constant in zip(op.operands, constants, strict=True):
            if constant is None and operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return False


def _may_bound(op: ir.Operation, operands: Sequence[Dependence]) -> bool:
    """Returns True if a minimum or maximum may be a bound, whatever the other operand is."""
    values = list(op.operands)
    for value in values:
        inner = _made_of(value)
        if inner is None or inner.name not in _BOUNDING or inner.name == op.name:
            continue
        if set(inner.operands) & set(values):
            return True  # `max(min(x, y), y)`
    if len(set(values)) < len(values):
        return op.name == "stablehlo.clamp"
    if all(part.whole & VARIES for part in operands):
        return False
    interval = _interval(op)
    return interval is None or not interval[0] < interval[1]


def _interval(op: ir.Operation) -> tuple[float, float] | None:
    """Returns the constant bounds of a value and of earlier clamps; None if unknown."""
    low, high = _limits(op.results[0].type)
    below = {"stablehlo.maximum": (0, 1), "stablehlo.clamp": (0,)}.get(op.name, ())
    above = {"stablehlo.minimum": (0, 1), "stablehlo.clamp": (2,)}.get(op.name, ())
    for position, value in enumerate(op.operands):
        number = _number(value)
        inner = _made_of(value)
        if number is None and inner is not None and inner.name in _BOUNDING:
            within = _interval(inner)
            if within is None:
                return None
            low, high = max(low, within[0]), min(high, within[1])
        elif number is None and constant_elements(value) is not None:
            return None
        elif number is not None:
            if math.isnan(number):
                return None
            low = max(low, number) if position in below else low
            high = min(high, number) if position in above else high
    return low, high


def _number(value: ir.Value) -> float | int | None:
    """Returns the number that all elements of a constant are; None if they differ or are unknown.

    If the type changes on the way, only small integers count, which all of the types can represent.
    """
    op = producer(value)
    is_converted = False
    while op is not None and op.name in _LAYOUT:
        is_converted |= op.name == "stablehlo.convert"
        op = producer(op.operands[0])
    number = None if op is None else splat_of(op.results[0])
    if number is None or isinstance(number, complex):
        return None
    is_small = abs(number) <= _SMALL and number == int(number)
    return number if is_small or not is_converted else None


def _limits(type_: ir.Type) -> tuple[float, float]:
    """Returns the smallest and the largest number of a tensor's element type."""
    element = ir.ShapedType(type_).element_type
    if not isinstance(element, ir.IntegerType):
        return -math.inf, math.inf
    return integer_bounds(element.width, signed=not element.is_unsigned)


def _may_absorb(op: ir.Operation, value: ir.Value) -> bool:
    """Returns True if an integer known at compile time may remove the other operand's influence."""
    name = op.name
    # Invertible: with any constant, the result still differs as the other operand does.
    if name in ("stablehlo.add", "stablehlo.subtract", "stablehlo.xor"):
        return False
    constant = constant_elements(value)
    if constant is None or not np.issubdtype(constant.dtype, np.integer):
        return True
    if name == "stablehlo.multiply":  # a product of odd numbers never overflows to zero
        return bool((constant % 2 == 0).any())
    if value == op.operands[0]:
        return True
    if name == "stablehlo.divide":  # repeated division by two leaves zero
        return bool((abs(constant) != 1).any())
    if name == "stablehlo.remainder":
        return bool((abs(constant) < 2).any())
    return True


def _is_decided(compare: ir.Operation, operands: Sequence[Dependence]) -> bool:
    """Returns True if the range of one side may decide a comparison with a compile-time value."""
    left, right = compare.operands
    if all(part.whole & VARIES for part in operands):
        return False
    name = comparison_direction(compare)
    constant = constant_elements(right)
    if constant is None:
        left, right = right, left
        name, constant = MIRRORED[name], constant_elements(right)
    if constant is None or name not in _OPEN or not np.isfinite(constant).all():
        return True
    if _is_made_by(left, _BOUNDING):
        return True
    if not np.issubdtype(constant.dtype, np.integer) or name in ("EQ", "NE"):
        return False
    limits = np.iinfo(constant.dtype)
    return bool(np.isin(constant, (limits.min, limits.max)).any())


def _made_of(value: ir.Value) -> ir.Operation | None:
    """Returns the op that makes a value, before changes of its layout and type."""
    op = producer(value)
    while op is not None and op.name in _LAYOUT:
        op = producer(op.operands[0])
    return op


def _is_made_by(value: ir.Value, names: frozenset[str]) -> bool:
    op = _made_of(value)
    return op is not None and op.name in names


def constant_elements(value: ir.Value) -> np.ndarray | None:
    """Returns the elements, or some of them, of a value made only of constants; None for others."""
    op = constant_before(value)
    if op is None:
        return None
    return _elements(value_of(op)) if op.name == "stablehlo.constant" else np.arange(2)


def constant_before(value: ir.Value) -> ir.Operation | None:
    """Returns the constant or iota that a value is, up to layout, type and sign; None for others.

    `constant_elements` reads the elements of this op.
    """
    op = producer(value)
    for _ in range(_DEEPEST_CONSTANT):
        if op is None or op.name not in _HANDS_ON:
            break
        op = producer(op.operands[0])
    return op if op is not None and op.name in _CONSTANT else None


def _elements(attribute: ir.Attribute | None) -> np.ndarray:
    """Returns the elements of a constant: one of a splat's, infinity if they cannot be read."""
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
    # NumPy has no counterpart of some element types: their elements are objects.
    return np.array(math.inf) if elements.dtype == object else elements


def has_no_elements(type_: ir.Type) -> bool:
    """Returns True if a type is a tensor type with a dimension of size 0."""
    return 0 in (static_shape(type_) or ())
