"""Plays a schedule in lock step, to see that every value reaches the cell that reads it."""

from __future__ import annotations

from stablehlo_tools.schedules.lockstep import Cell, Direction, Lockstep

_Work = tuple[int, int]  # a virtual stage and a microbatch
_Slots = list[list[_Work | None]]  # by rank


def is_consistent(schedule: Lockstep) -> bool:
    """Whether each cell finds its input in the slot that it reads.

    By the rules of `schedules.lockstep`: a forward runs before the backward of the same tick, what
    is sent at the end of a tick can be read from the next on, and arrivals overwrite what lies in
    their slot.
    """
    players = [_Player(schedule, each, each is schedule.backward) for each in schedule.directions]
    kept: _Slots = [[None] * schedule.kept_slots for _ in range(schedule.ranks)]
    together = schedule.forward is not None and schedule.backward is not None
    for tick in range(schedule.ticks):
        for player in players:
            if not player.play(tick, kept if together else None):
                return False
    return True


class _Player:
    def __init__(self, schedule: Lockstep, direction: Direction, back: bool) -> None:
        self._ranks = schedule.ranks
        self._last = schedule.ranks * schedule.chunks - 1
        self._direction = direction
        self._back = back
        self._slots: _Slots = [[None] * direction.slots for _ in range(schedule.ranks)]

    def play(self, tick: int, kept: _Slots | None) -> bool:
        """Runs a column and delivers what it sends; whether all inputs were there."""
        sent: list[_Work | None] = [None] * self._ranks
        for rank, cell in enumerate(self._direction.cells[tick]):
            if cell is None:
                continue
            work = cell.chunk * self._ranks + rank, cell.microbatch
            if not self._has_input(rank, cell, work) or not self._keeps(rank, cell, work, kept):
                return False
            sent[rank] = work
        step = -1 if self._back else 1
        for rank, slot in enumerate(self._direction.deliveries[tick]):
            self._slots[rank][slot] = sent[(rank - step) % self._ranks]
        return True

    def _has_input(self, rank: int, cell: Cell, work: _Work) -> bool:
        stage, microbatch = work
        if cell.source < 0:
            return stage == (self._last if self._back else 0)
        before = stage + 1 if self._back else stage - 1
        return self._slots[rank][cell.source] == (before, microbatch)

    def _keeps(self, rank: int, cell: Cell, work: _Work, kept: _Slots | None) -> bool:
        """A forward leaves what its backward finds."""
        if kept is None:
            return True
        if self._back:
            return kept[rank][cell.kept] == work
        kept[rank][cell.kept] = work
        return True
