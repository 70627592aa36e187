"""Recognises the loop over microbatches, by what its body does with each carry.

It runs a known number of times, and a carry is a counter, a constant, or accumulated: each
iteration adds a term to it (or takes the maximum, …), or writes rows of it that no other does. So
the iterations can run in any order, and in parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import Accumulator, LoopCarries
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, SCATTER, WHILE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk

_HEAVY = frozenset({DOT_GENERAL, CONVOLUTION, SCATTER})  # what a unit of work is cut at


@dataclass(frozen=True)
class MicrobatchLoop:
    """A `while` over `trips` microbatches; `counters` gives what each adds to a carry."""

    op: ir.Operation
    trips: int
    counters: dict[int, int]
    constants: frozenset[int]
    accumulators: dict[int, Accumulator]

    @property
    def block(self) -> ir.Block:
        """The block of an iteration."""
        return self.op.regions[1].blocks[0]


def find_microbatch_loop(block: ir.Block, effects: Effects) -> MicrobatchLoop:
    """The loop over microbatches of a block: the heaviest one that is such a loop.

    Raises a located ToolError where there is none: what stands in the way in the likeliest.
    """
    loops = [view.operation for view in block.operations if view.operation.name == WHILE]
    readable: list[MicrobatchLoop] = []
    refusals: list[ToolError] = []
    for loop in loops:
        read = read_microbatch_loop(loop, effects)
        if isinstance(read, ToolError):
            refusals.append(read)
        else:
            readable.append(read)
    if readable:
        return max(readable, key=lambda each: heavy_ops(each.op))
    heavy = [loop for loop in loops if heavy_ops(loop)]
    if len(heavy) == 1:  # of several, one is a forward over layers and one its backward
        raise refusals[loops.index(heavy[0])]
    raise ToolError(
        "expand-mpmd: the program has no loop over microbatches (P1); --microbatches M makes one",
        block.owner.location,
    )


def read_microbatch_loop(loop: ir.Operation, effects: Effects) -> MicrobatchLoop | ToolError:
    """The loop as one over microbatches, or why it is none."""
    count = counted(loop, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1:
        why = count if isinstance(count, str) else "it differs by device"
        return _refused(f"how often this loop runs is not known: {why}", loop)
    if not heavy_ops(loop):
        return _refused("this loop computes too little to be one over microbatches", loop)
    carries = LoopCarries(LoopBody(loop, effects), count.trips[0])
    body = carries.body
    accumulators: dict[int, Accumulator] = {}
    for carry in range(len(body.arguments)):
        if carry in body.invariant or carry in body.steps:
            continue
        accumulator = carries.accumulator(carry)
        if accumulator is None:
            return _carried(loop, carry, body)
        accumulators[carry] = accumulator
    if not accumulators:
        return _refused("this loop accumulates nothing over its iterations", loop)
    return MicrobatchLoop(
        loop, carries.trips, dict(body.steps), frozenset(body.invariant), accumulators
    )


def _carried(loop: ir.Operation, carry: int, body: LoopBody) -> ToolError:
    maker = producer(body.ends[carry])
    place = loop.location if maker is None else maker.location
    return ToolError(
        f"expand-mpmd: carry {carry} of the loop over microbatches, "
        f"{loop.operands[carry].type}, is no sum: an iteration uses what the one before it left, "
        "so the microbatches cannot run at once (P2)",
        place,
        (
            note("the loop is here", loop.location),
            note("of a step without a loop over microbatches, --microbatches M makes one"),
        ),
    )


def _refused(why: str, loop: ir.Operation) -> ToolError:
    return ToolError(f"expand-mpmd: {why} (P1)", loop.location)


def heavy_ops(loop: ir.Operation) -> int:
    """How many matrix products, convolutions and scatters an op is or has in its regions."""
    count = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal count
        count += op.name in _HEAVY
        return ir.WalkResult.ADVANCE

    walk(loop, visit)
    return count
