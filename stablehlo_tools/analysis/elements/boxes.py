"""Represents sets of elements of a tensor as boxes, one range for each dimension.

A complex number counts as two elements: its tensor has one more dimension, of size 2, for the real
and the imaginary part. Ranges ascend, and a box has no empty range. A set that is not a box is
replaced by a box in it: facts about all elements of the set remain true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.reshapes import runs

Shape = tuple[int, ...]
Box = tuple[range, ...]

_MOST_RUNS = 4  # boxes that represent a mask


def shape_of(type_: ir.Type) -> Shape | None:
    """Returns the sizes of a tensor type, with the parts of complex numbers; None if unknown."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    parts = (2,) if isinstance(type_.element_type, ir.ComplexType) else ()
    return (*type_.shape, *parts)


def whole_box(shape: Shape) -> Box:
    """Returns the box of all elements."""
    return tuple(map(range, shape))


def size_of(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(map(len, box))


def meet(one: Box, other: Box) -> Box | None:
    """Returns the elements of both boxes; None if there are none."""
    ranges = tuple(common_range(a, b) for a, b in zip(one, other, strict=True))
    return ranges if all(ranges) else None


def contains(outer: Box, inner: Box) -> bool:
    """Returns True if a box has all elements of another."""
    return meet(outer, inner) == inner


def common_range(one: range, other: range) -> range:
    """Returns the numbers of both of two ascending ranges."""
    if one == other:
        return one
    stop = min(one.stop, other.stop)
    if one.step == other.step == 1:
        return canonical(range(max(one.start, other.start), stop))
    shared = math.gcd(one.step, other.step)
    apart = other.start - one.start
    if apart % shared:
        return range(0)
    # The first common number, by the Chinese remainder theorem.
    period = other.step // shared
    turns = apart // shared * pow(one.step // shared, -1, period) % period if period > 1 else 0
    first, step = one.start + turns * one.step, one.step * period
    missing = max(one.start, other.start) - first
    first += max(0, -(-missing // step)) * step
    return canonical(range(first, stop, step))


def canonical(numbers: range) -> range:
    """Returns the same numbers, ascending, in canonical form: equal sets are equal ranges."""
    if len(numbers) == 1:
        return range(numbers[0], numbers[0] + 1)
    if numbers.step < 0:
        numbers = numbers[::-1]
    return range(numbers.start, numbers[-1] + 1, numbers.step) if numbers else range(0)


def moved_range(numbers: range, source: range, target: range) -> range:
    """Returns the numbers of `target` at the positions that some numbers have in `source`."""
    first = source.index(numbers[0])
    step = target.step * (source.index(numbers[1]) - first if len(numbers) > 1 else 1)
    start = target[first]
    return canonical(range(start, start + step * len(numbers), step))


def boxes_of(mask: NDArray[Any]) -> list[Box]:
    """Returns boxes of elements that are true: all of them if few boxes are enough."""
    if not mask.any():
        return []
    if mask.all():
        return [whole_box(mask.shape)]
    for dimension in range(mask.ndim):
        profile = np.moveaxis(mask, dimension, 0).reshape(mask.shape[dimension], -1)
        if (profile == profile[:, :1]).all():
            runs = _runs(profile[:, 0])
            return [_along(mask.shape, dimension, run) for run in runs[:_MOST_RUNS]]
    corner = tuple(int(places[0]) for places in np.nonzero(mask))
    last = next(run for run in _runs(mask[corner[:-1]]) if corner[-1] in run)
    return [(*(range(i, i + 1) for i in corner[:-1]), last)]


def boxes_outside(shape: Shape, covered: Sequence[Box]) -> list[Box]:
    """Returns boxes of elements that are outside of all `covered` boxes."""
    if not covered:
        return [whole_box(shape)]
    outside: list[Box] = []
    for dimension, size in enumerate(shape):
        free = _gaps(size, [box[dimension] for box in covered])
        outside += [_along(shape, dimension, run) for run in free[:_MOST_RUNS]]
    return outside


def _gaps(size: int, covered: Sequence[range]) -> list[range]:
    """Returns runs of the numbers below `size` that no range covers, the longest first.

    It does not loop over all numbers, because each unrolled layer asks this of the whole stack of
    gradients.
    """
    if any(numbers.step != 1 for numbers in covered):
        free = np.ones(size, np.bool_)
        for numbers in covered:
            free[numbers.start : numbers.stop : numbers.step] = False
        return _runs(free)
    ordered = sorted(covered, key=lambda numbers: numbers.start)
    stops = accumulate((numbers.stop for numbers in ordered), max, initial=0)
    starts = [*(numbers.start for numbers in ordered), size]
    rows = [range(stop, start) for stop, start in zip(stops, starts, strict=True)]
    return _longest_first([row for row in rows if row])


def _along(shape: Shape, dimension: int, numbers: range) -> Box:
    return tuple(numbers if d == dimension else range(size) for d, size in enumerate(shape))


def _runs(profile: NDArray[Any]) -> list[range]:
    """Returns the runs of true places, the longest first."""
    edges = np.flatnonzero(np.diff(profile.astype(np.int8), prepend=0, append=0)).tolist()
    return _longest_first([range(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)])


def _longest_first(rows: list[range]) -> list[range]:
    """Returns runs sorted by length; evenly spaced single numbers become one range."""
    starts = [row.start for row in rows]
    evenly = range(starts[0], starts[-1] + 1, starts[1] - starts[0]) if len(rows) > 1 else range(0)
    if all(len(row) == 1 for row in rows) and starts == list(evenly):
        return [canonical(evenly)] if rows else []
    return sorted(rows, key=len, reverse=True)


def reshape_box(box: Box, before: Shape, after: Shape) -> Box:
    """Returns the elements of a box after a reshape: all of them, or a box of some."""
    places: list[range] = []
    for outer, inner in runs(before, after):
        flat = _flatten_ranges([box[d] for d in outer], [before[d] for d in outer])
        places += _unflatten_places(flat, [after[d] for d in inner])
    return tuple(places)


def _flatten_ranges(ranges: Sequence[range], sizes: Sequence[int]) -> range:
    """Returns flat indices of elements; of a part of them if they are not evenly spaced."""
    places, inner = range(1), 1
    for numbers, size in zip(reversed(ranges), reversed(sizes), strict=True):
        first = numbers[0] * inner + places[0]
        if numbers.step == 1 and places.step * len(places) == inner:
            last, step = numbers[-1] * inner + places[-1], places.step  # whole rows
        elif len(places) >= len(numbers):
            last, step = numbers[0] * inner + places[-1], places.step  # one row
        else:
            last, step = numbers[-1] * inner + places[0], numbers.step * inner  # one of each row
        places = range(first, last + 1, step)
        inner *= size
    return places


def _unflatten_places(places: range, sizes: Sequence[int]) -> list[range]:
    """Returns flat indices as a box; a box of a part of them if they are not one."""
    along: list[range] = []
    inner = math.prod(sizes)
    for size in sizes:
        inner //= size
        first, last = places[0] // inner, places[-1] // inner
        if first == last:
            along.append(range(first, first + 1))
        elif places.step % inner == 0:
            along.append(range(first, last + 1, places.step // inner))
            places = places[:1]
        elif rows := _full_rows(places, inner):
            along.append(rows)
            places = _clip_places(places, rows[0] * inner, (rows[0] + 1) * inner)
        else:
            one, other = (
                _clip_places(places, row * inner, (row + 1) * inner) for row in (first, last)
            )
            row, places = (first, one) if len(one) >= len(other) else (last, other)
            along.append(range(row, row + 1))
        start = along[-1][0] * inner
        places = range(places[0] - start, places[-1] - start + 1, places.step)
    return [canonical(numbers) for numbers in along]


def _full_rows(places: range, inner: int) -> range:
    """Returns the rows of `inner` elements that contain all the places that fit into a row."""
    if inner % places.step:
        return range(0)
    before = places[0] % places.step
    first = -(-(places[0] - before) // inner)
    last = (places[-1] + places.step - before) // inner
    return range(first, last)


def _clip_places(places: range, start: int, stop: int) -> range:
    return common_range(canonical(places), range(start, stop))
