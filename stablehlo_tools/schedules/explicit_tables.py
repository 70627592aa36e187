"""Adds the implicit steps of a table: its sends and receives, and the idle cells of its ranks.

`with_communication` inserts transfers so that they cannot deadlock. A send follows the step that
produces its datum. A receive is placed relative to the step that its rank runs at that moment.
Early, it comes before that step, so that the transfer overlaps with it. Late, it comes after, so
that no rank waits for data not yet produced. Early, every step after a transfer ends after its
datum is produced; late, every step before a transfer starts before. So a single order contains all
steps and transfers of all ranks, and even rendezvous cannot deadlock.

`align_columns` inserts idle cells, so that every column is one step of equal length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs, unit_costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Step,
    Table,
    drop_idle_cells,
    parts,
    with_rows,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

_INSTANT = 1e-6  # time of a phase that costs 0, as a share of the longest phase or hop
_ENDS = {  # per phase: the send and receive of its result, and the offset of the receiving stage
    ActionKind.FORWARD: (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, 1),
    ActionKind.BACKWARD: (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1),
    ActionKind.INPUT_GRADIENT: (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1),
}
_NEEDS = {  # other inputs of an action: the datum, and the offset of the stage that produces it
    ActionKind.WEIGHT_GRADIENT: (ActionKind.INPUT_GRADIENT, 0),
    ActionKind.SEND_FORWARD: (ActionKind.FORWARD, 0),
    ActionKind.SEND_BACKWARD: (ActionKind.INPUT_GRADIENT, 0),
    ActionKind.RECEIVE_FORWARD: (ActionKind.SEND_FORWARD, -1),
    ActionKind.RECEIVE_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
}


# A datum that crosses ranks: its time of production, the producing rank, the position in its row,
# its send and its receive, and the receiving rank.
type _Transfer = tuple[float, int, int, Action, Action, int]


def with_communication(table: Table, costs: Costs | None = None, late: bool = False) -> Table:
    """The table with every transfer between ranks as a send and a receive, idle cells dropped.

    They are placed by the times of `costs`, unit times by default. Raises ToolError for a table
    that has them already, or that cannot run.
    """
    if table.communicates:
        raise ToolError(f"{table.name}: the table already has sends and receives")
    timed = unit_costs(table.stages) if costs is None else _positive(costs)
    bare, copies = _without_copies(drop_idle_cells(table))
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
    """Returns the table without copies to the host, and each rank's copies by the next step.

    Copies do not involve other ranks, so transfers are placed without them.
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
    """Returns the costs with every phase longer than 0, so that starts and ends are ordered."""
    phases = (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient)
    least = max(costs.communication, *map(max, phases)) * _INSTANT or 1.0

    def positive(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(time, least) for time in times)

    return replace(costs.with_phases(positive), overlapped=max(costs.overlapped, _INSTANT))


def _transfers(timeline: Timeline) -> Iterator[_Transfer]:
    """Yields the data that actions send to other ranks."""
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


def align_columns(table: Table) -> Table:
    """Returns the table with each step in the first column after all of its inputs.

        0F0 0F1 0B0 0B1              0F0 0F1  .  0B0  .  0B1
        1F0 1B0 1F1 1B1      ==>      .  1F0 1B0 1F1 1B1

    Each phase, pair, send and receive occupies one column. A receive comes after its send, and a
    send waits only for its datum. Raises ToolError if a step waits forever.
    """
    table = drop_idle_cells(table)
    made: dict[Action, int] = {}  # the first column in which each result is available
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
                full = action.kind is ActionKind.BACKWARD
                datum = action._replace(kind=ActionKind.INPUT_GRADIENT) if full else action
                made.setdefault(datum, len(cells))
                runnable += waiting.pop(datum, ())
    for rank, (row, count) in enumerate(zip(table.rows, taken, strict=True)):
        if count < len(row):
            raise ToolError(f"{table.name}: rank {rank}: {row[count]} waits for ever")
    return with_rows(table, rows)


def _needs(table: Table, action: Action) -> Iterator[Action]:
    """Yields the producers of an action's inputs; a full backward counts as an input gradient."""
    kind, stage, microbatch = action
    if kind is ActionKind.FORWARD:
        yield from _come(table, stage - 1, stage, microbatch, ActionKind.FORWARD)
    elif kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        yield Action(ActionKind.FORWARD, stage, microbatch)
        yield from _come(table, stage + 1, stage, microbatch, ActionKind.INPUT_GRADIENT)
    elif kind in _NEEDS:
        needed, away = _NEEDS[kind]
        yield Action(needed, stage + away, microbatch)


def _come(
    table: Table, source: int, stage: int, microbatch: int, kind: ActionKind
) -> Iterator[Action]:
    """Yields the action that provides a neighbour's datum: its phase, or the receive."""
    if not 0 <= source < table.stages:
        return
    rank_of = table.placement.rank_of
    if table.communicates and rank_of(source, microbatch) != rank_of(stage, microbatch):
        yield Action(_ENDS[kind][1], stage, microbatch)
    else:
        yield Action(kind, source, microbatch)
