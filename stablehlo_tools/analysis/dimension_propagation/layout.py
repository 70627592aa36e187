"""How a tensor lies in parts of the batch, and how an op runs on such parts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stablehlo_tools.dialect.factors import Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Which elements of a tensor belong to which part of the batch.

    Dimension `dim` is read as `[outer, parts, inner]`; part k holds `[:, k, :]` of it. With `outer`
    1 the parts are consecutive pieces of the dimension. A larger one comes of merging the batch
    behind another dimension: a reshape, or an all_gather of every device's share of the batch.
    """

    dim: int
    outer: int = 1

    def at(self, dim: int) -> Layout:
        """The same along another dimension of the same size."""
        return Layout(dim, self.outer)

    def fits(self, shape: Shape, parts: int) -> bool:
        """Whether a tensor of this shape can lie so."""
        if self.dim >= len(shape):
            return False
        size = shape[self.dim]
        return size > 0 and size % (self.outer * parts) == 0


@dataclass(frozen=True, slots=True)
class Step:
    """How an op runs once for each part.

    `operands[i]` is the layout that an operand is taken in, None for all of it; likewise the
    results. `combine` is the op (`add`, `maximum`, …) that makes the whole result of what the parts
    give; with `chained`, each part's op starts from the result of the part before it, in the place
    of operand 0.
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    combine: str | None = None
    chained: bool = False


def reshaped(layout: Layout, before: Shape, after: Shape, parts: int) -> Layout | None:
    """The layout behind a reshape; None where the parts are no such pieces of one dimension."""
    inner = before[layout.dim] // (layout.outer * parts)
    ahead = prod(before[: layout.dim]) * layout.outer
    behind = inner * prod(before[layout.dim + 1 :])
    for dim in range(len(after)):
        major, minor = prod(after[:dim]), prod(after[dim + 1 :])
        if after[dim] < parts or ahead % major or behind % minor:
            continue
        return Layout(dim, ahead // major)
    return None


def part_shape(shape: Shape, layout: Layout | None, parts: int, count: int = 1) -> Shape:
    """The shape of one part, or of `count` consecutive ones together."""
    if layout is None:
        return shape
    size = shape[layout.dim] // parts * count
    return (*shape[: layout.dim], size, *shape[layout.dim + 1 :])
