"""Values that are the same on all devices of a collective's groups, whatever they are.

The devices of a group run a loop together: what follows from constants, counters and what each
device knows of itself before the run is alike for those of a group where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import COMPUTED, DeviceValues
from stablehlo_tools.analysis.loops import constant_step, counter_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.ir.while_loop import is_invariant

# Whether a value is the same on all devices of each group of some collectives.
Alike = Callable[[ir.Value, Sequence[Collective]], bool]


def steering(loop: ir.Operation) -> list[ir.Value] | None:
    """What says how often a loop runs; None where that is not understood."""
    counter = counter_of(loop)
    return None if isinstance(counter, str) else [counter.bound, loop.operands[counter.position]]


class AlikeInGroups:
    """Whether values of loops are the same on all devices of a collective's groups, in each
    iteration that these run together."""

    def __init__(self, values: DeviceValues) -> None:
        self._facts: ModuleFacts = values.facts
        self._values = values

    def __call__(self, value: ir.Value, collectives: Sequence[Collective]) -> bool:
        """Whether a value is the same on all devices of each group."""
        found = [self._facts.groups(collective) for collective in collectives]
        groups = [list(group) for each in found if each is not None for group in each]
        seen: set[ir.Value] = set()
        pending = [value] if None not in found else []
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
            leads = _leads(value)
            if leads is None:
                return False
            pending += leads
        return None not in found


def _leads(value: ir.Value) -> Iterable[ir.Value] | None:
    """What makes a value the same wherever that is the same; None where it is not known."""
    maker = producer(value)
    if maker is not None:
        return maker.operands if maker.name in COMPUTED else None
    owner = ir.BlockArgument(value).owner.owner.operation
    number = ir.BlockArgument(value).arg_number
    if owner.name != WHILE:
        return None
    block = owner.regions[1].blocks[0]
    counts = constant_step(terminator(block).operands[number], block.arguments[number]) is not None
    return [owner.operands[number]] if counts or is_invariant(owner, number) else None
