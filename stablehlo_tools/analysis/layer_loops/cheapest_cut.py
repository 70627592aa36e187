"""Finds the cheapest set of nodes that separates sources from sinks in a directed graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

_ENDLESS = 1 << 62  # prices are bytes, which can exceed SciPy's 32-bit capacities


def cheapest_cut(
    prices: Sequence[int | None],
    edges: Iterable[tuple[int, int]],
    starts: Iterable[int],
    ends: Iterable[int],
) -> list[int] | None:
    """Returns the cheapest nodes without which no path leads from `starts` to `ends`, in order.

    Of several such sets it returns the one nearest to the ends. Nodes of both kinds may be cut.
    Returns None if only nodes without a price separate them.
    """
    source = 2 * len(prices)
    sink = source + 1
    left: list[dict[int, int]] = [{} for _ in range(sink + 1)]  # residual capacity, by edge
    inner = [(2 * n, 2 * n + 1, _ENDLESS if p is None else p) for n, p in enumerate(prices)]
    outer = [(2 * tail + 1, 2 * head) for tail, head in edges]
    outer += [(source, 2 * node) for node in starts] + [(2 * node + 1, sink) for node in ends]
    for tail, head, room in [*inner, *((*edge, _ENDLESS) for edge in outer)]:
        left[tail][head] = room
        left[head].setdefault(tail, 0)
    while sink in (before := _search(left, source, lambda node, other: left[node][other])):
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        room = min(left[tail][head] for tail, head in steps)
        if room >= _ENDLESS // 2:
            return None
        for tail, head in steps:
            left[tail][head] -= room
            left[head][tail] += room
    behind = _search(left, sink, lambda node, other: left[other][node])
    return [n for n in range(len(prices)) if 2 * n + 1 in behind and 2 * n not in behind]


def _search(
    neighbours: Sequence[Iterable[int]], start: int, room: Callable[[int, int], int]
) -> dict[int, int]:
    """Returns the nodes that can be reached over edges with capacity left, each with its
    predecessor on a shortest path."""
    before = {start: start}
    pending = deque([start])
    while pending:
        node = pending.popleft()
        for other in neighbours[node]:
            if other not in before and room(node, other) > 0:
                before[other] = node
                pending.append(other)
    return before
