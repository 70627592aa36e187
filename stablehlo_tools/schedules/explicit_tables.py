"""Writes into a table what it implies: its sends and receives, and the idle cells of its ranks.

`with_communication` puts transfers in so that nothing can deadlock. A send stands behind the step
that makes its datum. A receive stands before the step that its rank is in when the datum is made
(early: posted ahead, so the transfer runs beside that step), or behind it (late: nothing waits for
what is not made yet). Early, every step behind a transfer ends after the step that makes its datum;
late, every step before a transfer starts before the datum is made. So all steps and transfers of
all ranks fit into one order, and not even rendezvous deadlocks.

`aligned` puts idle cells in, so that every column is one step of equal length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs, unit_costs
from stablehlo_tools.schedules.simulator import Timeline, simulate
from stablehlo_tools.schedules.table import Action, Kind, Step, Table, compacted, parts, with_rows

_INSTANT = 1e-6  # of the longest phase or hop: what a phase of no time counts as here
_ENDS = {  # of a phase: the two ends of what it hands on, and how far the receiving stage is
    Kind.FORWARD: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, 1),
    Kind.BACKWARD: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, -1),
    Kind.INPUT_GRADIENT: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, -1),
}
_NEEDS = {  # what else an action needs: which datum, of a stage how far away
    Kind.WEIGHT_GRADIENT: (Kind.INPUT_GRADIENT, 0),
    Kind.SEND_FORWARD: (Kind.FORWARD, 0),
    Kind.SEND_BACKWARD: (Kind.INPUT_GRADIENT, 0),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


# A datum that crosses ranks: when it is made, by which rank, at which position of its row; its send
# and its receive; the rank that receives it.
type _Transfer = tuple[float, int, int, Action, Action, int]


def with_communication(table: Table, costs: Costs | None = None, late: bool = False) -> Table:
    """The table with every transfer between ranks as a send and a receive, idle cells dropped.

    They are placed by the times of `costs`, unit times by default. Raises ToolError for a table
    that has them already, or that cannot run.
    """
    if table.communicates:
        raise ToolError(f"{table.name}: the sends and receives are in the table already")
    timed = unit_costs(table.stages) if costs is None else _positive(costs)
    bare, copies = _without_copies(compacted(table))
    timeline = simulate(bare, timed)
    ends: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in table.rows]
    transfers = sorted(_transfers(timeline), key=lambda transfer: transfer[:3])
    for made, sender, position, send, receive, receiver in transfers:
        ends[sender][position + 1].append(send)
        if late:
            before = bisect_left(timeline.starts[receiver], made)
        else:
            before = bisect_right(timeline.ends[receiver], made)
        ends[receiver][before].append(receive)
    for at, own in zip(ends, copies, strict=True):
        for position, actions in own.items():
            at[position] += actions
    rows: list[list[Step | None]] = []
    for row, at in zip(bare.rows, ends, strict=True):
        steps: list[Step | None] = []
        for position, step in enumerate(row):
            steps += [*at.get(position, ()), step]
        rows.append([*steps, *at.get(len(row), ())])
    return with_rows(table, rows)


def _without_copies(table: Table) -> tuple[Table, list[dict[int, list[Action]]]]:
    """The table without copies to the host, and each rank's by the step that they stand before.

    They are no other rank's business: where transfers stand, and that none deadlocks, is decided
    without them.
    """
    rows: list[list[Step | None]] = [[] for _ in table.rows]
    copies: list[dict[int, list[Action]]] = [{} for _ in table.rows]
    for row, kept, own in zip(table.rows, rows, copies, strict=True):
        for step in row:
            if isinstance(step, Action) and step.kind.is_copy:
                own.setdefault(len(kept), []).append(step)
            else:
                kept.append(step)
    return with_rows(table, rows), copies


def _positive(costs: Costs) -> Costs:
    """The costs, no phase of which takes no time at all."""
    phases = (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient)
    least = max(costs.communication, *map(max, phases)) * _INSTANT or 1.0

    def positive(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(time, least) for time in times)

    return replace(costs.with_phases(positive), overlapped=max(costs.overlapped, _INSTANT))


def _transfers(timeline: Timeline) -> Iterator[_Transfer]:
    """The data that actions hand to other ranks."""
    table = timeline.table
    for rank, row in enumerate(table.rows):
        for position, step in enumerate(row):
            made = timeline.ends[rank][position]
            for action in parts(step) if step is not None else ():
                if action.kind not in _ENDS:
                    continue
                kind, stage, microbatch = action
                send_kind, receive_kind, away = _ENDS[kind]
                if not 0 <= stage + away < table.stages:
                    continue
                receiver = table.placement.rank_of(stage + away, microbatch)
                if receiver != rank:
                    send = Action(send_kind, stage, microbatch)
                    receive = Action(receive_kind, stage + away, microbatch)
                    yield made, rank, position, send, receive, receiver


def aligned(table: Table) -> Table:
    """The table with each step in the first column behind all that it needs.

        0F0 0F1 0B0 0B1              0F0 0F1  .  0B0  .  0B1
        1F0 1B0 1F1 1B1      ==>      .  1F0 1B0 1F1 1B1

    Phases, pairs, sends and receives take a column each; a receive stands behind its send, which
    waits for nothing but its datum. Raises ToolError where a step waits for ever.
    """
    table = compacted(table)
    made: dict[Action, int] = {}  # the first column in which it is there, by what is made
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    rows: list[list[Step | None]] = [[] for _ in table.rows]
    taken = [0] * table.ranks
    runnable = list(range(table.ranks))
    while runnable:
        rank = runnable.pop()
        row, cells = table.rows[rank], rows[rank]
        while taken[rank] < len(row):
            step = row[taken[rank]]
            actions = parts(step) if step is not None else ()
            needs = [need for action in actions for need in _needs(table, action)]
            missing = next((need for need in needs if need not in made), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            column = max([len(cells), *(made[need] for need in needs)])
            cells += [None] * (column - len(cells)) + [step]
            taken[rank] += 1
            for action in actions:
                # A full backward makes the input gradient.
                full = action.kind is Kind.BACKWARD
                datum = action._replace(kind=Kind.INPUT_GRADIENT) if full else action
                made.setdefault(datum, len(cells))
                runnable += waiting.pop(datum, ())
    for rank, (row, count) in enumerate(zip(table.rows, taken, strict=True)):
        if count < len(row):
            raise ToolError(f"{table.name}: rank {rank}: {row[count]} waits for ever")
    return with_rows(table, rows)


def _needs(table: Table, action: Action) -> Iterator[Action]:
    """The actions that make what one needs; gradients go by the name of the input gradient."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        yield from _come(table, stage - 1, stage, microbatch, Kind.FORWARD)
    elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        yield Action(Kind.FORWARD, stage, microbatch)
        yield from _come(table, stage + 1, stage, microbatch, Kind.INPUT_GRADIENT)
    elif kind in _NEEDS:
        needed, away = _NEEDS[kind]
        yield Action(needed, stage + away, microbatch)


def _come(table: Table, source: int, stage: int, microbatch: int, kind: Kind) -> Iterator[Action]:
    """What a stage reads of a neighbour: its datum, or the receive that brings it."""
    if not 0 <= source < table.stages:
        return
    rank_of = table.placement.rank_of
    if table.communicates and rank_of(source, microbatch) != rank_of(stage, microbatch):
        yield Action(_ENDS[kind][1], stage, microbatch)
    else:
        yield Action(kind, source, microbatch)
