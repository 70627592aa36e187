"""Recognises the loop over microbatches, by what its body does with each carry.

It runs a known number of times, and a carry is a counter, a constant, or accumulated: each
iteration adds a term to it (or takes the maximum, …), or writes rows of it that no other does. So
the iterations can run in any order, and in parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_indices import LoopIndices
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.reducers import REDUCERS
from stablehlo_tools.ir.values import is_float, producer
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.staging.written_rows import WrittenRows, written_rows

_WHILE = "stablehlo.while"
_UPDATE = "stablehlo.dynamic_update_slice"
_CONSTRAINT = "sdy.sharding_constraint"
ROWS = "rows"  # how rows that are written are combined
_KINDS = {
    **{f"stablehlo.{kind}": kind for kind in REDUCERS - {"xor"}},
    "stablehlo.subtract": "add",
    _UPDATE: ROWS,
}
_SCATTER = "stablehlo.scatter"
_ONLY_LEFT = frozenset({"stablehlo.subtract", _UPDATE, _SCATTER})
_CONVERT = "stablehlo.convert"
_THROUGH = frozenset({_CONSTRAINT, _CONVERT})
_HEAVY = frozenset({"stablehlo.dot_general", "stablehlo.convolution", "stablehlo.scatter"})


@dataclass(frozen=True)
class Link:
    """An op that takes an accumulator, as operand `place`, and gives it on."""

    op: ir.Operation
    place: int


@dataclass(frozen=True)
class Accumulator:
    """A carry that every iteration adds to: the ops that do so, in order, and how partial outcomes
    are combined, by `add`, `maximum`, …; rows that are written are added to zeros.

    `replaced` says that nothing of what the carry starts from is left: all rows are written.
    """

    carry: int
    kind: str
    links: tuple[Link, ...]
    replaced: bool = False


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
    loops = [view.operation for view in block.operations if view.operation.name == _WHILE]
    found: list[MicrobatchLoop] = []
    refusals: list[ToolError] = []
    for loop in loops:
        read = read_microbatch_loop(loop, effects)
        if isinstance(read, ToolError):
            refusals.append(read)
        else:
            found.append(read)
    if found:
        return max(found, key=lambda each: heavy_ops(each.op))
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
    body = LoopBody(loop, effects)
    indices = LoopIndices(body, count.trips[0], known_integer)
    counters: dict[int, int] = {}
    accumulators: dict[int, Accumulator] = {}
    for carry, argument in enumerate(body.arguments):
        if carry in body.invariant:
            continue
        if carry in body.steps:
            counters[carry] = body.steps[carry]
            continue
        links = _links(body.ends[carry], argument)
        kind = None if links is None else _kind(links)
        rows = None if links is None else _rows(links, indices, count.trips[0])
        if links is None or kind is None or (kind == ROWS and rows is None):
            return _carried(loop, carry, body)
        replaced = rows is not None and rows.is_whole
        accumulators[carry] = Accumulator(carry, kind, tuple(links), replaced)
    if not accumulators:
        return _refused("this loop accumulates nothing over its iterations", loop)
    return MicrobatchLoop(loop, count.trips[0], counters, frozenset(body.invariant), accumulators)


def is_accumulated(end: ir.Value, argument: ir.Value) -> bool:
    """Whether iterations do nothing with a carry but add to it."""
    return _links(end, argument) is not None


def is_sum(end: ir.Value, argument: ir.Value) -> bool:
    """Whether iterations do nothing with a carry but add to it, in its own type."""
    links = _links(end, argument)
    return links is not None and all(_kind_of(link.op) == "add" for link in links)


def _links(end: ir.Value, argument: ir.Value) -> list[Link] | None:
    """The ops that lead from an argument to what comes back for it, each read by the next alone."""
    if len(list(argument.uses)) != 1:
        return None
    links: list[Link] = []
    value = argument
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        user = uses[0].owner.operation
        if user.name == "stablehlo.return":
            return links if value == end and links else None
        place = uses[0].operand_number
        known = _kind_of(user) is not None or user.name in _THROUGH
        if not known or (user.name in _ONLY_LEFT and place):
            return None
        links.append(Link(user, place))
        value = user.results[0]


def _kind(links: list[Link]) -> str | None:
    """How outcomes of some iterations are combined with those of others; None if they cannot be."""
    kinds = {kind for link in links if (kind := _kind_of(link.op)) is not None}
    if len(kinds) != 1 or not all(_is_exact(link.op) for link in links):
        return None
    return kinds.pop()


def _rows(links: list[Link], indices: LoopIndices, trips: int) -> WrittenRows | None:
    updates = [link.op for link in links if link.op.name == _UPDATE]
    return written_rows(updates, indices, trips) if updates else None


def _kind_of(op: ir.Operation) -> str | None:
    """How an op adds to what it takes; a scatter, by what it does with each element."""
    if op.name != _SCATTER:
        return _KINDS.get(op.name)
    block = op.regions[0].blocks[0]
    ops = [view.operation for view in block.operations]
    if len(op.operands) != 3 or len(ops) != 2 or ops[0].name in _ONLY_LEFT:
        return None
    is_whole = (
        set(ops[0].operands) == set(block.arguments) and producer(ops[1].operands[0]) == ops[0]
    )
    return _KINDS.get(ops[0].name) if is_whole else None


def _is_exact(op: ir.Operation) -> bool:
    """Whether a conversion keeps to floats, or to integers: a sum of parts that were cut off to
    integers is another one."""
    if op.name != _CONVERT:
        return True
    return is_float(op.operands[0].type) == is_float(op.results[0].type)


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
    found = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal found
        found += op.name in _HEAVY
        return ir.WalkResult.ADVANCE

    walk(loop, visit)
    return found
