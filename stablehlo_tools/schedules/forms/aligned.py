"""Puts idle cells into a table, so that every column is one step of equal length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.table import Action, Kind, Step, Table, compacted, parts, table_of

_RECEIVES = {
    Kind.FORWARD: Kind.RECEIVE_FORWARD,
    Kind.INPUT_GRADIENT: Kind.RECEIVE_BACKWARD,
}
_NEEDS = {  # what else an action needs: which datum, of a stage how far away
    Kind.WEIGHT_GRADIENT: (Kind.INPUT_GRADIENT, 0),
    Kind.SEND_FORWARD: (Kind.FORWARD, 0),
    Kind.SEND_BACKWARD: (Kind.INPUT_GRADIENT, 0),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


def aligned(table: Table) -> Table:
    """The table with each step in the first column behind all that it needs.

        0F0 0F1 0B0 0B1              0F0 0F1  .  0B0  .  0B1
        1F0 1B0 1F1 1B1      ==>      .  1F0 1B0 1F1 1B1

    Phases, pairs, sends and receives take a column each; a receive stands behind its send, which
    waits for nothing but its datum. Raises ToolError where a step waits for ever.
    """
    packed = compacted(table)
    return _Columns(packed).spread()


class _Columns:
    """Assigns columns, each rank in its own order; what a step makes is named by an action."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._explicit = table.communicates
        self._made: dict[Action, int] = {}  # the first column in which it is there
        self._waiting: defaultdict[Action, list[int]] = defaultdict(list)
        self._rows: list[list[Step | None]] = [[] for _ in table.rows]
        self._taken = [0] * table.ranks

    def spread(self) -> Table:
        table = self._table
        runnable = list(range(table.ranks))
        while runnable:
            runnable += self._advance(runnable.pop())
        for rank, (row, taken) in enumerate(zip(table.rows, self._taken, strict=True)):
            if taken < len(row):
                raise ToolError(f"{table.name}: rank {rank}: {row[taken]} waits for ever")
        rows = self._rows
        return table_of(table.name, table.placement, table.microbatches, rows, table.training)

    def _advance(self, rank: int) -> list[int]:
        """Takes steps of a rank until one waits; returns the ranks that can go on."""
        woken: list[int] = []
        row = self._table.rows[rank]
        while self._taken[rank] < len(row):
            step = row[self._taken[rank]]
            actions = parts(step) if step is not None else ()
            missing = self._place(rank, step, actions)
            if missing is not None:
                self._waiting[missing].append(rank)
                break
            self._taken[rank] += 1
            for made in map(_datum, actions):
                self._made.setdefault(made, len(self._rows[rank]))
                woken += self._waiting.pop(made, ())
        return woken

    def _place(self, rank: int, step: Step | None, actions: tuple[Action, ...]) -> Action | None:
        """Puts a step into the first column that it can stand in; or returns what is missing."""
        cells = self._rows[rank]
        column = len(cells)
        for action in actions:
            for need in self._needs(action):
                there = self._made.get(need)
                if there is None:
                    return need
                column = max(column, there)
        cells += [None] * (column - len(cells)) + [step]
        return None

    def _needs(self, action: Action) -> Iterator[Action]:
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            yield from self._come(stage - 1, stage, microbatch, Kind.FORWARD)
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            yield Action(Kind.FORWARD, stage, microbatch)
            yield from self._come(stage + 1, stage, microbatch, Kind.INPUT_GRADIENT)
        elif kind in _NEEDS:
            needed, away = _NEEDS[kind]
            yield Action(needed, stage + away, microbatch)

    def _come(self, source: int, stage: int, microbatch: int, kind: Kind) -> Iterator[Action]:
        """What a stage reads of a neighbour: its datum, or the receive that brings it."""
        if not 0 <= source < self._table.stages:
            return
        rank_of = self._table.placement.rank_of
        if self._explicit and rank_of(source, microbatch) != rank_of(stage, microbatch):
            yield Action(_RECEIVES[kind], stage, microbatch)
        else:
            yield Action(kind, source, microbatch)


def _datum(action: Action) -> Action:
    """The name of what an action makes: a full backward makes the input gradient."""
    if action.kind is Kind.BACKWARD:
        return Action(Kind.INPUT_GRADIENT, action.stage, action.microbatch)
    return action
