"""Which collectives of a loop can run in another iteration, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loop_indices import LoopIndices, is_monotonic, written_positions
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.ir.values import key_of, producer

MOVABLE = frozenset(
    {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    }
)
_UPDATE = "stablehlo.dynamic_update_slice"


@dataclass(frozen=True)
class Move:
    """A collective and the ops that change place with it, or why it stays."""

    collective: Collective
    ops: Sequence[ir.Operation] = ()
    reason: str = ""


def ahead(body: LoopBody, collective: Collective) -> Move:
    """Whether a collective could be issued before its iteration, with all that it needs."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    if _is_ahead(body, collective):
        return Move(collective, reason="it is ahead already: nothing in its iteration reads it")
    needed = body.needed_by([collective.op])
    for op in needed:
        carried = [v for v in body.reads(op) if _is_carried(body, v)]
        if carried:
            number = body.argument_number(carried[0])
            return Move(
                collective,
                reason=f"what it sends follows from carry {number}, which the iteration before "
                "computes",
            )
        if body.is_costly(op):
            return Move(collective, reason=f"what it sends needs the {named(op)} before it")
    return _with_tensors(collective, needed, needed)


def late(body: LoopBody, collective: Collective, indices: LoopIndices) -> Move:
    """Whether a collective could end after its iteration, with all that hangs on it."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    if _is_late(body, collective):
        return Move(collective, reason="it is late already: what it sends was there before")
    here = body.hanging_on([collective.op], later=False)
    reason = _stays_here(body, collective, here, indices)
    if not reason and not any(body.carries_of(value) for op in here for value in op.results):
        reason = "nothing is carried on of its result"
    if not reason:
        reason = _needed_next(body, collective, here)
    return Move(collective, reason=reason) if reason else _with_tensors(collective, here, here)


def _stays_here(
    body: LoopBody, collective: Collective, here: Sequence[ir.Operation], indices: LoopIndices
) -> str:
    """Why what hangs on a collective in its own iteration cannot wait; empty where it can."""
    for op in here:
        if body.is_costly(op):
            return f"its result is needed by the {named(op)}"
        if op.name == _UPDATE and not _is_regular(op, body, indices):
            return (
                f"it is not shown that the positions of the {named(op)} go one way and do not "
                "wrap around"
            )
    return ""


def _needed_next(body: LoopBody, collective: Collective, here: Sequence[ir.Operation]) -> str:
    """Why a result cannot come late because of the next iteration; empty where it can.

    A collective_permute, the transfer between the stages of a pipeline, may come as late as the
    beginning of the next iteration, if that has compute that does not wait for it.
    """
    inside = {key_of(op) for op in here}
    hanging = body.hanging_on([collective.op], later=True)
    reader = next((op for op in hanging if key_of(op) not in inside), None)
    if reader is None:
        return ""
    if collective.kind != "collective_permute":
        return f"the next iteration needs its result, for the {named(reader)}"
    waiting = {key_of(op) for op in hanging}
    if any(body.is_costly(op) and key_of(op) not in waiting for op in body.ops):
        return ""
    return (
        f"all that could hide it in the next iteration needs its result, the {named(reader)} first"
    )


def named(op: ir.Operation) -> str:
    """An op and where it is from, for a message."""
    place = to_place(op.location)
    name = op.name.removeprefix("stablehlo.")
    return f"{name} of {place.file}:{place.line}" if place.file else name


def why_unmovable(collective: Collective) -> str:
    """Why a collective keeps its place whatever the loop; empty where that depends."""
    if collective.is_async:
        return "it is asynchronous already, with a start and a done of its own"
    if collective.kind not in MOVABLE:
        return f"a {collective.kind} keeps its place"
    return ""


def _is_carried(body: LoopBody, value: ir.Value) -> bool:
    return body.argument_number(value) is not None and not body.is_indexed(value)


def _is_ahead(body: LoopBody, collective: Collective) -> bool:
    """Whether a result is only sent on and reformatted in its iteration."""
    read_by = body.hanging_on([collective.op], later=False)
    return all(op.name in FORMATTING or body.communicates(op) for op in read_by)


def _is_late(body: LoopBody, collective: Collective) -> bool:
    """Whether what a collective sends comes as it is from the iteration before."""
    pending = list(collective.op.operands)
    was_there = False
    while pending:
        value = pending.pop()
        if body.is_indexed(value):
            continue
        maker = producer(value)
        if maker is None:
            was_there = True
        elif maker.name in FORMATTING:
            pending += maker.operands
        else:
            return False
    return was_there


def _is_regular(op: ir.Operation, body: LoopBody, indices: LoopIndices) -> bool:
    """Whether the updates go up or down along one dimension, by indices known before the run."""
    starts = list(op.operands)[2:]
    if not all(body.is_indexed(start) for start in starts):
        return False
    if not any(body.is_moving(start) for start in starts):
        return True
    positions = written_positions(op, indices)
    return positions is not None and is_monotonic(positions[1])


def _with_tensors(
    collective: Collective, ops: Sequence[ir.Operation], made: Sequence[ir.Operation]
) -> Move:
    """The move, if all that its ops make can be carried from one iteration to the next."""
    for op in made:
        for result in op.results:
            if not isinstance(result.type, ir.RankedTensorType):
                return Move(collective, reason=f"a loop carries no {result.type}")
    return Move(collective, ops)
