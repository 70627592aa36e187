"""Which values lie in rows of layers: a stack that a loop goes over, and what is made of it.

A loop that is to be cut takes stacks row by row and writes others so; whatever it hands on is
whole. From there rows are followed forward, as `batch_dims` follows a batch, and backward to where
stacks come from, until both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stablehlo_tools.analysis.batch_dims.graph import BRANCHES, WHILE, Graph, Node
from stablehlo_tools.analysis.batch_dims.layout import Layout, reshaped
from stablehlo_tools.analysis.batch_dims.propagation import BatchDims, Propagation
from stablehlo_tools.analysis.batch_dims.rules import step_of
from stablehlo_tools.analysis.layer_loops.reading import LayerLoop, Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.building import shape_of
from stablehlo_tools.ir.values import key_of

Key = ir.Value | ir.Operation
Wanted = tuple[int, Layout]
ROWS = Layout(0)


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
    origins = Origins(graph, loops, trips)
    seeds: dict[int, Layout] = {}
    while True:
        dims = _RowPropagation(graph, loops, trips, seeds).run(seeds)
        found = origins.of(_wanted(dims, loops))
        added = {number: layout for number, layout in found.items() if number not in seeds}
        if not added:
            return dims
        seeds |= added


def _wanted(dims: BatchDims, loops: CutLoops) -> Iterator[Wanted]:
    """The whole values that something takes rows of."""
    layouts = dims.layouts

    def missing(numbers: Iterable[int], taken: Iterable[Layout | None]) -> Iterator[Wanted]:
        for number, layout in zip(numbers, taken, strict=True):
            if layout is not None and number not in layouts:
                yield number, layout

    for node in dims.graph.nodes:
        step, loop = dims.steps.get(node), loops.find(node)
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
        self, graph: Graph, loops: CutLoops, trips: int, seeds: Mapping[int, Layout]
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

    def _put(self, number: int, layout: Layout | None, mixer: Node | None) -> None:
        super()._put(number, layout or self._seeds.get(number), mixer)


class Origins:
    """Where values that lie in rows come from, op by op backwards."""

    def __init__(self, graph: Graph, loops: CutLoops, trips: int) -> None:
        self._graph = graph
        self._loops = loops
        self._trips = trips
        self.writers: list[Key] = []  # loops to cut that were met, as they write what was asked for
        self._makers: dict[int, tuple[Node, int]] = {}
        self._carriers: dict[int, tuple[Node, int]] = {}
        for node in graph.nodes:
            self._makers |= {number: (node, i) for i, number in enumerate(node.results)}
            if node.name == WHILE:
                inner = node.bodies[1].arguments
                self._carriers |= {number: (node, i) for i, number in enumerate(inner)}

    def of(self, wanted: Iterable[Wanted]) -> dict[int, Layout]:
        """The first values, with their layouts, that those asked for are made of: arguments, or
        what ops make that take nothing in rows."""
        self.writers.clear()
        found: dict[int, Layout] = {}
        pending, seen = list(wanted), set[int]()
        while pending:
            number, layout = pending.pop()
            shape = self._graph.shape(number)
            if number in seen or shape is None or not layout.fits(shape, self._trips):
                continue
            seen.add(number)
            before = self._before(number, layout)
            if before is None:
                found[number] = layout
            else:
                pending += before
        return found

    def _before(self, number: int, layout: Layout) -> list[Wanted] | None:
        """What a value is made of, in which layouts; None where it comes from nothing else."""
        if number in self._carriers:
            return self._around(*self._carriers[number], layout)
        if number not in self._makers:
            return None
        node, place = self._makers[number]
        if node.name == WHILE:
            return self._around(node, place, layout)
        if node.name in BRANCHES:
            return [(body.returned[place], layout) for body in node.bodies]
        return self._through(node, place, layout)

    def _around(self, node: Node, place: int, layout: Layout) -> list[Wanted]:
        """What a carry of a loop comes from."""
        loop = self._loops.find(node)
        if loop is None:
            ends = [] if self._loops.is_left(node) else [node.bodies[1].returned[place]]
            return [(number, layout) for number in (node.operands[place], *ends)] if ends else []
        if layout != ROWS or place not in in_pieces(loop):
            return []
        if place in loop.writes:
            self.writers.append(key_of(node.op))
        return [(node.operands[place], layout)]

    def _through(self, node: Node, place: int, layout: Layout) -> list[Wanted] | None:
        """The operands that an op must take in rows to give such a result."""
        for position, number in enumerate(node.operands):
            for given in self._candidates(node, number, layout):
                layouts = tuple(
                    given if other == position else None for other in range(len(node.operands))
                )
                step = step_of(node.op, layouts, self._trips)
                if step is None or step.results[place] != layout:
                    continue
                taken = zip(node.operands, step.operands, strict=True)
                return [(operand, each) for operand, each in taken if each is not None]
        return None

    def _candidates(self, node: Node, number: int, layout: Layout) -> list[Layout]:
        shape, result = self._graph.shape(number), self._graph.shape(node.results[0])
        if shape is None or result is None:
            return []
        if node.name == "stablehlo.reshape":
            back = reshaped(layout, result, shape, self._trips)
            return [] if back is None else [back]
        outers = dict.fromkeys((layout.outer, 1))
        likely = sorted(range(len(shape)), key=lambda dim: dim != layout.dim)
        every = [Layout(dim, outer) for outer in outers for dim in likely]
        return [each for each in every if each.fits(shape, self._trips)]
