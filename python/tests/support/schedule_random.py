"""Random valid tables: at every turn one rank takes a step that it can take.

Every valid order of every placement can come of it, with full and split gradients, pairs and idle
cells mixed.
"""

from __future__ import annotations

import random

from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.setting import Costs, costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Step,
    Table,
    bidirectional,
    loop,
    parts,
    table_of,
    v_shape,
)

PLACEMENTS = {
    "one-rank": loop(1, 2),
    "loop": loop(2),
    "loop-3": loop(3),
    "interleaved": loop(2, 2),
    "v": v_shape(2),
    "v-3": v_shape(3),
    "w": v_shape(2, 3),
    "bidirectional": bidirectional(2),
    "bidirectional-3": bidirectional(3),
    "custom": Placement(3, ((2, 0, 0, 1, 2), (1, 1, 0, 2, 0))),
}


def random_table(
    seed: int, placement: Placement, microbatches: int, training: bool = True
) -> Table:
    """A valid table that names no transfers."""
    return _Writer(random.Random(seed), placement, microbatches, training).table()


def random_costs(seed: int, stages: int) -> Costs:
    """Costs of every scale, zeros among them."""
    chance = random.Random(seed)

    def times() -> list[float]:
        return [chance.choice((0.0, 0.25, 1.0, chance.random(), 40.0)) for _ in range(stages)]

    return costs(
        stages,
        forward=times(),
        input_gradient=times(),
        weight_gradient=times(),
        backward=times(),
        communication=chance.choice((0.0, 0.1, 1.0, 7.0)),
        overlapped=chance.choice((0.0, 0.6, 1.0)),
    )


def random_transfers(seed: int, table: Table) -> Table:
    """The table with its sends anywhere behind what they send, receives anywhere before the use.

    Sends stay in order, and receives, and few come too early or too late: the run alone is left to
    be judged.
    """
    chance = random.Random(seed)
    whole = with_communication(table, late=chance.random() < 0.5)
    rows = [list(row) for row in whole.rows]
    hold = chance.random() < 0.7
    for row in rows:
        for _ in range(chance.choice((0, 1, len(row), 4 * len(row)))):
            _shift(chance, row, hold)
    return table_of(table.name, table.placement, table.microbatches, rows, table.training)


def _shift(chance: random.Random, row: list[Step | None], hold: bool) -> None:
    """Swaps a step with the one behind it, if one of them is a transfer that may be moved.

    With `hold` sends only move forward and receives back, so that more and more messages wait.
    """
    at = chance.randrange(len(row))
    behind = row[at + 1] if at + 1 < len(row) else None
    here = row[at]
    if here is None or behind is None or _sort(here) == _sort(behind):
        return
    if hold and _sort(here) != "receives" and _sort(behind) != "sends":
        return
    apart = {one[1:] for one in parts(here)}.isdisjoint(one[1:] for one in parts(behind))
    if apart or chance.random() < 0.002:
        row[at], row[at + 1] = behind, here


def _sort(step: Step) -> str:
    """Whether a step computes, sends or receives."""
    if not isinstance(step, Action) or step.kind.is_compute:
        return "computes"
    return "sends" if step.kind.is_send else "receives"


class _Writer:
    def __init__(
        self, chance: random.Random, placement: Placement, microbatches: int, training: bool
    ) -> None:
        self._chance = chance
        self._placement = placement
        self._microbatches = microbatches
        self._training = training
        self._rows: list[list[Step | None]] = [[] for _ in range(placement.ranks)]
        self._done: set[Action] = set()
        cells = placement.stages * microbatches
        share = chance.choice((0.0, 0.5, 1.0))
        self._full = {cell for cell in range(cells) if chance.random() < share}

    def table(self) -> Table:
        while able := self._able():
            step = self._chosen(able)
            rank = self._rank(parts(step)[0])
            if self._chance.random() < 0.1:
                self._rows[rank].append(None)
            self._rows[rank].append(step)
            self._done.update(parts(step))
        return table_of("random", self._placement, self._microbatches, self._rows, self._training)

    def _chosen(self, able: list[Action]) -> Step:
        """One action that can be taken, or two in a pair."""
        first = self._chance.choice(able)
        for second in able if self._chance.random() < 0.5 else ():
            kinds = (first.kind, second.kind)
            if kinds == (ActionKind.FORWARD, ActionKind.BACKWARD) and self._rank(
                first
            ) == self._rank(second):
                return ActionPair(first, second)
        return first

    def _able(self) -> list[Action]:
        able: list[Action] = []
        for stage in range(self._placement.stages):
            for microbatch in range(self._microbatches):
                able += self._next(stage, microbatch)
        return able

    def _next(self, stage: int, microbatch: int) -> list[Action]:
        """The next phase of a stage for a microbatch, if it can be taken."""
        full = stage * self._microbatches + microbatch in self._full
        phases = (
            (ActionKind.BACKWARD,)
            if full
            else (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        )
        for kind in (ActionKind.FORWARD, *(phases if self._training else ())):
            action = Action(kind, stage, microbatch)
            if action not in self._done:
                return [action] if self._can(action) else []
        return []

    def _can(self, action: Action) -> bool:
        kind, stage, microbatch = action
        if kind is ActionKind.FORWARD:
            return stage == 0 or Action(kind, stage - 1, microbatch) in self._done
        if kind is ActionKind.WEIGHT_GRADIENT or stage + 1 == self._placement.stages:
            return True
        gradients = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        return any(Action(made, stage + 1, microbatch) in self._done for made in gradients)

    def _rank(self, action: Action) -> int:
        return self._placement.rank_of(action.stage, action.microbatch)
