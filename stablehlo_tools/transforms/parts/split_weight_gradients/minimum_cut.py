"""The cheapest set of nodes that separates sources from sinks in a directed graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

_ENDLESS = 1 << 62


class CutGraph:
    """Nodes 0, 1, 2, … with a price each; None for one that cannot be cut."""

    def __init__(self, prices: Sequence[int | None]) -> None:
        self._prices = list(prices)
        self._source = 2 * len(self._prices)
        self._sink = self._source + 1
        self._left: list[dict[int, int]] = [{} for _ in range(self._sink + 1)]
        for node, price in enumerate(self._prices):
            self._edge(2 * node, 2 * node + 1, _ENDLESS if price is None else price)

    def connect(self, node: int, following: int) -> None:
        """Lets a path go from one node to another."""
        self._edge(2 * node + 1, 2 * following, _ENDLESS)

    def start(self, node: int) -> None:
        """Makes a node one where paths start, which may be cut all the same."""
        self._edge(self._source, 2 * node, _ENDLESS)

    def end(self, node: int) -> None:
        """Makes a node one where paths end, which may be cut all the same."""
        self._edge(2 * node + 1, self._sink, _ENDLESS)

    def cheapest(self) -> list[int] | None:
        """The nodes of the cheapest cut, in order; of several, those nearest to where paths end.

        None where no cut separates them.
        """
        while (path := self._path()) is not None:
            room = min(self._left[tail][head] for tail, head in path)
            if room >= _ENDLESS // 2:
                return None
            for tail, head in path:
                self._left[tail][head] -= room
                self._left[head][tail] = self._left[head].get(tail, 0) + room
        behind = self._leading_to_sink()
        return [
            node
            for node in range(len(self._prices))
            if 2 * node + 1 in behind and 2 * node not in behind
        ]

    def _edge(self, tail: int, head: int, room: int) -> None:
        self._left[tail][head] = room
        self._left[head].setdefault(tail, 0)

    def _path(self) -> list[tuple[int, int]] | None:
        """A shortest path with room on every edge."""
        before: dict[int, int] = {self._source: self._source}
        pending = deque([self._source])
        while pending and self._sink not in before:
            tail = pending.popleft()
            for head, room in self._left[tail].items():
                if room > 0 and head not in before:
                    before[head] = tail
                    pending.append(head)
        if self._sink not in before:
            return None
        return _edges(before, self._sink, self._source)

    def _leading_to_sink(self) -> set[int]:
        leading = {self._sink}
        pending = [self._sink]
        while pending:
            head = pending.pop()
            for tail in self._left[head]:
                if self._left[tail].get(head, 0) > 0 and tail not in leading:
                    leading.add(tail)
                    pending.append(tail)
        return leading


def _edges(before: Mapping[int, int], end: int, start: int) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    while end != start:
        edges.append((before[end], end))
        end = before[end]
    return edges


def cheapest_cut(
    prices: Sequence[int | None],
    edges: Iterable[tuple[int, int]],
    starts: Iterable[int],
    ends: Iterable[int],
) -> list[int] | None:
    """The cheapest nodes without which no path leads from `starts` to `ends`, in order.

    Nodes of both kinds may be cut themselves. None where nodes without a price are in the way.
    """
    graph = CutGraph(prices)
    for tail, head in edges:
        graph.connect(tail, head)
    for node in starts:
        graph.start(node)
    for node in ends:
        graph.end(node)
    return graph.cheapest()
