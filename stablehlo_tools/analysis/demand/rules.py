"""What an op needs of its operands for what is needed of its results, on each device.

A rule is made once for each node and used in every iteration. Where an op is not understood, all
operands are needed on every device that needs any of its results, and on all devices if the op may
communicate. Numbers that are known before the run need nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    classify_communication,
)
from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.demand.knowledge import Knowledge
from stablehlo_tools.analysis.demand.program import (
    EDGES,
    ENTER,
    LEAVE,
    Levels,
    Need,
    Program,
    shared,
)
from stablehlo_tools.analysis.demand.tracked_dims import Access, DimMap, TrackedDims
from stablehlo_tools.analysis.demand.zeros import taken, window
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_annotation
from stablehlo_tools.dialect.names import BARRIER, SELECT
from stablehlo_tools.dialect.traits import CALLS, Trait, ops_with, short_names
from stablehlo_tools.ir.symbols import functions_by_name

_GROUPED = short_names(ops_with(Trait.GROUPED))


def exchange_rule(collective: Collective, facts: ModuleFacts) -> Callable[[Need], Need] | None:
    """What the devices need of the operands; None for what is not understood.

    A permute needs just the sources of the targets that need something; of the other collectives,
    a group with one member that needs something needs all.
    """
    if collective.is_async:
        return None
    groups = facts.groups(collective)
    if groups is None:
        return None
    if collective.kind == "collective_permute":
        return _permuted([source for source, _ in groups], [target for _, target in groups])
    if collective.kind not in _GROUPED:
        return None
    members = [list(group) for group in groups]

    def rule(need: Need) -> Need:
        operand_need = np.zeros_like(need)
        for group in members:
            operand_need[group] = need[group].any(axis=0)
        return operand_need

    return rule


def _permuted(sources: list[int], targets: list[int]) -> Callable[[Need], Need]:
    def rule(need: Need) -> Need:
        operand_need = np.zeros_like(need)
        np.logical_or.at(operand_need, sources, need[targets])
        return operand_need

    return rule


Needs = list[tuple[int, Need]]
Rule = Callable[[Sequence[Need | None]], Needs]
_LOCAL_DIALECTS = ("stablehlo.", "chlo.")


class Rules:
    """Makes the rules of a program's steps."""

    def __init__(
        self,
        program: Program,
        module: ir.Module,
        facts: ModuleFacts,
        knowledge: Knowledge,
        levels: Levels,
        tracked: TrackedDims,
    ) -> None:
        self._program = program
        self._facts = facts
        self._knowledge = knowledge
        self._levels = levels
        self._tracked = tracked
        self._classify = classify_communication(module.context)
        self._effects = Effects(functions_by_name(module))
        self.devices = facts.grid.size
        self.most_places = max(tracked.counts, default=1)

    def places(self, value: int) -> int:
        """How many columns a value's needs have."""
        return self._tracked.counts[value]

    def full(self, value: int) -> Need:
        """A need of all of a value on all devices."""
        return np.broadcast_to(np.True_, (self.devices, self.places(value)))

    def has_effect(self, node: Node) -> bool:
        """Whether an op runs whatever becomes of its results."""
        return node.name not in EDGES and self._effects.has_effect(node.op)

    def communication(self, node: Node) -> Collective | None:
        """The collective that a node is."""
        return None if node.name in EDGES else self._classify(node.op)

    def of(self, node: Node) -> Rule:
        """The rule of a node that is no control flow."""
        operands = node.inputs
        if self.has_effect(node):
            always = [(operand, self.full(operand)) for operand in operands]
            return lambda _: always
        if node.name == BARRIER:
            return self._barrier(node)
        if node.name in EDGES:
            return self._crossing(node)
        if self._program.computation(node) is None and self._program.is_global:
            return self._on_devices(node, operands, together=True)
        collective = self.communication(node)
        if collective is not None:
            exchanged = exchange_rule(collective, self._facts)
            if exchanged is None or len(node.operands) != len(node.results):
                return self._on_devices(node, operands, together=True)
            return self._exchange(node, exchanged)
        access = self._tracked.access(node)
        if access is not None:
            return self._access(node, access)
        if node.name == SELECT:
            return self._select(node)
        local = _is_local(node)
        if local and len(node.results) == 1:
            return self._local(node)
        return self._on_devices(node, operands, together=not local)

    def handed(self, need: Need, source: int, target: int) -> Need:
        """The need of a value that another one is in the next iteration, or outside of a region."""
        if self._tracked.alike(source, target):
            return need
        return self.carried(need, target, None)

    def carried(self, need: Need, target: int, dim_map: DimMap | None) -> Need:
        """The need of operand `target` for that of the result."""
        if dim_map is None:
            places = self.places(target)
            spread = need if need.shape[1] == 1 else need.any(axis=1, keepdims=True)
            return spread if places == 1 else np.broadcast_to(spread, (self.devices, places))
        if dim_map.is_whole:
            return need
        operand_need = np.zeros((self.devices, self.places(target)), np.bool_)
        operand_need[:, dim_map.operands] = need[:, dim_map.results]
        return operand_need

    def _is_known(self, value: int) -> bool:
        return self._knowledge.now[value] is not None

    def _barrier(self, node: Node) -> Rule:
        operands = node.operands
        return lambda needs: [
            (operand, need)
            for operand, need in zip(operands, needs, strict=True)
            if need is not None
        ]

    def _crossing(self, node: Node) -> Rule:
        """Shards and global values: all places, unless two computations pass on what they hold."""
        outer = self._program.around.get(node)
        above = self._levels.groups(outer) if node.name == ENTER else None

        def rule(needs: Sequence[Need | None]) -> Needs:
            operand_needs: Needs = []
            for operand, result, need in zip(node.operands, node.results, needs, strict=True):
                if need is None:
                    continue
                kept = self._program.crossings.get(result) == operand
                kept = kept or (node.name == LEAVE and self._is_shard(node, operand, result))
                if kept:
                    operand_needs.append((operand, need))
                    continue
                spread = self.carried(need, operand, None)
                operand_needs.append((operand, shared(spread, above)))
            return operand_needs

        return rule

    def _is_shard(self, node: Node, inside: int, outside: int) -> bool:
        """Whether the places of what leaves are still those of the shard."""
        same_type = self._program.types[inside] == self._program.types[outside]
        return same_type and self._tracked.alike(inside, outside)

    def _on_devices(self, node: Node, operands: Sequence[int], *, together: bool) -> Rule:
        """All operands, where any result is needed: on that device, or on all `together`."""

        def rule(needs: Sequence[Need | None]) -> Needs:
            rows = [need.any(axis=1, keepdims=True) for need in needs if need is not None]
            if not rows:
                return []
            needed = np.logical_or.reduce(rows)
            if together:
                needed = np.broadcast_to(needed.any(), needed.shape)
            return [
                (operand, np.broadcast_to(needed, (self.devices, self.places(operand))))
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
                (operand, self.carried(need, operand, dim_map))
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
                operand_needs.append((operand, self.carried(moved(need), operand, dim_map)))
            return operand_needs

        return rule

    def _select(self, node: Node) -> Rule:
        """Only the side that is taken, where the predicate is known."""
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
                side = taken(known, wanted, dimension) & need
                operand_needs.append((operand, self.carried(side, operand, dim_map)))
            return operand_needs

        return rule

    def _access(self, node: Node, at: Access) -> Rule:
        """A read or a write at a place: just that place, where it is known."""
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
                (v, np.broadcast_to(need.any(axis=1, keepdims=True), (self.devices, 1)))
                for v in others
                if not self._is_known(v)
            ]
            if reads:
                return [(node.operands[0], touched & need.any(axis=1, keepdims=True)), *rest]
            written = need & touched
            kept = need & ~touched if at.overwrites else need
            value = node.operands[update]
            spread = self.carried(written, value, None)
            return [(node.operands[0], kept), (value, spread), *rest]

        return rule


def _is_local(node: Node) -> bool:
    """Whether an op computes on each device by itself, and does nothing else."""
    if node.name == "stablehlo.custom_call":
        return is_annotation(node.op)
    if node.name in CALLS:
        return False
    return node.name.startswith(_LOCAL_DIALECTS) or node.name == "sdy.sharding_constraint"
