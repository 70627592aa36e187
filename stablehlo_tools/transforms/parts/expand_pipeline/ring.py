"""What the ranks hand on in one direction, from tick to tick, round the ring.

Every rank sends and receives in every tick, whatever loop's layers it ran. So values of the same
type of loops that take turns share a *wire*: one permute, and one buffer of receive slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.slots import put_row, row_of

Load = Mapping[int, ir.RankedTensorType]  # by number, what a loop hands on of one microbatch


class Sent(NamedTuple):
    """Values of a load, by number, and where they are what is sent."""

    when: ir.Value
    load: int
    values: Mapping[int, ir.Value]


class Ring:
    """The wires of a direction; `step` is 1 to the next rank, -1 to the one before."""

    def __init__(self, region: Region, slots: int, step: int, loads: Sequence[Load]) -> None:
        self._region = region
        self._slots = slots
        self._step = step
        self._types: list[ir.RankedTensorType] = []
        self._wires = [self._wired(load) for load in loads]

    def initial(self) -> list[ir.Value]:
        """The receive slots of each wire before the first tick."""
        build = self._region.end
        rows = [] if self._slots == 1 else [self._slots]
        return [build.splat(0, [*rows, *type_.shape], type_.element_type) for type_ in self._types]

    def taken(
        self, build: Builder, received: Sequence[ir.Value], load: int, number: int, slot: ir.Value
    ) -> ir.Value:
        """A value of a load, as it was received into a slot."""
        come = received[self._wires[load][number]]
        return come if self._slots == 1 else row_of(build, come, [slot])

    def hand_on(
        self, build: Builder, received: Sequence[ir.Value], sent: Sequence[Sent], slot: ir.Value
    ) -> list[ir.Value]:
        """Sends what the loads give, later ones before others, and puts what comes into a slot.

        All loops of a tick run first: what comes may take the place of what they read. What no
        rank needs goes to a slot that holds nothing alive.
        """
        after: list[ir.Value] = []
        for wire, before in enumerate(received):
            come = self._region.permute(build, self._chosen(build, wire, sent), self._step)
            after.append(come if self._slots == 1 else put_row(build, before, come, [slot]))
        return after

    def _chosen(self, build: Builder, wire: int, sent: Sequence[Sent]) -> ir.Value:
        chosen: ir.Value | None = None
        for each in sent:
            for number, value in each.values.items():
                if self._wires[each.load][number] == wire:
                    chosen = build.same("select", each.when, value, chosen) if chosen else value
        assert chosen is not None, "every wire is of some load"
        return chosen

    def _wired(self, load: Load) -> dict[int, int]:
        free = list(range(len(self._types)))
        wires: dict[int, int] = {}
        for number, type_ in load.items():
            wire = next((each for each in free if self._types[each] == type_), None)
            if wire is None:
                wire = len(self._types)
                self._types.append(type_)
            else:
                free.remove(wire)
            wires[number] = wire
        return wires
