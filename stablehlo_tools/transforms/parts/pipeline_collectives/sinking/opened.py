"""A loop that is taken apart: its carries, its body and what follows it are open to changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import append_arguments, rebuild, reopened
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import Frame


class OpenedLoop:
    """Carries are taken first, then `open` makes the new loop, and `close` does away with the old.

    `dead` are carries that nothing will read: they serve as others of their type, or hand zeros on.
    """

    def __init__(self, body: LoopBody, dead: Sequence[int]) -> None:
        self.body = body
        self._before = Builder(ir.InsertionPoint(body.loop), body.loop.location)
        self._starts: list[ir.Value] = list(body.loop.operands)
        self._ends = list(body.ends)
        self._free = list(dead)
        self._said: set[int] = set()
        self._rows: dict[tuple[ir.Value, tuple[int, ...]], int] = {}
        for number in dead:
            self._ends[number] = body.arguments[number]

    def carry(self, type_: ir.Type, start: float) -> int:
        """The number of a carry that is free, which starts with one number in all elements."""
        value = self._constant(type_, start)
        number = next((n for n in self._free if self._starts[n].type == type_), None)
        if number is None:
            self._starts.append(value)
            self._ends.append(value)  # until `hand_on` says what
            return len(self._starts) - 1
        self._free.remove(number)
        self._starts[number] = value
        return number

    def carry_of_rows(self, value: ir.Value, rows: tuple[int, ...], type_: ir.Type) -> int:
        """The carry whose `rows` a value is written to, in turn; the same for all who ask."""
        if (value, rows) not in self._rows:
            self._rows[value, rows] = self.carry(type_, 0)
        return self._rows[value, rows]

    def open(self) -> None:
        """Makes the new loop, with the old one's regions."""
        old = self.body.loop
        for number in self._free:
            self._starts[number] = self._constant(self._starts[number].type, 0)
        types = [value.type for value in self._starts]
        self.new = reopened(old, self._starts, types)
        for source, target in zip(old.regions, self.new.regions, strict=True):
            block = source.blocks[0]
            block.append_to(target)
            append_arguments(block, types[len(block.arguments) :])
        end = terminator(self.body.block)
        self.inside = ir.InsertionPoint(end)
        self.point = ir.InsertionPoint(old)
        counted = {number: self.new.results[number] for number in self.body.steps}
        kept = {number: old.operands[number] for number in self.body.invariant}
        self.after = Frame(self.body, self.point, counted, kept)

    def argument(self, number: int) -> ir.Value:
        """A carry at the beginning of an iteration."""
        return self.body.block.arguments[number]

    def result(self, number: int) -> ir.Value:
        """A carry after the loop."""
        return self.new.results[number]

    def is_handed_on(self, number: int) -> bool:
        """Whether it was said what a new carry is at the end of an iteration."""
        return number in self._said

    def hand_on(self, number: int, value: ir.Value) -> None:
        """Says what a carry is at the end of an iteration."""
        self._ends[number] = value
        self._said.add(number)

    def close(self, removed: set[Key], results: Mapping[int, ir.Value]) -> None:
        """Drops ops from the body, and lets others stand for results of the old loop."""
        old = self.body.loop
        rebuild(terminator(self.body.block), self._ends, [])
        for op in reversed(self.body.ops):
            if key_of(op) in removed or self._is_idle(op):
                op.erase()
        for number, result in enumerate(old.results):
            result.replace_all_uses_with(results.get(number, self.new.results[number]))
        old.erase()

    def _is_idle(self, op: ir.Operation) -> bool:
        if self.body.is_placed(op):
            return False
        return not any(list(result.uses) for result in op.results)

    def _constant(self, type_: ir.Type, number: float) -> ir.Value:
        """One number in all elements of a type."""
        like = ir.RankedTensorType(type_)
        return self._before.splat(number, like.shape, like.element_type)


def build_at(opened: OpenedLoop, location: ir.Location) -> Builder:
    """Writes behind the new loop."""
    return Builder(opened.point, location)
