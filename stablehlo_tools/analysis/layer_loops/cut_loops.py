"""Chooses the loops over layers that are cut, and finds the values that are cut into pieces by
rows.

A loop that is to be cut reads and writes stacks by rows; its other results are whole. From there
rows are followed forward, as `analysis/dimension_propagation` follows a batch. They are also
followed backward to the origins of stacks, until both directions agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    BatchDims,
    Graph,
    Propagation,
    TiledValue,
    TilingOrigins,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.linked_loops import loops_ahead, range_of
from stablehlo_tools.analysis.loop_carries import LayerLoop, StackRows, layer_loops, read_layer_loop
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import is_inside, ops_named

Key = ir.Value | ir.Operation
ROWS = DimTiling(0)


class CutLoops:
    """The loops to cut, over equally many layers, and other loops over layers, which stay whole."""

    def __init__(self, loops: Iterable[LayerLoop], others: Iterable[LayerLoop]) -> None:
        self._loops = {key_of(loop.op): loop for loop in loops}
        self._others: set[Key] = {key_of(loop.op) for loop in others}

    def find(self, node: Node) -> LayerLoop | None:
        """Returns the loop to cut of a node; None for any other node."""
        return self._loops.get(key_of(node.op)) if node.name == WHILE else None

    def is_left(self, node: Node) -> bool:
        """Returns True if a node is a loop over layers that stays whole."""
        return node.name == WHILE and key_of(node.op) in self._others


def in_pieces(loop: LayerLoop) -> list[int]:
    """Returns the carries whose rows the loop reads or writes completely, in order."""
    return [
        carry
        for carry in stacks(loop)
        if shape_of(loop.op.operands[carry])[0] == rows_of(loop, carry).span * loop.trips
    ]


def stacks(loop: LayerLoop) -> list[int]:
    """Returns the carries that the loop reads or writes by rows, in order."""
    return sorted(loop.reads.keys() | loop.writes.keys())


def rows_of(loop: LayerLoop, carry: int) -> StackRows:
    """Returns the rows of a carry that the loop goes over. Reads and writes use the same rows."""
    return loop.writes[carry] if carry in loop.writes else loop.reads[carry]


def follow(graph: Graph, loops: CutLoops, trips: int) -> BatchDims:
    """Returns the values of a graph that are divided by rows of layers, `trips` of them."""
    origins = RowOrigins(graph, loops, trips)
    seeds: dict[int, DimTiling] = {}
    while True:
        dims = _RowPropagation(graph, loops, trips, seeds).run(seeds)
        layouts = origins.find_origins(_values_read_by_rows(dims, loops))
        added = {number: layout for number, layout in layouts.items() if number not in seeds}
        if not added:
            return dims
        seeds |= added


def _values_read_by_rows(dims: BatchDims, loops: CutLoops) -> Iterator[TiledValue]:
    """Yields the whole values that an op reads by rows."""
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
    """Follows rows forward. Values in `seeds` have rows unless an op decides otherwise."""

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


class RowOrigins(TilingOrigins):
    """Finds the origins of values that are divided by rows, through the loops that are cut."""

    def __init__(self, graph: Graph, loops: CutLoops, trips: int) -> None:
        super().__init__(graph, trips)
        self._loops = loops
        self.writers: list[Key] = []  # loops to cut that write requested rows

    def find_origins(self, wanted: Iterable[TiledValue]) -> dict[int, DimTiling]:
        """Returns the origins, and records the loops to cut that write requested rows."""
        self.writers.clear()
        return super().find_origins(wanted)

    def _around(self, node: Node, place: int, tiling: DimTiling) -> list[TiledValue]:
        loop = self._loops.find(node)
        if loop is None:
            return [] if self._loops.is_left(node) else super()._around(node, place, tiling)
        if tiling != ROWS or place not in in_pieces(loop):
            return []
        if place in loop.writes:
            self.writers.append(key_of(node.op))
        return [(node.operands[place], tiling)]


_ROOTS = frozenset({"func.func", MANUAL_COMPUTATION})
_WHERE = frozenset({"stablehlo.while", "stablehlo.if", "stablehlo.case"})


@dataclass(frozen=True)
class LoopsToCut:
    """The loops of one block to cut, and the values of the block with rows of layers."""

    cut: tuple[LayerLoop, ...]
    loops: CutLoops
    dims: BatchDims


def uncut_loops(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    """Returns the uncut loops over layers of `main`, in the order that the option `loop` counts."""
    return [loop for loop in _every(main, effects) if range_of(loop.op) is None]


def choose(
    main: ir.Operation, effects: Effects, trips: int, counts: str, number: int
) -> list[LoopsToCut]:
    """Returns the loops to cut in `main` and its manual computations. Raises ToolError if none
    fit."""
    every = _every(main, effects)
    uncut = [loop for loop in every if range_of(loop.op) is None]
    wanted = [loop for loop in uncut if loop.trips == trips]
    if not wanted:
        unrolled = "stablehlo-tools opt INPUT -p roll-layers -o rolled.mlirbc"
        hint = "" if every else unrolled  # the layers may be unrolled
        heights = ", ".join(map(str, sorted({loop.trips for loop in uncut})))
        known = f"loops go over {heights}" if uncut else "no loop over layers is left to cut"
        raise ToolError(
            f"split-layers: no loop goes over {trips} layers, the sum of {counts}: {known} (P1)",
            main.location,
            hint=hint,
        )
    one = _loop_by_number(uncut, number, trips, counts, main) if number >= 0 else None
    if one is not None:
        wanted = [loop for loop in wanted if not is_inside(one.op, loop.op)]
    blocks: dict[ir.Block, list[LayerLoop]] = {}
    for loop in wanted:
        if not any(is_inside(loop.op, other.op) for other in wanted):
            blocks.setdefault(_root(loop), []).append(loop)
    if one is not None:
        blocks = {_root(one): _sharing(one, blocks[_root(one)])}
    chosen: list[LoopsToCut] = []
    for block, loops in blocks.items():
        keys = {key_of(loop.op) for loop in loops}
        others = [
            loop
            for loop in every
            if key_of(loop.op) not in keys and not any(is_inside(one.op, loop.op) for one in loops)
        ]
        cut = CutLoops(loops, others)
        chosen.append(LoopsToCut(tuple(loops), cut, follow(Graph.from_block(block), cut, trips)))
    return chosen


def _every(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    """Returns the loops over layers of `main`, and the loops that write rows which they read.

    The latter may have weights that all their layers share.
    """
    by_key = {key_of(each.op): each for each in layer_loops(Function(main).body, effects)}
    for loop in list(by_key.values()):
        rows = [loop.op.operands[carry] for carry in loop.reads]
        for op, carry in loops_ahead(rows):
            other = None if key_of(op) in by_key else read_layer_loop(op, effects, weights=False)
            if other is not None and other.trips == loop.trips and carry in other.writes:
                by_key[key_of(op)] = other
    keys = map(key_of, ops_named(main, {WHILE}))
    return [by_key[key] for key in keys if key in by_key]


def _loop_by_number(
    uncut: Sequence[LayerLoop], number: int, trips: int, counts: str, main: ir.Operation
) -> LayerLoop:
    if number >= len(uncut):
        raise ToolError(
            f"split-layers: loop {number} over layers does not exist: the program has "
            f"{len(uncut)} (P2)",
            main.location,
        )
    one = uncut[number]
    if one.trips != trips:
        raise ToolError(
            f"split-layers: loop {number} goes over {one.trips} layers, but {counts} sum to "
            f"{trips} (P1)",
            one.op.location,
        )
    return one


def _root(loop: LayerLoop) -> ir.Block:
    """Returns the block of `main` or a manual computation that contains a loop. Raises
    ToolError."""
    block = loop.op.block
    while True:
        owner = block.owner.operation
        if owner.name in _ROOTS:
            return block
        if owner.name not in _WHERE:
            raise ToolError(
                f"split-layers: the loop over layers is inside {owner.name}, through which rows "
                "cannot be followed (P3)",
                loop.op.location,
            )
        block = owner.block


def _sharing(one: LayerLoop, loops: Sequence[LayerLoop]) -> list[LayerLoop]:
    """Returns the `loops`, in order, whose stacks have the same origin as those of `one`."""
    graph = Graph.from_block(_root(one))
    origins = RowOrigins(graph, CutLoops(loops, ()), one.trips)
    sources: list[set[int | Key]] = []
    for loop in loops:
        wanted = [
            (graph.numbers[loop.op.operands[carry]], ROWS)
            for carry in in_pieces(loop)
            if carry in loop.reads
        ]
        arguments = {n for n in origins.find_origins(wanted) if n in graph.root.arguments}
        sources.append({*arguments, *origins.writers, key_of(loop.op)})
    known = sources[[key_of(loop.op) for loop in loops].index(key_of(one.op))]
    while joined := [each for each in sources if not known.isdisjoint(each) and not each <= known]:
        known = known.union(*joined)
    return [loop for loop, each in zip(loops, sources, strict=True) if not known.isdisjoint(each)]
