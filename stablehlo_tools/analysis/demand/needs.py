"""Finds the needs of each value on each device, from the outputs of a program backwards.

`StepRules` makes the rule that maps the needs of an op's results to the needs of its operands. A
rule is made once for each node and used in every iteration. An op that is not understood needs all
operands on every device that needs any of its results. If it may communicate, it needs them on all
devices. Numbers that are known before the run need nothing.

`Walk` goes backwards by these rules, loops iteration by iteration. The need of a loop's carry in
one iteration is the need of the body's result in the iteration before. So a permute of garbage that
only becomes other garbage is found to be unneeded. A fixpoint would join all iterations, and find
every permute needed. Every device's share of every output of the program counts as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.dataflow import CONTROL_FLOW, Body, Node, inputs_of, numbers_in
from stablehlo_tools.analysis.demand.demand_program import (
    EDGES,
    ENTER,
    LEAVE,
    DemandProgram,
    DimMap,
    ElementAccess,
    Groups,
    Need,
    share_in_groups,
)
from stablehlo_tools.analysis.demand.knowledge import (
    Carries,
    Knowledge,
    StepBudget,
    places_with_value,
    window,
)
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import trip_count
from stablehlo_tools.dialect.custom_calls import is_annotation
from stablehlo_tools.dialect.names import BARRIER, SELECT, SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, Trait, ops_with, short_names

Needs = list[tuple[int, Need]]
Rule = Callable[[Sequence[Need | None]], Needs]

_GROUPED = short_names(ops_with(Trait.GROUPED))
_LOCAL_DIALECTS = ("stablehlo.", "chlo.")
_FREE_SIZE = 100_000  # devices times places up to which the cost does not grow
CHANGING = "its loop runs a different number of times for each iteration of a loop around it"
UNKNOWN = "the number of iterations of its loop is unknown before the run, or differs by device"
ENDLESS = "its loop never ends: its condition does not change"


def exchange_rule(collective: Collective, facts: ModuleFacts) -> Callable[[Need], Need] | None:
    """Returns the rule from the needs of results to those of operands; None if not understood.

    A permute needs only the sources of the targets that need something. For the other collectives,
    all members of a group are needed if one of them needs something.
    """
    groups = None if collective.is_async else facts.groups(collective)
    if groups is None:
        return None
    if collective.kind == "collective_permute":
        sources, targets = [source for source, _ in groups], [target for _, target in groups]

        def permute(need: Need) -> Need:
            operand_need = np.zeros_like(need)
            np.logical_or.at(operand_need, sources, need[targets])
            return operand_need

        return permute
    if collective.kind not in _GROUPED:
        return None
    members = [list(group) for group in groups]

    def rule(need: Need) -> Need:
        operand_need = np.zeros_like(need)
        for group in members:
            operand_need[group] = need[group].any(axis=0)
        return operand_need

    return rule


class StepRules:
    """Makes the rules of a program's nodes."""

    def __init__(self, program: DemandProgram, knowledge: Knowledge) -> None:
        self._program = program
        self._knowledge = knowledge
        self._tracked = program.tracked
        self._effects = Effects(program.functions)
        self._devices = program.devices

    def places(self, value: int) -> int:
        """Returns the number of columns of a value's needs."""
        return self._tracked.counts[value]

    def full(self, value: int) -> Need:
        """Returns the need of all of a value on all devices."""
        return np.broadcast_to(np.True_, (self._devices, self.places(value)))

    def has_effect(self, node: Node) -> bool:
        """Returns True if an op runs even if its results are unused."""
        return node.name not in EDGES and self._effects.has_effect(node.op)

    def make_rule(self, node: Node) -> Rule:
        """Returns the rule of a node that is not control flow."""
        operands = node.inputs
        if self.has_effect(node):
            always = [(operand, self.full(operand)) for operand in operands]
            return lambda _: always
        if node.name == BARRIER:
            return lambda needs: [
                (operand, need)
                for operand, need in zip(operands, needs, strict=True)
                if need is not None
            ]
        if node.name in EDGES:
            return self._crossing(node)
        if self._program.computation(node) is None and self._program.is_global:
            return self._on_devices(operands, together=True)
        collective = self._program.communication(node)
        if collective is not None:
            exchanged = exchange_rule(collective, self._program.facts)
            if exchanged is None or len(node.operands) != len(node.results):
                return self._on_devices(operands, together=True)
            return self._exchange(node, exchanged)
        access = self._tracked.access(node)
        if access is not None:
            return self._access(node, access)
        if node.name == SELECT:
            return self._select(node)
        # A local op computes on each device separately, and has no effect.
        if node.name == "stablehlo.custom_call":
            local = is_annotation(node.op)
        else:
            of_values = node.name.startswith(_LOCAL_DIALECTS) or node.name == SHARDING_CONSTRAINT
            local = of_values and node.name not in CALLS
        if local and len(node.results) == 1:
            return self._local(node)
        return self._on_devices(operands, together=not local)

    def need_from_receiver(self, need: Need, source: int, target: int) -> Need:
        """Returns the need of `target`, which becomes `source` in the next iteration or outside."""
        if self._tracked.alike(source, target):
            return need
        return self.need_from_result(need, target, None)

    def need_from_result(self, need: Need, target: int, dim_map: DimMap | None) -> Need:
        """Returns the need of operand `target`, given that of the result."""
        if dim_map is None:
            places = self.places(target)
            spread = need if need.shape[1] == 1 else need.any(axis=1, keepdims=True)
            return spread if places == 1 else np.broadcast_to(spread, (self._devices, places))
        if dim_map.is_whole:
            return need
        operand_need = np.zeros((self._devices, self.places(target)), np.bool_)
        operand_need[:, dim_map.operands] = need[:, dim_map.results]
        return operand_need

    def _is_known(self, value: int) -> bool:
        return self._knowledge.now[value] is not None

    def _crossing(self, node: Node) -> Rule:
        """Returns the rule of an edge: all places, unless two computations share the shard."""
        outer = self._program.around.get(node)
        above = self._program.levels.groups(outer) if node.name == ENTER else None
        types = self._program.types

        def rule(needs: Sequence[Need | None]) -> Needs:
            operand_needs: Needs = []
            for operand, result, need in zip(node.operands, node.results, needs, strict=True):
                if need is None:
                    continue
                kept = self._program.crossings.get(result) == operand
                if node.name == LEAVE and types[operand] == types[result]:  # still the shard's
                    kept = kept or self._tracked.alike(operand, result)
                if kept:
                    operand_needs.append((operand, need))
                    continue
                spread = self.need_from_result(need, operand, None)
                operand_needs.append((operand, share_in_groups(spread, above)))
            return operand_needs

        return rule

    def _on_devices(self, operands: Sequence[int], *, together: bool) -> Rule:
        """Returns a rule that needs all operands if any result is needed.

        They are needed on the same device, or on all devices if `together`.
        """

        def rule(needs: Sequence[Need | None]) -> Needs:
            rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
            if not rows:
                return []
            needed = np.logical_or.reduce(rows)
            if together:
                needed = np.broadcast_to(needed.any(), needed.shape)
            return [
                (operand, np.broadcast_to(needed, (self._devices, self.places(operand))))
                for operand in operands
                if not self._is_known(operand)
            ]

        return rule

    def _local(self, node: Node) -> Rule:
        parts = [(v, self._tracked.dim_map(node, i)) for i, v in enumerate(node.operands)]
        parts += [(value, None) for value in node.captures]

        def rule(needs: Sequence[Need | None]) -> Needs:
            need = needs[0]
            if need is None:
                return []
            return [
                (operand, self.need_from_result(need, operand, dim_map))
                for operand, dim_map in parts
                if not self._is_known(operand)
            ]

        return rule

    def _exchange(self, node: Node, moved: Callable[[Need], Need]) -> Rule:
        def rule(needs: Sequence[Need | None]) -> Needs:
            operand_needs: Needs = []
            for position, need in enumerate(needs):
                if need is None:
                    continue
                dim_map = self._tracked.dim_map(node, position) if len(needs) == 1 else None
                operand = node.operands[position]
                taken = self.need_from_result(moved(need), operand, dim_map)
                operand_needs.append((operand, taken))
            return operand_needs

        return rule

    def _select(self, node: Node) -> Rule:
        """Returns a rule that needs only the chosen side, if the predicate is known."""
        predicate, one, other = node.operands
        whole = self._local(node)
        sides = [(one, self._tracked.dim_map(node, 1)), (other, self._tracked.dim_map(node, 2))]
        dimension = self._tracked.dimensions[node.results[0]]

        def rule(needs: Sequence[Need | None]) -> Needs:
            need = needs[0]
            if need is None:
                return []
            known = self._knowledge.of_devices(predicate)
            if known is None:
                return whole(needs)
            operand_needs: Needs = []
            for wanted, (operand, dim_map) in zip((True, False), sides, strict=True):
                side = places_with_value(known, wanted, dimension) & need
                operand_needs.append((operand, self.need_from_result(side, operand, dim_map)))
            return operand_needs

        return rule

    def _access(self, node: Node, at: ElementAccess) -> Rule:
        """Returns the rule of a read or write: it needs only the accessed place, if known."""
        whole = self._local(node)
        extent = self.places(node.operands[0])
        reads = node.name in ("stablehlo.dynamic_slice", "stablehlo.gather")
        update = 2 if node.name == "stablehlo.scatter" else 1
        others = [node.operands[i] for i in at.indices]

        def rule(needs: Sequence[Need | None]) -> Needs:
            need = needs[0]
            if need is None:
                return []
            index = self._knowledge.of_devices(node.operands[at.index])
            if index is None:
                return whole(needs)
            touched = window(at, index, extent)
            rest: Needs = [
                (v, np.broadcast_to(need.any(axis=1, keepdims=True), (self._devices, 1)))
                for v in others
                if not self._is_known(v)
            ]
            if reads:
                return [(node.operands[0], touched & need.any(axis=1, keepdims=True)), *rest]
            written = need & touched
            kept = need & ~touched if at.overwrites else need
            value = node.operands[update]
            spread = self.need_from_result(written, value, None)
            return [(node.operands[0], kept), (value, spread), *rest]

        return rule


@dataclass(eq=False)
class Record:
    """The findings about one permute.

    `needed` says by iteration and pair of devices if the target needs what it receives. `executed`
    says by iteration if the permute runs.
    """

    node: Node
    loop: Node
    targets: list[int]
    needed: NDArray[np.bool_] | None = None
    executed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    reason: str = ""


class Walk:
    """Fills in the records of permutes, by their nodes.

    `countings` has the carried integers of a loop that are the same on all devices: by position,
    one for each iteration.
    """

    def __init__(
        self,
        program: DemandProgram,
        rules: StepRules,
        knowledge: Knowledge,
        budget: StepBudget,
        records: dict[Node, Record],
    ) -> None:
        self._program = program
        self.countings: dict[Node, dict[int, list[int]]] = {}
        self._rules = rules
        self._knowledge = knowledge
        self._budget = budget
        self._records = records
        self._need: list[Need | None] = [None] * len(program.types)
        self._made: dict[Node, tuple[Rule, Groups | None]] = {}
        self._effects = {
            node
            for node in program.nodes
            if node.name not in CONTROL_FLOW and rules.has_effect(node)
        }
        most_places = max(program.tracked.counts, default=1)
        self._weight = 1 + program.devices * most_places // _FREE_SIZE
        self._active = np.ones(program.devices, np.bool_)
        self._iterations: list[int] = []

    def run(self) -> None:
        """Walks the program. Raises DemandTooLargeError if the budget does not suffice."""
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
        if record is not None and record.needed is not None and not record.reason:
            iteration, need = self._iterations[-1], needs[0]
            record.executed[iteration] |= self._active.any()
            if need is not None:
                record.needed[iteration] |= need[record.targets].any(axis=1)
        if node not in self._effects and all(need is None for need in needs):
            return
        if node not in self._made:
            groups = None if node.name == ENTER else self._program.groups(node)
            self._made[node] = self._rules.make_rule(node), groups
        rule, groups = self._made[node]
        for operand, need in rule(needs):
            self._add(operand, share_in_groups(need, groups))

    def _add(self, value: int, need: Need) -> None:
        before = self._need[value]
        self._need[value] = need if before is None else before | need

    def _take(self, value: int) -> Need | None:
        """Returns the need of a value and clears it; places with zeros need nothing."""
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
                    self._add(end, self._rules.need_from_receiver(need, source, end))
            self._knowledge.enter(body, history[iteration])
            self._iterations.append(iteration)
            self._backward(body)
            self._iterations.pop()
            carried = [self._take(argument) for argument in body.arguments]
            sources = body.arguments
        groups = self._program.groups(loop)
        for need, source, operand in zip(carried, sources, loop.operands, strict=True):
            if need is not None:
                taken = self._rules.need_from_receiver(need, source, operand)
                self._add(operand, share_in_groups(taken, groups))

    def _whole(self, loop: Node, needs: Sequence[Need | None]) -> None:
        """Adds the needs of a loop that is not walked: all inputs, if any result is needed.

        Also if none is, when the trip count is unknown: the loop must end even then.
        """
        talks = self._communicates(loop)
        inside = [node for body in loop.bodies for node in body.all_nodes()]
        reason = ENDLESS if loop in self._knowledge.endless else UNKNOWN
        for node in inside:
            if node in self._records:
                self._records[node].reason = reason
        now = (self._knowledge.of_devices(operand) for operand in loop.operands)
        initial = [
            tuple(int(n) for n in known) if known is not None and known.ndim == 1 else None
            for known in now
        ]
        runs = not self._effects.isdisjoint(inside) or trip_count(loop.op, initial) is None
        rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
        if not rows and not runs:
            return
        everywhere = np.ones((self._program.devices, 1), np.bool_)
        needed = everywhere if runs else np.logical_or.reduce(rows)
        if talks and needed.any():
            needed = everywhere
        groups = self._program.groups(loop)
        made = set[int]().union(*map(numbers_in, loop.bodies))
        for value in sorted(inputs_of(loop) - made):
            spread = np.broadcast_to(needed, (len(needed), self._rules.places(value)))
            self._add(value, share_in_groups(spread, groups))

    def _branches(self, node: Node, needs: Sequence[Need | None]) -> None:
        chosen = self._knowledge.regions_run(node)
        if chosen is None:  # the predicate is needed
            rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
            inside = (inner for body in node.bodies for inner in body.all_nodes())
            if self._communicates(node) or not self._effects.isdisjoint(inside):
                self._add(node.operands[0], self._rules.full(node.operands[0]))
            elif rows:
                needed = np.logical_or.reduce(rows)
                self._add(node.operands[0], share_in_groups(needed, self._program.groups(node)))
        around = self._active
        for number, region in enumerate(node.bodies):
            mask = np.ones_like(around) if chosen is None else chosen == number
            if not mask.any():
                continue
            self._active = around & mask
            for need, result, end in zip(needs, node.results, region.returned, strict=True):
                if need is not None:
                    taken = self._rules.need_from_receiver(need & mask[:, None], result, end)
                    self._add(end, share_in_groups(taken, self._program.groups(node)))
            self._backward(region)
        self._active = around

    def _communicates(self, node: Node) -> bool:
        return any(
            self._program.communication(inner) is not None
            for body in node.bodies
            for inner in body.all_nodes()
        )

    def _size(self, loop: Node, trips: int) -> None:
        """Allocates the records of a loop's permutes."""
        for record in self._records.values():
            if record.loop is not loop:
                continue
            if record.needed is None:
                record.needed = np.zeros((trips, len(record.targets)), np.bool_)
                record.executed = np.zeros(trips, np.bool_)
            elif len(record.needed) != trips:
                record.reason = CHANGING

    def _count(self, loop: Node, history: Sequence[Carries]) -> None:
        """Notes the carried integers that are the same on all devices in every run of the loop."""
        counting: dict[int, list[int]] = {}
        for position in range(len(loop.operands)):
            series = [carries[position][0] for carries in history]
            known = [values for values in series if values is not None and values.ndim == 1]
            if known and len(known) == len(series) and all((v == v[0]).all() for v in known):
                counting[position] = [int(values[0]) for values in known]
        before = self.countings.get(loop, counting)
        self.countings[loop] = {p: s for p, s in counting.items() if before.get(p) == s}
