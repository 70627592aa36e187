"""Which collectives of a loop can run in another iteration, and why the others cannot.

`survey_loop` reads a loop once; its `ahead` and `late` say for each collective which ops would move
with it. XLA has a pass for the same (collective_pipeliner.cc), which demands more of the loop:
backwards (here: ahead) it moves chains of ops that nothing else reads and that begin at carries
which stay as they are; forwards (late) it wants the result formatted into the one
dynamic_update_slice of a carry. Here whatever a collective needs, or whatever depends on it, moves
along, others may read it too, and carries may be handed from one position to another, as long as no
costly op is among them: moved with the collective, it could not hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.dataflow import CONTROL_FLOW
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_values import (
    AlikeInGroups,
    LoopIndices,
    is_monotonic,
    written_positions,
)
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody, counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import COLLECTIVES, short_names
from stablehlo_tools.ir.values import key_of, named, producer
from stablehlo_tools.ir.walk import functions_by_name, ops_named

MOVABLE = short_names(COLLECTIVES)  # transfers to a host, and Shardy's reshards, keep their place
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


@dataclass(frozen=True)
class Move:
    """A collective and the ops that change place with it, or why it stays."""

    collective: Collective
    ops: Sequence[ir.Operation] = ()
    reason: str = ""


def ahead(body: LoopBody, collective: Collective) -> Move:
    """The move of a collective before its iteration, with all that it needs."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    # The iteration may only send a result on and reformat it.
    read_by = body.depending_on([collective.op], later=False)
    if all(
        op.name in FORMATTING or (body.communicates(op) and op.name not in CONTROL_FLOW)
        for op in read_by
    ):
        return Move(collective, reason="it is ahead already: nothing in its iteration reads it")
    needed = body.needed_by([collective.op])
    for op in needed:
        carried = [
            v
            for v in body.reads(op)
            if body.argument_number(v) is not None and not body.is_indexed(v)
        ]
        if carried:
            number = body.argument_number(carried[0])
            return Move(
                collective,
                reason=f"what it sends follows from carry {number}, which the iteration before "
                "computes",
            )
        if body.is_costly(op):
            return Move(collective, reason=f"what it sends needs the {named(op)} before it")
    return _with_tensors(collective, needed)


def late(body: LoopBody, collective: Collective, indices: LoopIndices) -> Move:
    """The move of a collective behind its iteration, with all that depends on it."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    if _is_late(body, collective):
        return Move(collective, reason="it is late already: what it sends was there before")
    here = body.depending_on([collective.op], later=False)
    reason = _stays_here(body, collective, here, indices)
    if not reason and not any(body.carries_of(value) for op in here for value in op.results):
        reason = "nothing is carried on of its result"
    if not reason:
        reason = _needed_next(body, collective, here)
    return Move(collective, reason=reason) if reason else _with_tensors(collective, here)


def _stays_here(
    body: LoopBody, collective: Collective, here: Sequence[ir.Operation], indices: LoopIndices
) -> str:
    """Why what depends on a collective in its own iteration cannot wait; empty where it can."""
    for op in here:
        if body.is_costly(op):
            return f"its result is needed by the {named(op)}"
        if op.name == DYNAMIC_UPDATE_SLICE and not _is_regular(op, body, indices):
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
    dependents = body.depending_on([collective.op], later=True)
    reader = next((op for op in dependents if key_of(op) not in inside), None)
    if reader is None:
        return ""
    if collective.kind != "collective_permute":
        return f"the next iteration needs its result, for the {named(reader)}"
    waiting = {key_of(op) for op in dependents}
    if any(body.is_costly(op) and key_of(op) not in waiting for op in body.ops):
        return ""
    return (
        f"all that could hide it in the next iteration needs its result, the {named(reader)} first"
    )


def why_unmovable(collective: Collective) -> str:
    """Why a collective keeps its place whatever the loop; empty where that depends on the loop."""
    if collective.is_async:
        return "it is asynchronous already, with a start and a done of its own"
    if collective.kind not in MOVABLE:
        return f"a {collective.kind} keeps its place"
    return ""


def why_unsinkable(collective: Collective) -> str:
    """Why a collective can run behind no loop; empty where that depends on the loop."""
    op = collective.op
    stays = why_unmovable(collective)
    if stays:
        return stays
    if len(op.operands) != 1:
        return "it has several operands"
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return "it sends a tensor without a static shape"
    if has_sharding(op):
        return "its result has a sharding of its own"
    return ""


def is_static_tensor(type_: ir.Type) -> bool:
    """Whether a type is that of a tensor of numbers whose dimensions are all known."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return False
    return isinstance(type_.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType)


def has_sharding(op: ir.Operation) -> bool:
    """Whether an op says how its results are sharded, in the words of Shardy or of XLA."""
    return any(name in op.attributes for name in _SHARDINGS)


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


def _with_tensors(collective: Collective, ops: Sequence[ir.Operation]) -> Move:
    """The move, if all that its ops make can be carried from one iteration to the next."""
    for op in ops:
        for result in op.results:
            if not isinstance(result.type, ir.RankedTensorType):
                return Move(collective, reason=f"a loop carries no {result.type}")
    return Move(collective, ops)


@dataclass(frozen=True)
class LoopSurvey:
    """A loop as it stands; not valid any more once the module changes.

    `trips` is how often it runs on all devices, if they agree, `fewest` how often at least on any;
    `reason` why that is not known. `alike` tells which values are the same on all devices of a
    collective's groups.
    """

    body: LoopBody
    indices: LoopIndices
    trips: int | None
    fewest: int
    reason: str
    alike: AlikeInGroups

    @property
    def collectives(self) -> list[Collective]:
        """Those of the body itself, in order."""
        return self.body.collectives

    @cached_property
    def ahead(self) -> list[Move]:
        """The moves ahead of their iteration."""
        return self._checked(ahead(self.body, each) for each in self.collectives)

    @cached_property
    def late(self) -> list[Move]:
        """The moves to a later iteration."""
        return self._checked(late(self.body, each, self.indices) for each in self.collectives)

    def _checked(self, moves: Iterable[Move]) -> list[Move]:
        """The moves, of which none is possible if the trip count is not known."""
        return [
            Move(m.collective, reason=self.reason) if self.reason and m.ops else m for m in moves
        ]


def survey_loop(loop: ir.Operation, module: ir.Module, facts: ModuleFacts) -> LoopSurvey:
    """Reads a loop of a module without calls."""
    values = DeviceValues(module, facts)

    def known(value: ir.Value) -> Sequence[int] | None:
        numbers = values.scalar(value)
        return None if numbers is None else [int(number) for number in numbers]

    body = LoopBody(loop, Effects(functions_by_name(module)))
    trips: int | None = None
    fewest, reason = 0, ""
    for view in body.condition.operations:
        if body.communicates(view.operation) or body.effects.has_effect(view.operation):
            reason = f"its condition has a {view.operation.name.removeprefix('stablehlo.')}"
            break
    else:
        count = counted(loop, known)
        if isinstance(count, str):
            reason = count
        else:
            fewest = min(count.trips)
            trips = fewest if len(set(count.trips)) == 1 else None
    indices = LoopIndices(body, trips or 0, known)
    return LoopSurvey(body, indices, trips, fewest, reason, AlikeInGroups(values))


def loops_of(module: ir.Module) -> list[ir.Operation]:
    """All loops, inner ones before those around them."""
    return ops_named(module.operation, (WHILE,))[::-1]


def next_loop(module: ir.Module, mark: str) -> ir.Operation | None:
    """The first loop that has a mark, an attribute, inner ones before those around them."""
    return next((loop for loop in loops_of(module) if mark in loop.attributes), None)
