"""Boxes of elements of a tensor, and how ops that only move elements lay them out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `starts` on, `sizes` many along each dimension."""

    starts: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All elements of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    def along(self, dim: int, start: int, size: int) -> Box:
        """The same box with another range along one dimension."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def moved(self, by: Sequence[int]) -> Box:
        """The box at another place."""
        return replace(self, starts=tuple(a + b for a, b in zip(self.starts, by, strict=True)))

    def end(self, dim: int) -> int:
        """The first position behind it along a dimension."""
        return self.starts[dim] + self.sizes[dim]

    def cut(self, dim: int, places: Sequence[int]) -> list[Box]:
        """The box in pieces that begin at these places along a dimension, where inside of it."""
        inside = [p for p in sorted(set(places)) if self.starts[dim] < p < self.end(dim)]
        edges = [self.starts[dim], *inside, self.end(dim)]
        return [self.along(dim, a, b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Elements of shape `before`, in the same order, in shape `after`."""

    before: Shape
    after: Shape

    def back(self, box: Box) -> tuple[Box, Reshape] | None:
        """The box of the result that a box of the operand becomes, and the step between them."""
        found = reshaped_box(box, self.before, self.after)
        return None if found is None else (found, Reshape(box.sizes, found.sizes))


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dimension i of the result is dimension `order[i]` of the operand."""

    order: Shape

    def back(self, box: Box) -> tuple[Box, Transpose] | None:
        """The box of the result that a box of the operand becomes, and the step between them."""
        starts = tuple(box.starts[d] for d in self.order)
        return Box(starts, tuple(box.sizes[d] for d in self.order)), self


@dataclass(frozen=True, slots=True)
class Convert:
    """Each element in another type, of this text."""

    element: str

    def back(self, box: Box) -> tuple[Box, Convert] | None:
        """The box of the result that a box of the operand becomes, and the step between them."""
        return box, self


@dataclass(frozen=True, slots=True)
class Spread:
    """A scalar, repeated in this shape."""

    shape: Shape

    def back(self, box: Box) -> tuple[Box, Spread] | None:
        """The whole result, of the one element there is."""
        return Box.whole(self.shape), self


Step = Reshape | Transpose | Convert | Spread


@dataclass(frozen=True, slots=True)
class View:
    """Where elements of a source end up in what was asked for.

    `steps` lead from a box of the source to the box `target`; the last comes first.
    """

    target: Box
    steps: tuple[Step, ...] = ()

    def behind(self, step: Step) -> View:
        """The view of the operand of a step whose result is viewed."""
        steps = self.steps
        if isinstance(step, Reshape):
            if steps and isinstance(later := steps[-1], Reshape):
                step, steps = Reshape(step.before, later.after), steps[:-1]
            if step.before == step.after:
                return View(self.target, steps)
        return View(self.target, (*steps, step))

    def part(self, box: Box) -> View | None:
        """The view of a box of what is viewed; None where that becomes no box."""
        steps: list[Step] = []
        for step in reversed(self.steps):
            found = step.back(box)
            if found is None:
                return None
            box, smaller = found
            steps.append(smaller)
        return View(box.moved(self.target.starts), tuple(reversed(steps)))


def reshaped_box(box: Box, before: Shape, after: Shape) -> Box | None:
    """The box that a box becomes by a reshape; None where it becomes none."""
    starts, sizes = [0] * len(after), [1] * len(after)
    for old, new in _groups(before, after):
        if not _regroup(box, before, after, (old, new), starts, sizes):
            return None
    return Box(tuple(starts), tuple(sizes))


def _groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The shortest runs of dimensions that hold equally many elements, in order."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (left := prod(before[first:i])) != (right := prod(after[second:j])):
            if (left < right or j == len(after)) and i < len(before):
                i += 1
            else:
                j += 1
        found.append((range(first, i), range(second, j)))
    return found


def _regroup(
    box: Box,
    before: Shape,
    after: Shape,
    group: tuple[range, range],
    starts: list[int],
    sizes: list[int],
) -> bool:
    old = [d for d in group[0] if before[d] != 1]
    new = [d for d in group[1] if after[d] != 1]
    if [before[d] for d in old] == [after[d] for d in new]:
        for d, e in zip(old, new, strict=True):
            starts[e], sizes[e] = box.starts[d], box.sizes[d]
        return True
    run = _run(box, before, old)
    if run is None:
        return False
    first, count = run
    for place, dim in enumerate(new):
        stride = prod(after[d] for d in new[place + 1 :])
        starts[dim] = first // stride
        first -= starts[dim] * stride
        if first + count > stride:
            sizes[dim] = count // stride
            return _rest_is_whole(first, count, stride, after, new[place + 1 :], sizes)
    return True


def _rest_is_whole(
    first: int, count: int, stride: int, after: Shape, rest: list[int], sizes: list[int]
) -> bool:
    for dim in rest:
        sizes[dim] = after[dim]
    return first == 0 and count % stride == 0


def _run(box: Box, shape: Shape, dims: list[int]) -> tuple[int, int] | None:
    """The first and the number of elements, where those of a box stand next to each other."""
    first = 0
    for dim in dims:
        first = first * shape[dim] + box.starts[dim]
    several = next((i for i, dim in enumerate(dims) if box.sizes[dim] != 1), len(dims))
    if any(box.sizes[dim] != shape[dim] for dim in dims[several + 1 :]):
        return None
    return first, prod(box.sizes[dim] for dim in dims)
