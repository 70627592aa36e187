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

from stablehlo_tools.analysis.dataflow import Body, Node, inputs_of, numbers_in
from stablehlo_tools.analysis.demand.knowledge import (
    Budget,
    Carries,
    Knowledge,
    chosen_region,
)
from stablehlo_tools.analysis.demand.program import (
    ENTER,
    Groups,
    Levels,
    Need,
    Program,
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

    node: Node
    loop: Node
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
    """Fills in the records of permutes, by the number of their node."""

    def __init__(
        self,
        program: Program,
        rules: Rules,
        knowledge: Knowledge,
        levels: Levels,
        budget: Budget,
        records: dict[Node, Record],
    ) -> None:
        self.countings: dict[Node, Counting] = {}
        self._rules = rules
        self._knowledge = knowledge
        self._levels = levels
        self._budget = budget
        self._records = records
        self._need: list[Need | None] = [None] * len(program.types)
        self._made: dict[Node, tuple[Rule, Groups | None]] = {}
        self._effects = {node for node in program.nodes if _has_effect(node, rules)}
        self._weight = 1 + rules.devices * rules.most_places // _FREE_SIZE
        self._active = np.ones(rules.devices, np.bool_)
        self._iterations: list[int] = []
        self._program = program

    def run(self) -> None:
        """Raises TooMuchWorkError where the budget does not suffice."""
        main = self._program.root
        self._knowledge.forward(main)
        for end in main.returned:
            self._add(end, self._rules.full(end))
        self._backward(main)

    def _backward(self, code: Body) -> None:
        self._budget.spend(len(code.nodes) * self._weight)
        for node in reversed(code.nodes):
            needs = [self._take(result) for result in node.results]
            if node.name == WHILE:
                self._loop(node, needs)
            elif node.name in BRANCHES:
                self._branches(node, needs)
            else:
                self._plain(node, needs)

    def _plain(self, node: Node, needs: Sequence[Need | None]) -> None:
        record = self._records.get(node)
        if record is not None:
            self._note(record, needs[0])
        if node not in self._effects and all(need is None for need in needs):
            return
        if node not in self._made:
            groups = (
                None if node.name == ENTER else self._levels.groups(self._program.computation(node))
            )
            self._made[node] = self._rules.of(node), groups
        rule, groups = self._made[node]
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

    def _loop(self, loop: Node, needs: Sequence[Need | None]) -> None:
        history = self._knowledge.histories.get(loop)
        if history is None:
            self._whole(loop, needs)
            return
        self._count(loop, history)
        self._size(loop, len(history))
        body = loop.bodies[1]
        carried, sources = list(needs), loop.results
        for iteration in reversed(range(len(history))):
            for need, source, end in zip(carried, sources, body.returned, strict=True):
                if need is not None:
                    self._add(end, self._rules.handed(need, source, end))
            self._knowledge.enter(body, history[iteration])
            self._iterations.append(iteration)
            self._backward(body)
            self._iterations.pop()
            carried = [self._take(argument) for argument in body.arguments]
            sources = body.arguments
        groups = self._levels.groups(self._program.computation(loop))
        for need, source, operand in zip(carried, sources, loop.operands, strict=True):
            if need is not None:
                self._add(operand, shared(self._rules.handed(need, source, operand), groups))

    def _whole(self, loop: Node, needs: Sequence[Need | None]) -> None:
        """A loop that is not walked: everything that goes in, where anything is needed.

        How often it runs may depend on what nobody needs; it must end all the same.
        """
        talks = self._communicates(loop)
        inside = [node for body in loop.bodies for node in body.nested()]
        reason = ENDLESS if loop in self._knowledge.endless else UNKNOWN
        for node in inside:
            if node in self._records:
                self._records[node].reason = reason
        runs = not self._effects.isdisjoint(inside) or not self._ends(loop)
        rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
        if not rows and not runs:
            return
        everywhere = np.ones((self._rules.devices, 1), np.bool_)
        needed = everywhere if runs else np.logical_or.reduce(rows)
        if talks and needed.any():
            needed = everywhere
        groups = self._levels.groups(self._program.computation(loop))
        made = set[int]().union(*map(numbers_in, loop.bodies))
        for value in sorted(inputs_of(loop) - made):
            spread = np.broadcast_to(needed, (len(needed), self._rules.places(value)))
            self._add(value, shared(spread, groups))

    def _ends(self, loop: Node) -> bool:
        """Whether a loop's number of iterations is known."""
        now = (self._knowledge.of_devices(operand) for operand in loop.operands)
        initial = [
            tuple(int(n) for n in known) if known is not None and known.ndim == 1 else None
            for known in now
        ]
        return trip_count(loop.op, initial) is not None

    def _branches(self, node: Node, needs: Sequence[Need | None]) -> None:
        predicate = node.operands[0]
        chosen = chosen_region(self._knowledge.of_devices(predicate), node)
        if chosen is None:
            self._add_predicate(node, needs)
        around = self._active
        for number, region in enumerate(node.bodies):
            mask = np.ones_like(around) if chosen is None else chosen == number
            if not mask.any():
                continue
            self._active = around & mask
            for need, result, end in zip(needs, node.results, region.returned, strict=True):
                if need is not None:
                    taken = self._rules.handed(need & mask[:, None], result, end)
                    self._add(
                        end, shared(taken, self._levels.groups(self._program.computation(node)))
                    )
            self._backward(region)
        self._active = around

    def _add_predicate(self, node: Node, needs: Sequence[Need | None]) -> None:
        inside = (inner for body in node.bodies for inner in body.nested())
        runs = self._communicates(node) or not self._effects.isdisjoint(inside)
        rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
        if runs:
            self._add(node.operands[0], self._rules.full(node.operands[0]))
        elif rows:
            groups = self._levels.groups(self._program.computation(node))
            needed = np.logical_or.reduce(rows)
            self._add(node.operands[0], shared(needed, groups))

    def _communicates(self, node: Node) -> bool:
        return any(
            self._rules.communication(inner) is not None
            for body in node.bodies
            for inner in body.nested()
        )

    def _note(self, record: Record, need: Need | None) -> None:
        """Which targets of a permute need what they receive in this iteration."""
        iteration = self._iterations[-1]
        if record.needed is None or record.executed is None or record.reason:
            return
        record.executed[iteration] |= self._active.any()
        if need is not None:
            record.needed[iteration] |= need[record.targets].any(axis=1)

    def _size(self, loop: Node, trips: int) -> None:
        """Makes room for the permutes of a loop."""
        for record in self._records.values():
            if record.loop is not loop:
                continue
            if record.needed is None:
                record.needed = np.zeros((trips, len(record.targets)), np.bool_)
                record.executed = np.zeros(trips, np.bool_)
            elif len(record.needed) != trips:
                record.reason = CHANGING

    def _count(self, loop: Node, history: Sequence[Carries]) -> None:
        """Notes the carried integers that are the same on all devices, whenever the loop runs."""
        counting = Counting(len(history))
        for position in range(len(loop.operands)):
            series = [carries[position][0] for carries in history]
            known = [values for values in series if values is not None and values.ndim == 1]
            if known and len(known) == len(series) and all((v == v[0]).all() for v in known):
                counting.series[position] = [int(values[0]) for values in known]
        before = self.countings.get(loop)
        if before is not None:
            kept = {p: s for p, s in counting.series.items() if before.series.get(p) == s}
            counting = Counting(counting.trips, kept)
        self.countings[loop] = counting


def _has_effect(node: Node, rules: Rules) -> bool:
    control = node.name in BRANCHES or node.name == WHILE
    return not control and rules.has_effect(node)
