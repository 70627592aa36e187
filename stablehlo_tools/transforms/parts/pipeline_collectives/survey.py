"""A loop and what could be done with each of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_indices import LoopIndices
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import Counted, counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import Move, ahead, late

WHILE = "stablehlo.while"


@dataclass(frozen=True)
class LoopSurvey:
    """A loop as it stands; not valid any more once the module changes.

    `fewest` is how often it runs at least, on any device; `reason` why that is not known.
    """

    body: LoopBody
    indices: LoopIndices
    trips: int | None
    fewest: int
    reason: str

    @property
    def collectives(self) -> list[Collective]:
        """Those of the body itself, in order."""
        return self.body.collectives

    @cached_property
    def ahead(self) -> list[Move]:
        """Which of them could go ahead of their iteration."""
        return [self._checked(ahead(self.body, found)) for found in self.collectives]

    @cached_property
    def late(self) -> list[Move]:
        """Which of them could end in a later iteration."""
        return [self._checked(late(self.body, found, self.indices)) for found in self.collectives]

    def _checked(self, move: Move) -> Move:
        if not self.reason or not move.ops:
            return move
        return Move(move.collective, reason=self.reason)


def survey_loop(loop: ir.Operation, module: ir.Module, facts: ModuleFacts) -> LoopSurvey:
    """Reads a loop of a module without calls."""
    values = DeviceValues(module, facts)

    def known(value: ir.Value) -> Sequence[int] | None:
        numbers = values.scalar(value)
        return None if numbers is None else [int(number) for number in numbers]

    body = LoopBody(loop, Effects(functions_by_name(module)))
    found = _communicates_in_condition(body) or counted(loop, known)
    trips = _trips(found)
    return LoopSurvey(
        body,
        LoopIndices(body, trips or 0, known),
        trips,
        min(found.trips) if isinstance(found, Counted) else 0,
        found if isinstance(found, str) else "",
    )


def loops_of(module: ir.Module) -> list[ir.Operation]:
    """All loops, inner ones before those around them."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == WHILE:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found[::-1]


def _trips(found: Counted | str) -> int | None:
    """How often a loop runs on all devices, if they agree."""
    if isinstance(found, str) or len(set(found.trips)) != 1:
        return None
    return found.trips[0]


def _communicates_in_condition(body: LoopBody) -> str:
    condition = body.loop.regions[0].blocks[0]
    for view in condition.operations:
        if body.communicates(view.operation) or body.effects.has_effect(view.operation):
            return f"its condition has a {view.operation.name.removeprefix('stablehlo.')}"
    return ""
