"""Finds, iteration by iteration, which values are zeros; see `zeros` for the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, classify_communication
from stablehlo_tools.analysis.demand import zeros
from stablehlo_tools.analysis.demand.dimensions import Lane
from stablehlo_tools.analysis.demand.levels import Need
from stablehlo_tools.analysis.demand.program import Program, Step
from stablehlo_tools.analysis.demand.slots import Slots
from stablehlo_tools.analysis.demand.splats import Values
from stablehlo_tools.bindings import ir

Rule = Callable[[], Need | None]


class ZeroTracking:
    """`now[n]` says where value n is zeros; None where that is known nowhere.

    `known` gives the known integers of a value, with a row for each device.
    """

    def __init__(
        self,
        program: Program,
        module: ir.Module,
        facts: ModuleFacts,
        slots: Slots,
        known: Callable[[int], Values | None],
    ) -> None:
        self.now: list[Need | None] = [None] * len(program.types)
        self._slots = slots
        self._known = known
        self._facts = facts
        self._devices = facts.grid.size
        self._outside = program.is_global
        self._classify = classify_communication(module.context)
        self._rules: dict[int, Rule] = {}

    def start(self, step: Step) -> bool:
        """Notes a constant of zeros; whether it is one."""
        if not zeros.is_zero(step.op):
            return False
        shape = (self._devices, self._slots.counts[step.results[0]])
        self.now[step.results[0]] = np.broadcast_to(np.True_, shape)
        return True

    def is_tracked(self, step: Step, can: Sequence[bool]) -> bool:
        """Whether a result may be zeros, given the operands that may."""
        if step.computation is None and self._outside:
            return False
        return zeros.can_be_zero(step, can)

    def evaluate(self, step: Step) -> None:
        """Brings the result of an op up to date."""
        if step.number not in self._rules:
            self._rules[step.number] = self._rule(step)
        found = self._rules[step.number]()
        self.now[step.results[0]] = found if found is not None and found.any() else None

    def merge(self, step: Step, chosen: Values | None) -> None:
        """Brings the results of an `if` or `case` up to date."""
        for position, result in enumerate(step.results):
            ends = [region.ends[position] for region in step.regions]
            parts = [self.handed(end, result) for end in ends]
            if chosen is None:
                found = np.logical_and.reduce(parts)
            else:
                found = np.stack(parts)[chosen, np.arange(self._devices)]
            self.now[result] = found if found.any() else None

    def handed(self, value: int, to: int) -> Need:
        """Where a value is zeros, by the places of one that takes it over."""
        zero = self._of(value)
        if self._slots.alike(value, to):
            return zero
        return zeros.moved(zero, self._slots.counts[to], None)

    def _of(self, value: int) -> Need:
        found = self.now[value]
        if found is None:
            return np.zeros((self._devices, self._slots.counts[value]), np.bool_)
        return found

    def _moved(self, value: int, result: int, lane: Lane | None) -> Need:
        return zeros.moved(self._of(value), self._slots.counts[result], lane)

    def _rule(self, step: Step) -> Rule:
        result = step.results[0]
        name = step.name
        if name == zeros.PERMUTE:
            return self._permute(step, self._classify(step.op))
        parts = [(v, self._slots.lane(step, i)) for i, v in enumerate(step.operands)]
        if name == zeros.SELECT:
            (_, _), one, other = parts
            dimension = self._slots.dimensions[result]
            return lambda: zeros.selected(
                self._known(step.operands[0]),
                self._moved(one[0], result, one[1]),
                self._moved(other[0], result, other[1]),
                dimension,
            )
        if name in (zeros.SLICE, zeros.UPDATE):
            return self._access(step)
        if name == zeros.PAD:
            parts[1] = (step.operands[1], None)
            lane = parts[0][1]
            if lane is not None and not lane.is_whole:
                return lambda: self._padded(step, lane)
        taken = parts[:1] if name in zeros.KEEPING else parts
        return lambda: np.logical_and.reduce([self._moved(v, result, lane) for v, lane in taken])

    def _padded(self, step: Step, lane: Lane) -> Need:
        result = step.results[0]
        beside = self._moved(step.operands[1], result, None)
        inside = np.zeros_like(beside)
        inside[:, lane.results] = True
        return np.where(inside, self._moved(step.operands[0], result, lane), beside)

    def _permute(self, step: Step, collective: Collective | None) -> Rule:
        groups = self._facts.groups(collective) if collective is not None else None
        if groups is None:
            return lambda: None
        moved = zeros.permuted([(source, target) for source, target in groups])
        operand, result = step.operands[0], step.results[0]
        lane = self._slots.lane(step, 0)
        return lambda: moved(self._moved(operand, result, lane))

    def _access(self, step: Step) -> Rule:
        buffer, result = step.operands[0], step.results[0]
        reads = step.name == zeros.SLICE
        access = self._slots.access(step)
        extent = self._slots.counts[buffer]
        whole = self._slots.lane(step, 0)

        def rule() -> Need:
            index = self._known(step.operands[access.index]) if access is not None else None
            if access is None or index is None:
                kept = self._moved(buffer, result, whole)
                return kept if reads else kept & self._moved(step.operands[1], result, None)
            at = zeros.window(access, index, extent)
            if reads:
                inside = (self._of(buffer) | ~at).all(axis=1, keepdims=True)
                return np.broadcast_to(inside, (self._devices, self._slots.counts[result]))
            written = self._of(step.operands[1]).all(axis=1, keepdims=True)
            before = self._of(buffer)
            return np.where(at, written if access.overwrites else written & before, before)

        return rule
