"""Collectives: the same part goes from every device."""

from __future__ import annotations

from stablehlo_tools.analysis.dimension_propagation.layout import Asked, Layout, Step


def unmoved(asked: Asked) -> Step | None:
    """all_reduce, collective_permute and collective_broadcast: each operand keeps its shape."""
    if None in asked.layouts:
        return None
    return Step(asked.layouts, asked.layouts)


def all_gather(asked: Asked) -> Step | None:
    """Along the batch, every device's share of a part makes the part of the whole."""
    dim = asked.integer("all_gather_dim")
    if None in asked.layouts:
        return None
    shapes = zip(asked.layouts, asked.operands, asked.results, strict=True)
    gathered = tuple(
        _grown(layout, dim, after[dim] // before[dim]) for layout, before, after in shapes if layout
    )
    return Step(asked.layouts, gathered)


def reduce_scatter(asked: Asked) -> Step | None:
    """Along the batch only where each device's share holds all of the parts."""
    given, dim = asked.given, asked.integer("scatter_dimension")
    if given is None:
        return None
    scattered = _shrunk(given, dim, asked.operands[0][dim] // max(asked.results[0][dim], 1))
    return Step((given,), (scattered,)) if scattered is not None else None


def all_to_all(asked: Asked) -> Step | None:
    """A scatter along one dimension and a gather along another."""
    count = asked.integer("split_count")
    split, joined = asked.integer("split_dimension"), asked.integer("concat_dimension")
    if None in asked.layouts:
        return None
    results: list[Layout | None] = []
    for layout in asked.layouts:
        assert layout is not None
        scattered = _shrunk(layout, split, count)
        if scattered is None:
            return None
        results.append(_grown(scattered, joined, count))
    return Step(asked.layouts, tuple(results))


def _grown(layout: Layout, dim: int, count: int) -> Layout:
    return Layout(dim, layout.outer * count) if layout.dim == dim else layout


def _shrunk(layout: Layout, dim: int, count: int) -> Layout | None:
    if layout.dim != dim:
        return layout
    return Layout(dim, layout.outer // count) if layout.outer % count == 0 else None
