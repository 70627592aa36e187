"""Values of microbatches, put away in slots until they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of

SlotOf = Callable[[Builder], ir.Value]


def put_row(build: Builder, rows: ir.Value, value: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """Rows with one of them written."""
    row = build.reshape(value, [1, *shape_of(value)])
    return build.update(rows, row, _starts(build, rows, head))


def row_of(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """One of the rows."""
    shape = shape_of(rows)[1:]
    taken = build.dynamic_slice(rows, _starts(build, rows, head), [1, *shape])
    return build.reshape(taken, shape)


def _starts(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> list[ir.Value]:
    return [*head, *[build.i32(0)] * (len(shape_of(rows)) - len(head))]


class Slots:
    """Room for some values of `count` microbatches at once, by number: [count, ...] for each."""

    def __init__(self, types: Mapping[int, ir.RankedTensorType], count: int) -> None:
        self._types = types
        self._places = {number: place for place, number in enumerate(types)}
        self._count = count

    def initial(self, build: Builder) -> list[ir.Value]:
        """What is carried before the first tick."""
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
        """The room with the values in a slot, where they are to go there."""
        kept: list[ir.Value] = []
        for number, rows in zip(self._types, held, strict=True):
            at = slot(build)
            old = row_of(build, rows, [at])
            kept.append(put_row(build, rows, build.same("select", when, values[number], old), [at]))
        return kept

    def taken(
        self, build: Builder, held: Sequence[ir.Value], slot: SlotOf, number: int
    ) -> ir.Value:
        """A value out of a slot."""
        return row_of(build, held[self._places[number]], [slot(build)])

    def holds(self, number: int) -> bool:
        """Whether a value has room here."""
        return number in self._places

    def in_turn(self, microbatch: ir.Value) -> SlotOf:
        """The slot of a microbatch where they come and go in turn."""

        def slot(build: Builder) -> ir.Value:
            if self._count == 1:
                return build.i32(0)
            return build.same("remainder", microbatch, build.i32(self._count))

        return slot
