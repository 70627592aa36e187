"""Values that are the same on all devices of a collective's groups, whatever they are.

The devices of a group run a loop together: what follows from constants, counters and what each
device knows of itself before the run is alike for those of a group where that is.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.device_values import COMPUTED, DeviceValues
from stablehlo_tools.analysis.loops import constant_step, counter_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import While


class AlikeInGroups:
    """Whether values of loops are the same on all devices of each group of some collectives."""

    def __init__(self, values: DeviceValues) -> None:
        self._values = values

    def __call__(
        self, loop: ir.Operation, ops: Sequence[ir.Operation], values: Sequence[ir.Value]
    ) -> bool:
        """Whether values in a loop are so in each iteration, for the collectives among its ops; and
        the devices run it equally often, so that an iteration is the same one for all of them."""
        counter = counter_of(loop)
        if isinstance(counter, str):
            return False
        classify = classify_communication(loop.context)
        found = [self._values.facts.groups(c) for op in ops if (c := classify(op)) is not None]
        groups = [list(group) for each in found if each is not None for group in each]
        steering = [counter.bound, loop.operands[counter.position]]
        return None not in found and self._are_alike([*steering, *values], groups)

    def picks_one(self, collective: Collective, value: ir.Value, *, by: bool) -> bool:
        """Returns True if all of a boolean is `by` on one device of each group of a collective, and
        nothing of it is on the others."""
        groups, known = self._values.facts.groups(collective), self._values.of(value)
        if groups is None or known is None or len(known) == 1:
            return False
        rows = known.reshape(len(known), -1) == by
        uniform = (rows.all(axis=1) == rows.any(axis=1)).all()
        return bool(uniform) and all(rows[list(group), 0].sum() == 1 for group in groups)

    def _are_alike(self, pending: list[ir.Value], groups: Sequence[list[int]]) -> bool:
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            known = self._values.of(value)
            if known is not None:
                rows = known.reshape(len(known), -1)
                if len(rows) > 1 and any((rows[g] != rows[g[0]]).any() for g in groups):
                    return False
                continue
            # What makes a value the same wherever that is the same.
            maker = producer(value)
            if maker is not None:
                if maker.name not in COMPUTED:
                    return False
                pending += maker.operands
                continue
            owner = ir.BlockArgument(value).owner.owner.operation
            number = ir.BlockArgument(value).arg_number
            if owner.name != WHILE:
                return False
            argument, end = While(owner).carries[number], While(owner).yields[number]
            if end != argument and constant_step(end, argument) is None:
                return False
            pending.append(owner.operands[number])
        return True
