"""Finds and writes values that are the same for every microbatch, within the loop and around it.

A `Key` identifies them. The key of an argument, or of rows of one, is an input of a rank. Any other
value is computed once, in `prepare`, or at each reader if it is little more than a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Literal, NamedTuple

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.loop_carries import ROWS
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BROADCAST, CONSTANT, IOTA, SLICE
from stablehlo_tools.dialect.reducers import complex_identity, identity_of
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS
from stablehlo_tools.mpmd.staging.step import TrainingStep

_SPREADS = frozenset({BROADCAST, IOTA, CONSTANT})
FEW = 64  # the most elements that are recomputed at each reader, or packed with others


class Key(NamedTuple):
    """A value of the block around the loop, or of its body, by its number there."""

    place: Literal["outer", "body"]
    number: int


class BlockRows(NamedTuple):
    """Rows `start` to `limit` of dimension `dim` of an argument of the block, or of a result."""

    argument: int
    dim: int | None = None
    start: int = 0
    limit: int = 0


class Fixed:
    """The values that do not depend on the microbatch."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._flows: Mapping[str, Dataflow] = {"outer": step.outer, "body": step.flow}
        self._arguments = {number: i for i, number in enumerate(step.outer.root.arguments)}
        loop = step.outer.maker[step.outer.numbers[step.loop.op.results[0]]]
        self._carry_of = {number: carry for carry, number in enumerate(loop.results)}
        self._anew: dict[Key, bool] = {}

    def key_in_body(self, number: int) -> Key:
        """Returns the key of an invariant value of the body."""
        if number in self._step.flow.maker:
            return Key("body", number)
        value = self._step.constants.get(number, self._step.flow.values[number])
        return self.key_of(value)

    def key_of(self, value: ir.Value) -> Key:
        """Returns the key of a value of the block around the loop."""
        return self.key_outside(self._step.outer.number(value))

    def key_outside(self, number: int) -> Key:
        """Returns the key of a value of the block around the loop, by its number."""
        carry = self._carry_of.get(number)
        if carry is not None and carry in self._step.loop.constants:
            return self.key_of(self._step.loop.op.operands[carry])
        return Key("outer", number)

    def value(self, key: Key) -> ir.Value:
        """Returns the value in the original program."""
        return self._flows[key.place].values[key.number]

    def argument_rows(self, key: Key) -> BlockRows | None:
        """Returns the rows of an argument that a value is; None if it has to be computed."""
        if key.place == "outer" and key.number in self._arguments:
            return BlockRows(self._arguments[key.number])
        node = self._maker(key)
        if node is None or node.name != SLICE:
            return None
        source = self._sources(key, node)[0]
        if source.place != "outer" or source.number not in self._arguments:
            return None
        return _rows(node.op, self._arguments[source.number])

    def is_written_anew(self, key: Key) -> bool:
        """Returns True if a value is recomputed at each reader instead of kept.

        This holds for constants, broadcasts, iotas, and values of few elements that depend on no
        argument.
        """
        if key not in self._anew:
            node, value = self._maker(key), self.value(key)
            if node is None or self.argument_rows(key) is not None:
                is_anew = False
            elif node.name in CONSTANTS or node.name in _SPREADS:
                # A prepared value is one more operand of each function, and live from then on.
                is_anew = True
            else:
                is_one = len(node.results) == 1 and not len(node.op.regions)
                is_small = is_one and elements_in(value) <= FEW
                is_anew = is_small and all(map(self.is_written_anew, self._sources(key, node)))
            self._anew[key] = is_anew
        return self._anew[key]

    def leaves(self, key: Key) -> Iterator[Key]:
        """Yields the values needed to write a value: itself, or the sources if it is recomputed."""
        if not self.is_written_anew(key):
            yield key
            return
        node = self._maker(key)
        for source in () if node is None else self._sources(key, node):
            yield from self.leaves(source)

    def write(self, key: Key, known: dict[Key, ir.Value], point: ir.InsertionPoint) -> ir.Value:
        """Writes a value and its sources, unless they are in `known`. Returns the value."""
        pending = [key]
        while pending:
            current = pending[-1]
            if current in known:
                pending.pop()
                continue
            node = self._maker(current)
            assert node is not None, "an argument is known"
            sources = self._sources(current, node)
            missing = [source for source in sources if source not in known]
            if missing:
                pending += missing
                continue
            pending.pop()
            self._copy(current, node, sources, known, point)
        return known[key]

    def cone(self, keys: Iterable[Key], is_known: Callable[[Key], bool]) -> list[Key]:
        """Returns the known keys from which other keys can be written."""
        reached: dict[Key, None] = {}
        seen: set[Key] = set()
        pending = list(keys)[::-1]
        while pending:
            key = pending.pop()
            if key in seen:
                continue
            seen.add(key)
            if is_known(key):
                reached[key] = None
                continue
            node = self._maker(key)
            assert node is not None, "an argument is known"
            pending += self._sources(key, node)[::-1]
        return list(reached)

    def _maker(self, key: Key) -> Node | None:
        return self._flows[key.place].maker.get(key.number)

    def _sources(self, key: Key, node: Node) -> list[Key]:
        if key.place == "body":
            return [self.key_in_body(number) for number in node.inputs]
        carry = self._carry_of.get(key.number)
        if carry is not None:
            return [self.key_of(self._step.loop.op.operands[carry])]
        return [self.key_outside(number) for number in node.inputs]

    def _copy(
        self,
        key: Key,
        node: Node,
        sources: list[Key],
        known: dict[Key, ir.Value],
        point: ir.InsertionPoint,
    ) -> None:
        if key.place == "outer" and key.number in self._carry_of:
            start = known[sources[0]]
            loop = self._step.loop
            build = Builder(point, loop.op.location)
            moved = loop.counters[self._carry_of[key.number]] * loop.trips
            known[key] = build.same("add", start, build.splat(moved, [], element_of(start)))
            return
        values = self._flows[key.place].values
        stand_ins = {
            values[number]: known[source]
            for number, source in zip(node.inputs, sources, strict=True)
        }
        copy = copy_with(node.op, stand_ins, point)
        for number, result in zip(node.results, copy.results, strict=True):
            known[Key(key.place, number)] = result


def _rows(op: ir.Operation, argument: int) -> BlockRows | None:
    """Returns the rows that a slice reads of an argument; None if it slices several dimensions."""
    start, limit, strides = (
        list(ir.DenseI64ArrayAttr(op.attributes[name]))
        for name in ("start_indices", "limit_indices", "strides")
    )
    shape = shape_of(op.operands[0])
    cut = [d for d, size in enumerate(shape) if (start[d], limit[d]) != (0, size)]
    if any(stride != 1 for stride in strides) or len(cut) > 1:
        return None
    if not cut:
        return BlockRows(argument)
    return BlockRows(argument, cut[0], start[cut[0]], limit[cut[0]])


def elements_in(value: ir.Value) -> int:
    """Returns the number of elements of a tensor."""
    return prod(shape_of(value))


def identity(reducer: str, value: ir.Value, build: Builder) -> ir.Value:
    """Returns a constant of the shape of a value that is the identity of a reducer."""
    kind, element = "add" if reducer == ROWS else reducer, element_of(value)
    is_complex = isinstance(element, ir.ComplexType)
    number = complex_identity(kind) if is_complex else identity_of(kind, element)
    assert number is not None, "an accumulator's reducer has an identity"
    return build.splat_like(number or 0, value)  # a sum starts from 0.0, as the program's does
