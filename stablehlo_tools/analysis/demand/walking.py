"""Walks a program backwards with the needs of its outputs, loops iteration by iteration.

What a loop's carry is needed for in one iteration is what the body's result is needed for in the
iteration before: so a permute of garbage that only becomes other garbage is found not to be needed.
Every device's share of every output of the program counts as needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.demand.knowledge import (
    Budget,
    Carries,
    Knowledge,
    chosen_region,
)
from stablehlo_tools.analysis.demand.program import (
    ENTER,
    Code,
    Groups,
    Levels,
    Need,
    OpInstance,
    Program,
    nested,
    shared,
)
from stablehlo_tools.analysis.demand.rules import Rule, Rules
from stablehlo_tools.analysis.trip_counts import trip_count
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES

_FREE_SIZE = 100_000  # devices times places that cost no more than few
CHANGING = "its loop runs a different number of times for each iteration of a loop around it"
UNKNOWN = "how often its loop runs is not known before the run, or differs by device"
ENDLESS = "its loop never ends: what decides whether it goes on does not change"


@dataclass(eq=False)
class Record:
    """What is found out about one permute: by iteration and pair of devices, whether the target
    needs what it receives, and by iteration, whether the permute runs.
    """

    step: OpInstance
    loop: OpInstance
    targets: list[int]
    needed: NDArray[np.bool_] | None = None
    executed: NDArray[np.bool_] | None = None
    reason: str = ""


@dataclass(eq=False)
class Counting:
    """The integers that a loop carries, the same on all devices: by position, one an iteration."""

    trips: int
    series: dict[int, list[int]] = field(default_factory=dict[int, "list[int]"])


class Walk:
    """Fills in the records of permutes, by the number of their step."""

    def __init__(
        self,
        program: Program,
        rules: Rules,
        knowledge: Knowledge,
        levels: Levels,
        budget: Budget,
        records: dict[int, Record],
    ) -> None:
        self.countings: dict[int, Counting] = {}
        self._rules = rules
        self._knowledge = knowledge
        self._levels = levels
        self._budget = budget
        self._records = records
        self._need: list[Need | None] = [None] * len(program.types)
        self._made: dict[int, tuple[Rule, Groups | None]] = {}
        self._effects = {step.number for step in program.steps if _has_effect(step, rules)}
        self._weight = 1 + rules.devices * rules.most_places // _FREE_SIZE
        self._active = np.ones(rules.devices, np.bool_)
        self._iterations: list[int] = []
        self._program = program

    def run(self) -> None:
        """Raises TooMuchWorkError where the budget does not suffice."""
        main = self._program.main
        self._knowledge.forward(main)
        for end in main.ends:
            self._add(end, self._rules.full(end))
        self._backward(main)

    def _backward(self, code: Code) -> None:
        self._budget.spend(len(code.steps) * self._weight)
        for step in reversed(code.steps):
            needs = [self._take(result) for result in step.results]
            if step.name == WHILE:
                self._loop(step, needs)
            elif step.name in BRANCHES:
                self._branches(step, needs)
            else:
                self._plain(step, needs)

    def _plain(self, step: OpInstance, needs: Sequence[Need | None]) -> None:
        record = self._records.get(step.number)
        if record is not None:
            self._note(record, needs[0])
        if step.number not in self._effects and all(need is None for need in needs):
            return
        if step.number not in self._made:
            groups = None if step.name == ENTER else self._levels.groups(step.computation)
            self._made[step.number] = self._rules.of(step), groups
        rule, groups = self._made[step.number]
        for operand, need in rule(needs):
            self._add(operand, shared(need, groups))

    def _add(self, value: int, need: Need) -> None:
        before = self._need[value]
        self._need[value] = need if before is None else before | need

    def _take(self, value: int) -> Need | None:
        """The need of a value, and no longer; what is zeros in any case needs nothing."""
        need, self._need[value] = self._need[value], None
        zeros = self._knowledge.zeros.now[value]
        return need if need is None or zeros is None else need & ~zeros

    def _loop(self, loop: OpInstance, needs: Sequence[Need | None]) -> None:
        history = self._knowledge.histories.get(loop.number)
        if history is None:
            self._whole(loop, needs)
            return
        self._count(loop, history)
        self._size(loop, len(history))
        body = loop.regions[1]
        carried, sources = list(needs), loop.results
        for iteration in reversed(range(len(history))):
            for need, source, end in zip(carried, sources, body.ends, strict=True):
                if need is not None:
                    self._add(end, self._rules.handed(need, source, end))
            self._knowledge.enter(body, history[iteration])
            self._iterations.append(iteration)
            self._backward(body)
            self._iterations.pop()
            carried = [self._take(argument) for argument in body.arguments]
            sources = body.arguments
        groups = self._levels.groups(loop.computation)
        for need, source, operand in zip(carried, sources, loop.operands, strict=True):
            if need is not None:
                self._add(operand, shared(self._rules.handed(need, source, operand), groups))

    def _whole(self, loop: OpInstance, needs: Sequence[Need | None]) -> None:
        """A loop that is not walked: everything that goes in, where anything is needed.

        How often it runs may depend on what nobody needs; it must end all the same.
        """
        talks = self._communicates(loop)
        inside = [step for region in loop.regions for step in nested(region)]
        reason = ENDLESS if loop.number in self._knowledge.endless else UNKNOWN
        for step in inside:
            if step.number in self._records:
                self._records[step.number].reason = reason
        runs = any(step.number in self._effects for step in inside) or not self._ends(loop)
        rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
        if not rows and not runs:
            return
        everywhere = np.ones((self._rules.devices, 1), np.bool_)
        needed = everywhere if runs else np.logical_or.reduce(rows)
        if talks and needed.any():
            needed = everywhere
        groups = self._levels.groups(loop.computation)
        read = set(loop.operands)
        for region in loop.regions:
            read |= region.reads()
        for value in sorted(read):
            spread = np.broadcast_to(needed, (len(needed), self._rules.places(value)))
            self._add(value, shared(spread, groups))

    def _ends(self, loop: OpInstance) -> bool:
        """Whether a loop's number of iterations is known."""
        now = (self._knowledge.of_devices(operand) for operand in loop.operands)
        initial = [
            tuple(int(n) for n in known) if known is not None and known.ndim == 1 else None
            for known in now
        ]
        return trip_count(loop.op, initial) is not None

    def _branches(self, step: OpInstance, needs: Sequence[Need | None]) -> None:
        predicate = step.operands[0]
        chosen = chosen_region(self._knowledge.of_devices(predicate), step)
        if chosen is None:
            self._add_predicate(step, needs)
        around = self._active
        for number, region in enumerate(step.regions):
            mask = np.ones_like(around) if chosen is None else chosen == number
            if not mask.any():
                continue
            self._active = around & mask
            for need, result, end in zip(needs, step.results, region.ends, strict=True):
                if need is not None:
                    taken = self._rules.handed(need & mask[:, None], result, end)
                    self._add(end, shared(taken, self._levels.groups(step.computation)))
            self._backward(region)
        self._active = around

    def _add_predicate(self, step: OpInstance, needs: Sequence[Need | None]) -> None:
        inside = [s for region in step.regions for s in nested(region)]
        runs = self._communicates(step) or any(s.number in self._effects for s in inside)
        rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
        if runs:
            self._add(step.operands[0], self._rules.full(step.operands[0]))
        elif rows:
            groups = self._levels.groups(step.computation)
            needed = np.logical_or.reduce(rows)
            self._add(step.operands[0], shared(needed, groups))

    def _communicates(self, step: OpInstance) -> bool:
        return any(
            self._rules.communication(inner) is not None
            for region in step.regions
            for inner in nested(region)
        )

    def _note(self, record: Record, need: Need | None) -> None:
        """Which targets of a permute need what they receive in this iteration."""
        iteration = self._iterations[-1]
        if record.needed is None or record.executed is None or record.reason:
            return
        record.executed[iteration] |= self._active.any()
        if need is not None:
            record.needed[iteration] |= need[record.targets].any(axis=1)

    def _size(self, loop: OpInstance, trips: int) -> None:
        """Makes room for the permutes of a loop."""
        for record in self._records.values():
            if record.loop is not loop:
                continue
            if record.needed is None:
                record.needed = np.zeros((trips, len(record.targets)), np.bool_)
                record.executed = np.zeros(trips, np.bool_)
            elif len(record.needed) != trips:
                record.reason = CHANGING

    def _count(self, loop: OpInstance, history: Sequence[Carries]) -> None:
        """Notes the carried integers that are the same on all devices, whenever the loop runs."""
        counting = Counting(len(history))
        for position in range(len(loop.operands)):
            series = [carries[position][0] for carries in history]
            known = [values for values in series if values is not None and values.ndim == 1]
            if known and len(known) == len(series) and all((v == v[0]).all() for v in known):
                counting.series[position] = [int(values[0]) for values in known]
        before = self.countings.get(loop.number)
        if before is not None:
            kept = {p: s for p, s in counting.series.items() if before.series.get(p) == s}
            counting = Counting(counting.trips, kept)
        self.countings[loop.number] = counting


def _has_effect(step: OpInstance, rules: Rules) -> bool:
    control = step.name in BRANCHES or step.name == WHILE
    return not control and rules.has_effect(step)
