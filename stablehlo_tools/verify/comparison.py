"""Compares the outputs of two programs on each device, bit for bit or within a tolerance.

An output is a global array that the devices hold in shards. If every replica or per-device program
has its own value, each is an `instance` with its own global array. Pure NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.verify.element_types import Array, ElementKind, ElementType, real_part, to_bits

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Rule:
    """The rule by which two elements count as the same.

    Without a tolerance, they are the same if their bits are. With one, if |before - after| <= atol
    + rtol * |before|; then any NaN equals any NaN, and integers are still compared exactly.
    `any_nan`: any NaN equals any NaN without a tolerance too.
    """

    rtol: float | None = None
    atol: float | None = None
    any_nan: bool = False

    @property
    def is_bitwise(self) -> bool:
        """True if there is no tolerance."""
        return self.rtol is None and self.atol is None

    def __str__(self) -> str:
        if self.is_bitwise:
            return "bitwise" + (" but for NaN payloads" if self.any_nan else "")
        return f"within rtol={self.rtol or 0:g} atol={self.atol or 0:g}"


BITWISE = Rule()


@dataclass(frozen=True)
class Shard:
    """The data of one device: `data` at `index` of the global array of an instance."""

    device: int
    index: Index
    data: Array
    instance: int = 0


def whole(array: Array) -> Shard:
    """Returns a shard of device 0 with a whole array."""
    return Shard(0, (slice(None),) * array.ndim, array)


@dataclass(frozen=True)
class ElementDifference:
    """The first element that differs, in row-major order, and both its values as text.

    `device` is the lowest device with the difference; None if every device that holds it has it.
    """

    index: tuple[int, ...]
    device: int | None
    before: str
    after: str


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output. `max_abs_difference` is over finite differing pairs, or None.

    `finite`: how many elements are finite in both programs; the others prove little.
    """

    elements: int
    differing: int = 0
    max_abs_difference: float | int | None = None
    first: ElementDifference | None = None
    finite: int = 0

    @property
    def shows_nothing(self) -> bool:
        """True if there are elements and all of them are NaN or infinite."""
        return self.elements > 0 and not self.finite


def compare_output(
    element: ElementType,
    shape: tuple[int, ...],
    before: Sequence[Shard],
    after: Sequence[Shard],
    rule: Rule,
) -> OutputComparison:
    """Compares an output of global `shape`, device against device.

    If the two programs shard the array differently, each shard is compared with the other program's
    assembled array. Every element counts once, even if several devices hold it.
    """
    instances = sorted({shard.instance for shard in before})
    masks = {instance: np.zeros(shape, np.bool_) for instance in instances}
    finite = {instance: np.zeros(shape, np.bool_) for instance in instances}
    largest: float | int | None = None
    pairs = list(_pairs(element, shape, before, after))
    differing_pairs: list[tuple[Shard, Array, Array]] = []
    for shard, ours, theirs in pairs:
        finite[shard.instance][shard.index] |= _finite(ours, element) & _finite(theirs, element)
        mask = differs(ours, theirs, element, rule)
        if not mask.any():
            continue
        masks[shard.instance][shard.index] |= mask
        other = _largest_difference(ours[mask], theirs[mask], element)
        largest = other if largest is None else largest if other is None else max(largest, other)
        differing_pairs.append((shard, ours, theirs))
    return OutputComparison(
        elements=len(instances) * math.prod(shape),
        differing=sum(int(mask.sum()) for mask in masks.values()),
        max_abs_difference=largest,
        first=_first(masks, pairs, differing_pairs, element, rule),
        finite=sum(int(mask.sum()) for mask in finite.values()),
    )


def differs(before: Array, after: Array, element: ElementType, rule: Rule) -> Array:
    """Returns the elements that differ, as an array of booleans in the shape of both."""
    if not rule.is_bitwise and element.is_inexact:
        one, other = _precise(before, element), _precise(after, element)
        with np.errstate(all="ignore"):
            near = np.abs(one - other) <= (rule.atol or 0) + (rule.rtol or 0) * np.abs(one)
        near &= np.isfinite(one) & np.isfinite(other)
        return ~(near | (one == other) | (np.isnan(one) & np.isnan(other)))
    mask = to_bits(before, element) != to_bits(after, element)
    if rule.any_nan and element.is_inexact:
        part = real_part(element)
        wide = [
            np.ascontiguousarray(values).view(part.dtype).astype(np.float64).reshape(mask.shape)
            for values in (before, after)
        ]
        mask &= ~(np.isnan(wide[0]) & np.isnan(wide[1]))
    return np.asarray(mask.any(-1) if element.kind is ElementKind.COMPLEX else mask)


def show(value: Array, element: ElementType) -> str:
    """Renders one element; a NaN with its bits, because two NaNs may differ only in these."""
    if element.kind is ElementKind.BOOLEAN:
        return str(bool(value)).lower()
    if not element.is_inexact:
        return str(int(value))
    part = real_part(element)
    numbers = np.asarray(value, element.dtype).reshape(1).view(part.dtype)
    texts: list[str] = []
    for number, bits in zip(numbers, to_bits(numbers, part), strict=True):
        if np.isnan(np.float64(number)):
            texts.append(f"nan(0x{int(bits):0{(part.bits + 3) // 4}x})")
        else:
            texts.append(str(number) if part.name in ("f32", "f64") else repr(float(number)))
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _pairs(
    element: ElementType, shape: tuple[int, ...], before: Sequence[Shard], after: Sequence[Shard]
) -> Iterator[tuple[Shard, Array, Array]]:
    """Yields each shard with the data of `before` and of `after` at its place."""
    places = [{(s.device, s.instance): s for s in side} for side in (before, after)]
    indices = [{place: s.index for place, s in side.items()} for side in places]
    if indices[0] == indices[1]:
        for place in sorted(places[0]):
            yield places[0][place], places[0][place].data, places[1][place].data
        return
    whole: list[dict[int, Array]] = [{}, {}]
    for arrays, side in zip(whole, (before, after), strict=True):
        for shard in sorted(side, key=lambda s: -s.device):  # the lowest device is written last
            array = arrays.setdefault(shard.instance, np.empty(shape, element.dtype))
            array[shard.index] = shard.data
    for shard in sorted(before, key=lambda s: s.device):
        yield shard, shard.data, whole[1][shard.instance][shard.index]
    for shard in sorted(after, key=lambda s: s.device):
        yield shard, whole[0][shard.instance][shard.index], shard.data


def _first(
    masks: dict[int, Array],
    pairs: list[tuple[Shard, Array, Array]],
    differing: list[tuple[Shard, Array, Array]],
    element: ElementType,
    rule: Rule,
) -> ElementDifference | None:
    instance = next((i for i, mask in masks.items() if mask.any()), None)
    if instance is None:
        return None
    mask = masks[instance]
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
    showing: list[tuple[Shard, Array, Array]] = []
    for shard, ours, theirs in differing:
        place = _local(index, shard)
        if shard.instance == instance and place is not None:
            one, other = np.asarray(ours[place]), np.asarray(theirs[place])
            if differs(one, other, element, rule).any():
                showing.append((shard, one, other))
    holders = {
        s.device for s, _, _ in pairs if s.instance == instance and _local(index, s) is not None
    }
    everywhere = len(masks) == 1 and holders == {shard.device for shard, _, _ in showing}
    shard, ours, theirs = showing[0]
    device = None if everywhere else shard.device
    return ElementDifference(index, device, show(ours, element), show(theirs, element))


def _local(index: tuple[int, ...], shard: Shard) -> tuple[int, ...] | None:
    """Converts a global index to one in a shard; None if the shard does not contain it."""
    local: list[int] = []
    for position, part, extent in zip(index, shard.index, shard.data.shape, strict=True):
        offset = position - (part.start or 0)
        if not 0 <= offset < extent:
            return None
        local.append(offset)
    return tuple(local)


def _precise(values: Array, element: ElementType) -> Array:
    return values.astype(np.complex128 if element.kind is ElementKind.COMPLEX else np.float64)


def _largest_difference(before: Array, after: Array, element: ElementType) -> float | int | None:
    """Returns the largest difference over finite pairs, exact for integers; None without pairs."""
    if not element.is_inexact:
        if element.kind is ElementKind.UNSIGNED or element.kind is ElementKind.BOOLEAN:
            low, high = before.astype(np.uint64), after.astype(np.uint64)
        else:  # shift the signed range onto the unsigned one, where differences cannot overflow
            shift = np.uint64(1 << 63)
            low = before.astype(np.int64).view(np.uint64) ^ shift
            high = after.astype(np.int64).view(np.uint64) ^ shift
        return int((np.maximum(low, high) - np.minimum(low, high)).max())
    low, high = _precise(before, element), _precise(after, element)
    finite = np.isfinite(low) & np.isfinite(high)
    return float(np.abs(low[finite] - high[finite]).max()) if finite.any() else None


def _finite(values: Array, element: ElementType) -> Array:
    if not element.is_inexact:
        return np.ones(values.shape, np.bool_)
    return np.isfinite(_precise(values, element))
