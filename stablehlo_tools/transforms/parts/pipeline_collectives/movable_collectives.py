"""Finds the collectives of a loop that can run in another iteration, and why the others cannot.

`survey_loop` reads a loop once. Its `ahead` and `late` list for each collective the ops that would
move with it.

XLA has a pass for the same (collective_pipeliner.cc) that demands more of the loop. Backward (here:
ahead) it moves chains of ops that no other op reads and that begin at invariant carries. Forward
(here: late) it needs the result to be formatted into the one dynamic_update_slice of a carry. Here
all operands or all dependents of a collective move with it. Other ops may read them too, and
carries may be passed from one position to another. A costly op among them is refused: if it moved
with the collective, it could not hide it.
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
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody, count_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import COLLECTIVES, short_names
from stablehlo_tools.ir.values import describe_op, key_of, producer
from stablehlo_tools.ir.walk import functions_by_name, ops_named

MOVABLE = short_names(COLLECTIVES)  # without transfers to a host and Shardy's reshards
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


@dataclass(frozen=True)
class Move:
    """A collective and the ops that move with it; `reason` says why it stays, if it does."""

    collective: Collective
    ops: Sequence[ir.Operation] = ()
    reason: str = ""


def ahead(body: LoopBody, collective: Collective) -> Move:
    """Returns the move of a collective to an earlier iteration, with all ops that it depends on."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    # A collective is ahead already if its iteration only reformats its result or sends it on.
    read_by = body.depending_on([collective.op], later=False)
    if all(
        op.name in FORMATTING or (body.communicates(op) and op.name not in CONTROL_FLOW)
        for op in read_by
    ):
        return Move(collective, reason="it runs ahead already: its own iteration does not read it")
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
                reason=f"its operand follows from carry {number}, which the previous iteration "
                "computes",
            )
        if body.is_costly(op):
            return Move(collective, reason=f"its operand needs the {describe_op(op)} before it")
    return _with_tensors(collective, needed)


def late(body: LoopBody, collective: Collective, indices: LoopIndices) -> Move:
    """Returns the move of a collective to a later iteration, with all ops that depend on it."""
    stays = why_unmovable(collective)
    if stays:
        return Move(collective, reason=stays)
    if _is_late(body, collective):
        return Move(
            collective,
            reason="it runs late already: its operand is a value of the previous iteration",
        )
    here = body.depending_on([collective.op], later=False)
    reason = _stays_here(body, collective, here, indices)
    if not reason and not any(body.carries_of(value) for op in here for value in op.results):
        reason = "the loop does not carry its result"
    if not reason:
        reason = _needed_next(body, collective, here)
    return Move(collective, reason=reason) if reason else _with_tensors(collective, here)


def _stays_here(
    body: LoopBody, collective: Collective, here: Sequence[ir.Operation], indices: LoopIndices
) -> str:
    """Says why the dependents in a collective's own iteration cannot wait; empty if they can."""
    for op in here:
        if body.is_costly(op):
            return f"the {describe_op(op)} needs its result"
        if op.name == DYNAMIC_UPDATE_SLICE and not _is_regular(op, body, indices):
            return (
                f"the positions of the {describe_op(op)} are not known to go one way without "
                "wrapping around"
            )
    return ""


def _needed_next(body: LoopBody, collective: Collective, here: Sequence[ir.Operation]) -> str:
    """Says why the next iteration cannot wait for a result; empty if it can.

    A collective_permute transfers activations between pipeline stages. It may end as late as the
    beginning of the next iteration, if that has compute that does not wait for it.
    """
    inside = {key_of(op) for op in here}
    dependents = body.depending_on([collective.op], later=True)
    reader = next((op for op in dependents if key_of(op) not in inside), None)
    if reader is None:
        return ""
    if collective.kind != "collective_permute":
        return f"the {describe_op(reader)} of the next iteration needs its result"
    waiting = {key_of(op) for op in dependents}
    if any(body.is_costly(op) and key_of(op) not in waiting for op in body.ops):
        return ""
    return (
        "all compute that could hide it in the next iteration needs its result, the "
        f"{describe_op(reader)} first"
    )


def why_unmovable(collective: Collective) -> str:
    """Says why a collective cannot move in any loop; empty if that depends on the loop."""
    if collective.is_async:
        return "it is asynchronous already, with a start and a done of its own"
    if collective.kind not in MOVABLE:
        return f"a {collective.kind} never moves"
    return ""


def why_unsinkable(collective: Collective) -> str:
    """Says why a collective cannot run after any loop; empty if that depends on the loop."""
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
    """Returns True for a ranked tensor type of numbers with a static shape."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return False
    return isinstance(type_.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType)


def has_sharding(op: ir.Operation) -> bool:
    """Returns True if an op has a sharding attribute, of Shardy or of XLA."""
    return any(name in op.attributes for name in _SHARDINGS)


def _is_late(body: LoopBody, collective: Collective) -> bool:
    """Returns True if a collective's operands are the previous iteration's values, at most
    reformatted."""
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
    """Returns True if the written positions are monotonic in one dimension and known before the
    run."""
    starts = list(op.operands)[2:]
    if not all(body.is_indexed(start) for start in starts):
        return False
    if not any(body.is_moving(start) for start in starts):
        return True
    positions = written_positions(op, indices)
    return positions is not None and is_monotonic(positions[1])


def _with_tensors(collective: Collective, ops: Sequence[ir.Operation]) -> Move:
    """Returns the move; refused if an op has a result that a loop cannot carry."""
    for op in ops:
        for result in op.results:
            if not isinstance(result.type, ir.RankedTensorType):
                return Move(collective, reason=f"a loop cannot carry a {result.type}")
    return Move(collective, ops)


@dataclass(frozen=True)
class LoopSurvey:
    """Facts about a loop; invalid as soon as the module changes.

    `trips`: the trip count, if it is the same on all devices. `fewest`: the lowest trip count on
    any device. `reason`: why the trip count is unknown. `alike`: decides which values are the same
    on all devices of a collective's groups.
    """

    body: LoopBody
    indices: LoopIndices
    trips: int | None
    fewest: int
    reason: str
    alike: AlikeInGroups

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the body itself, in order."""
        return self.body.collectives

    @cached_property
    def ahead(self) -> list[Move]:
        """The moves to an earlier iteration, one for each collective."""
        return self._check_trip_count(ahead(self.body, each) for each in self.collectives)

    @cached_property
    def late(self) -> list[Move]:
        """The moves to a later iteration, one for each collective."""
        return self._check_trip_count(
            late(self.body, each, self.indices) for each in self.collectives
        )

    def _check_trip_count(self, moves: Iterable[Move]) -> list[Move]:
        """Returns the moves; refuses all of them if the trip count is not known."""
        return [
            Move(m.collective, reason=self.reason) if self.reason and m.ops else m for m in moves
        ]


def survey_loop(loop: ir.Operation, module: ir.Module, facts: ModuleFacts) -> LoopSurvey:
    """Analyzes a loop of a module without calls."""
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
        count = count_trips(loop, known)
        if isinstance(count, str):
            reason = count
        else:
            fewest = min(count.trips)
            trips = fewest if len(set(count.trips)) == 1 else None
    indices = LoopIndices(body, trips or 0, known)
    return LoopSurvey(body, indices, trips, fewest, reason, AlikeInGroups(values))


def loops_of(module: ir.Module) -> list[ir.Operation]:
    """Returns all loops, inner ones before those around them."""
    return ops_named(module.operation, (WHILE,))[::-1]


def next_loop(module: ir.Module, mark: str) -> ir.Operation | None:
    """Returns the first loop with the attribute `mark`, inner loops first; None if there is
    none."""
    return next((loop for loop in loops_of(module) if mark in loop.attributes), None)
