"""Which values lie in rows of layers: a stack that a loop goes over, and what is made of it.

A loop that is to be cut takes stacks row by row and writes others so; whatever it hands on is
whole. From there rows are followed forward, as `batch_dims` follows a batch, and backward to where
stacks come from, until both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stablehlo_tools.analysis.dimension_propagation.graph import BRANCHES, WHILE, Graph, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    BatchDims,
    Origins,
    Propagation,
    TiledValue,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.layer_loops import LayerLoop
from stablehlo_tools.analysis.loop_carries import Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of

Key = ir.Value | ir.Operation
ROWS = DimTiling(0)


class CutLoops:
    """The loops to cut, over as many layers each, and other loops over layers, which are left as
    they are and take whole stacks."""

    def __init__(self, loops: Iterable[LayerLoop], others: Iterable[LayerLoop]) -> None:
        self._loops = {key_of(loop.op): loop for loop in loops}
        self._others: set[Key] = {key_of(loop.op) for loop in others}

    def find(self, node: Node) -> LayerLoop | None:
        """The loop to cut that a node is."""
        return self._loops.get(key_of(node.op)) if node.name == WHILE else None

    def is_left(self, node: Node) -> bool:
        """Whether a node is a loop over layers that is left as it is."""
        return node.name == WHILE and key_of(node.op) in self._others


def in_pieces(loop: LayerLoop) -> list[int]:
    """The carries of which the loop takes or writes all rows, in order."""
    return [carry for carry in stacks(loop) if _is_whole(loop, rows_of(loop, carry))]


def stacks(loop: LayerLoop) -> list[int]:
    """The carries that the loop takes or writes by rows, in order."""
    return sorted(loop.reads.keys() | loop.writes.keys())


def rows_of(loop: LayerLoop, carry: int) -> Rows:
    """The rows of a carry that the loop goes over; those it reads it also writes, if any."""
    return loop.writes[carry] if carry in loop.writes else loop.reads[carry]


def _is_whole(loop: LayerLoop, rows: Rows) -> bool:
    return shape_of(loop.op.operands[rows.carry])[0] == rows.span * loop.trips


def follow(graph: Graph, loops: CutLoops, trips: int) -> BatchDims:
    """The values of a graph that lie in rows of layers, `trips` of them."""
    origins = RowOrigins(graph, loops, trips)
    seeds: dict[int, DimTiling] = {}
    while True:
        dims = _RowPropagation(graph, loops, trips, seeds).run(seeds)
        found = origins.of(_wanted(dims, loops))
        added = {number: layout for number, layout in found.items() if number not in seeds}
        if not added:
            return dims
        seeds |= added


def _wanted(dims: BatchDims, loops: CutLoops) -> Iterator[TiledValue]:
    """The whole values that something takes rows of."""
    layouts = dims.tilings

    def missing(numbers: Iterable[int], taken: Iterable[DimTiling | None]) -> Iterator[TiledValue]:
        for number, layout in zip(numbers, taken, strict=True):
            if layout is not None and number not in layouts:
                yield number, layout

    for node in dims.graph.nodes:
        step, loop = dims.op_tilings.get(node), loops.find(node)
        if step is not None:
            yield from missing(node.operands, step.operands)
        elif loop is not None:
            places = in_pieces(loop)
            yield from missing([node.operands[place] for place in places], [ROWS] * len(places))
        elif node.name == WHILE and not loops.is_left(node):
            carried = [layouts.get(number) for number in node.results]
            yield from missing(node.operands, carried)
            yield from missing(node.bodies[1].returned, carried)
        elif node.name in BRANCHES:
            for body in node.bodies:
                yield from missing(body.returned, [layouts.get(n) for n in node.results])


class _RowPropagation(Propagation):
    """Follows rows forward; values that `seeds` name lie in rows unless an op makes them so."""

    def __init__(
        self, graph: Graph, loops: CutLoops, trips: int, seeds: Mapping[int, DimTiling]
    ) -> None:
        super().__init__(graph, trips)
        self._cut = loops
        self._seeds = dict(seeds)

    def _loop(self, node: Node) -> None:
        loop = self._cut.find(node)
        if loop is not None:
            places = set(in_pieces(loop))
            layouts = [ROWS if place in places else None for place in range(len(node.results))]
            self._set(node, layouts, None)
        elif self._cut.is_left(node):
            self._set(node, [None] * len(node.results), None)
        else:
            super()._loop(node)

    def _put(self, number: int, tiling: DimTiling | None, mixer: Node | None) -> None:
        super()._put(number, tiling or self._seeds.get(number), mixer)


class RowOrigins(Origins):
    """Where values that lie in rows come from, past the loops that are cut."""

    def __init__(self, graph: Graph, loops: CutLoops, trips: int) -> None:
        super().__init__(graph, trips)
        self._loops = loops
        self.writers: list[Key] = []  # loops to cut that were met, as they write what was asked for

    def of(self, wanted: Iterable[TiledValue]) -> dict[int, DimTiling]:
        """As without loops to cut; notes those that write what was asked for."""
        self.writers.clear()
        return super().of(wanted)

    def _around(self, node: Node, place: int, tiling: DimTiling) -> list[TiledValue]:
        loop = self._loops.find(node)
        if loop is None:
            return [] if self._loops.is_left(node) else super()._around(node, place, tiling)
        if tiling != ROWS or place not in in_pieces(loop):
            return []
        if place in loop.writes:
            self.writers.append(key_of(node.op))
        return [(node.operands[place], tiling)]
