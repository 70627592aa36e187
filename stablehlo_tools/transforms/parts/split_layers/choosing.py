"""Which loops over layers are cut: those over so many, or those that share stacks with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.graph import Graph
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops import LayerLoop, layer_loops, read_layer_loop
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.transforms.parts.split_layers.linked_loops import loops_ahead, loops_in
from stablehlo_tools.transforms.parts.split_layers.marks import range_of
from stablehlo_tools.transforms.parts.split_layers.rows import (
    ROWS,
    CutLoops,
    Key,
    RowOrigins,
    follow,
    in_pieces,
)

_ROOTS = frozenset({"func.func", MANUAL_COMPUTATION})
_WHERE = frozenset({"stablehlo.while", "stablehlo.if", "stablehlo.case"})


@dataclass(frozen=True)
class Chosen:
    """The loops of one block to cut, and what of the block lies in rows of their layers."""

    cut: tuple[LayerLoop, ...]
    loops: CutLoops
    dims: BatchDims


def uncut_loops(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    """The loops over layers of `main` that have not been cut, as `loop` counts them."""
    return _uncut(_every(main, effects))


def choose(
    main: ir.Operation, effects: Effects, trips: int, counts: str, number: int
) -> list[Chosen]:
    """What to cut in `main` and its manual computations. Raises ToolError."""
    every = _every(main, effects)
    uncut = _uncut(every)
    wanted = [loop for loop in uncut if loop.trips == trips]
    if not wanted:
        raise ToolError(_none(uncut, trips, counts), main.location)
    one = _numbered(uncut, number, trips, counts, main) if number >= 0 else None
    if one is not None:
        wanted = [loop for loop in wanted if not is_inside(one.op, loop.op)]
    blocks: dict[ir.Block, list[LayerLoop]] = {}
    for loop in _outermost(wanted):
        blocks.setdefault(_root(loop), []).append(loop)
    if one is not None:
        blocks = {_root(one): _sharing(one, blocks[_root(one)])}
    found: list[Chosen] = []
    for block, loops in blocks.items():
        keys = {key_of(loop.op) for loop in loops}
        others = [
            loop
            for loop in every
            if key_of(loop.op) not in keys and not any(is_inside(one.op, loop.op) for one in loops)
        ]
        cut = CutLoops(loops, others)
        found.append(Chosen(tuple(loops), cut, follow(Graph.of(block), cut, trips)))
    return found


def _every(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    """The loops over layers of `main`, and those that write rows which such loops read, with
    weights that all their layers share."""
    found = {key_of(each.op): each for each in layer_loops(main.regions[0].blocks[0], effects)}
    for loop in list(found.values()):
        rows = [loop.op.operands[carry] for carry in loop.reads]
        for op, carry in loops_ahead(rows):
            if key_of(op) in found:
                continue
            other = read_layer_loop(op, effects, weights=False)
            if other is not None and other.trips == loop.trips and carry in other.writes:
                found[key_of(op)] = other
    keys = map(key_of, loops_in(main))
    return [found[key] for key in keys if key in found]


def _uncut(every: Sequence[LayerLoop]) -> list[LayerLoop]:
    return [loop for loop in every if range_of(loop.op) is None]


def _outermost(loops: Sequence[LayerLoop]) -> list[LayerLoop]:
    return [loop for loop in loops if not any(is_inside(loop.op, other.op) for other in loops)]


def _none(uncut: Sequence[LayerLoop], trips: int, counts: str) -> str:
    heights = sorted({loop.trips for loop in uncut})
    there = ", ".join(map(str, heights))
    known = f"loops go over {there}" if heights else "there is no loop over layers left to cut"
    return f"split-layers: no loop goes over {trips} layers, the sum of {counts}: {known} (P1)"


def _numbered(
    uncut: Sequence[LayerLoop], number: int, trips: int, counts: str, main: ir.Operation
) -> LayerLoop:
    if number >= len(uncut):
        raise ToolError(
            f"split-layers: there is no loop {number} over layers: there are {len(uncut)} (P2)",
            main.location,
        )
    one = uncut[number]
    if one.trips != trips:
        raise ToolError(
            f"split-layers: loop {number} goes over {one.trips} layers, and {counts} are {trips} "
            "(P1)",
            one.op.location,
        )
    return one


def _root(loop: LayerLoop) -> ir.Block:
    """The block of `main` or of a manual computation that a loop stands in. Raises ToolError."""
    block = loop.op.block
    while True:
        owner = block.owner.operation
        if owner.name in _ROOTS:
            return block
        if owner.name not in _WHERE:
            raise ToolError(
                f"split-layers: the loop over layers stands in {owner.name}, through which rows "
                "are not followed (P3)",
                loop.op.location,
            )
        block = owner.block


def _sharing(one: LayerLoop, loops: Sequence[LayerLoop]) -> list[LayerLoop]:
    """A loop and those of `loops` that go over stacks of the same origin, in their order."""
    graph = Graph.of(_root(one))
    origins = RowOrigins(graph, CutLoops(loops, ()), one.trips)
    sources: list[set[int | Key]] = []
    for loop in loops:
        wanted = [
            (graph.numbers[loop.op.operands[carry]], ROWS)
            for carry in in_pieces(loop)
            if carry in loop.reads
        ]
        first = origins.of(wanted)
        arguments = {number for number in first if number in graph.root.arguments}
        sources.append({*arguments, *origins.writers, key_of(loop.op)})
    known = sources[[key_of(loop.op) for loop in loops].index(key_of(one.op))]
    grown = True
    while grown:
        joined = [each for each in sources if not known.isdisjoint(each) and not each <= known]
        known = known.union(*joined)
        grown = bool(joined)
    return [loop for loop, each in zip(loops, sources, strict=True) if not known.isdisjoint(each)]
