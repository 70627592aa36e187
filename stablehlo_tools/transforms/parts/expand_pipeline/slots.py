"""The slots in which a rank keeps values of microbatches, and the ring that sends them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.transforms.parts.expand_pipeline.region import RankRegion

SlotOf = Callable[[Builder], ir.Value]


def put_row(build: Builder, rows: ir.Value, value: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """Returns rows with one of them overwritten."""
    row = build.reshape(value, [1, *shape_of(value)])
    return build.update(rows, row, _starts(build, rows, head))


def row_of(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """Returns one of the rows."""
    shape = shape_of(rows)[1:]
    taken = build.dynamic_slice(rows, _starts(build, rows, head), [1, *shape])
    return build.reshape(taken, shape)


def _starts(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> list[ir.Value]:
    return [*head, *[build.i32(0)] * (len(shape_of(rows)) - len(head))]


class Slots:
    """Slots for some values of `count` microbatches, by number: one tensor [count, ...] for each
    value."""

    def __init__(self, types: Mapping[int, ir.RankedTensorType], count: int) -> None:
        self._types = types
        self._places = {number: place for place, number in enumerate(types)}
        self._count = count

    def initial(self, build: Builder) -> list[ir.Value]:
        """Returns the tensors carried before the first tick."""
        return [
            build.splat(0, [self._count, *type_.shape], type_.element_type)
            for type_ in self._types.values()
        ]

    def put(
        self,
        build: Builder,
        held: Sequence[ir.Value],
        slot: SlotOf,
        when: ir.Value,
        values: Mapping[int, ir.Value],
    ) -> list[ir.Value]:
        """Returns the slots with `values` written to one of them, if `when` is set."""
        kept: list[ir.Value] = []
        for number, rows in zip(self._types, held, strict=True):
            at = slot(build)
            # An update has no predicate: write the old value back if `when` is not set.
            old = row_of(build, rows, [at])
            kept.append(put_row(build, rows, build.same("select", when, values[number], old), [at]))
        return kept

    def read_slot(
        self, build: Builder, held: Sequence[ir.Value], slot: SlotOf, number: int
    ) -> ir.Value:
        """Returns a value in a slot."""
        return row_of(build, held[self._places[number]], [slot(build)])

    def in_turn(self, microbatch: ir.Value) -> SlotOf:
        """Returns the slot of a microbatch, if microbatches enter and leave in the same order."""

        def slot(build: Builder) -> ir.Value:
            if self._count == 1:
                return build.i32(0)
            return build.same("remainder", microbatch, build.i32(self._count))

        return slot


Load = Mapping[int, ir.RankedTensorType]  # values sent for one microbatch, by number


class Sent(NamedTuple):
    """Values of a load, by number; they are sent if `when` is set."""

    when: ir.Value
    load: int
    values: Mapping[int, ir.Value]


class Ring:
    """The wires of a direction; `step` is 1 to the next rank, -1 to the one before."""

    def __init__(self, region: RankRegion, slots: int, step: int, loads: Sequence[Load]) -> None:
        self._region = region
        self._slots = slots
        self._step = step
        self._types: list[ir.RankedTensorType] = []
        self._wires = [self._assign_wires(load) for load in loads]

    def initial(self) -> list[ir.Value]:
        """Returns the receive slots of each wire before the first tick."""
        build = self._region.end
        rows = [] if self._slots == 1 else [self._slots]
        return [build.splat(0, [*rows, *type_.shape], type_.element_type) for type_ in self._types]

    def read_received(
        self, build: Builder, received: Sequence[ir.Value], load: int, number: int, slot: ir.Value
    ) -> ir.Value:
        """Returns a value of a load from the slot that it was received into."""
        come = received[self._wires[load][number]]
        return come if self._slots == 1 else row_of(build, come, [slot])

    def hand_on(
        self, build: Builder, received: Sequence[ir.Value], sent: Sequence[Sent], slot: ir.Value
    ) -> list[ir.Value]:
        """Sends the values of the loads, where later ones take precedence; stores those received in
        a slot.

        All loops of a tick run first, since a received value may overwrite a slot that they read.
        Values that no rank needs go to a slot that is not in use.
        """
        after: list[ir.Value] = []
        for wire, before in enumerate(received):
            chosen: ir.Value | None = None
            for each in sent:
                for number, value in each.values.items():
                    if self._wires[each.load][number] == wire:
                        chosen = build.same("select", each.when, value, chosen) if chosen else value
            assert chosen is not None, "every wire belongs to a load"
            come = self._region.permute(build, chosen, self._step)
            after.append(come if self._slots == 1 else put_row(build, before, come, [slot]))
        return after

    def _assign_wires(self, load: Load) -> dict[int, int]:
        free = list(range(len(self._types)))
        wires: dict[int, int] = {}
        for number, type_ in load.items():
            # Values of one type share a wire, and so a permute, if they are of different loads.
            wire = next((each for each in free if self._types[each] == type_), None)
            if wire is None:
                wire = len(self._types)
                self._types.append(type_)
            else:
                free.remove(wire)
            wires[number] = wire
        return wires
