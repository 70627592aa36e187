"""Reads the structure of a `while`, and builds counted loops.

A *carry* is a position of the loop's operands. Its values are: before the loop `loop.operands`, at
the start of an iteration `arguments`, at its end `ends`, and after the loop `loop.results`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator


class WhileLoop:
    """The structure of a `while`; invalid once the loop changes.

    `invariant` are the carries that every iteration yields unchanged.
    """

    def __init__(self, loop: ir.Operation) -> None:
        self.loop = loop
        view = While(loop)
        self.condition, self.block = view.condition, view.body
        self.arguments, self.ends = view.carries, view.yields
        self._number_of = {argument: i for i, argument in enumerate(self.arguments)}
        self._carried: dict[ir.Value, list[int]] = {}
        for number, end in enumerate(self.ends):
            self._carried.setdefault(end, []).append(number)
        self.invariant = {i for i, end in enumerate(self.ends) if end == self.arguments[i]}

    def argument_number(self, value: ir.Value) -> int | None:
        """Returns the carry whose body argument is `value`; None for other values."""
        return self._number_of.get(value)

    def carries_of(self, value: ir.Value) -> list[int]:
        """Returns the carries that yield a value."""
        return self._carried.get(value, [])

    def is_read_by_condition(self, carry: int) -> bool:
        """Returns True if the loop's condition reads a carry."""
        return bool(list(self.condition.arguments[carry].uses))


def is_invariant(loop: ir.Operation, carry: int) -> bool:
    """Returns True if every iteration of a `while` yields a carry unchanged."""
    body = While(loop).body
    return terminator(body).operands[carry] == body.arguments[carry]


def before_loops(value: ir.Value) -> ir.Value:
    """Returns the value outside of the loops that only pass it on."""
    while producer(value) is None:
        argument = ir.BlockArgument(value)
        loop = argument.owner.owner.operation
        is_body = loop.name == WHILE and argument.owner == While(loop).body
        if not is_body or not is_invariant(loop, argument.arg_number):
            break
        value = loop.operands[argument.arg_number]
    return value


_LEAST_WIDTH = 32  # bits; enough for any number of iterations


def iteration_of(build: Builder, counter: ir.Value, start: int, step: int) -> ir.Value:
    """Computes the iteration number, from 0, of a counter from `start` in steps of `step`.

    The result has at least 32 bits.
    """
    element = ir.IntegerType(element_of(counter))
    if element.width < _LEAST_WIDTH:
        element = ir.IntegerType.get_signless(_LEAST_WIDTH, build.context)
        counter = build.op("convert", [counter], build.tensor([], element))
    if step < 0:
        counter = build.same("subtract", build.splat(start, [], element), counter)
    elif start:
        counter = build.same("subtract", counter, build.splat(start, [], element))
    if abs(step) != 1:
        counter = build.same("divide", counter, build.splat(abs(step), [], element))
    return counter


def room_for_rows(build: Builder, value: ir.Value, trips: int) -> ir.Value:
    """Creates a stack of zeros of shape `[trips, *shape]`, for a row from each iteration."""
    element = element_of(value)
    if isinstance(element, ir.ComplexType):
        part = build.splat(0, [], element.element_type)
        zero = build.op("convert", [part], build.tensor([], element))
    else:
        zero = build.splat(0, [], element)
    return build.broadcast(zero, [trips, *shape_of(value)], [])


class CountedLoop:
    """A `while` that counts from 0 to a limit.

    It exists before its body is written, so that `before` can build loop-invariant values.
    """

    def __init__(self, build: Builder, limit: ir.Value, carried: Sequence[ir.Value]) -> None:
        zero, one = build.i32(0), build.i32(1)
        operands = [zero, *carried]
        types, location = [value.type for value in operands], build.location
        self.op = build.create("stablehlo.while", operands, types, regions=2)
        locations = [location] * len(types)
        condition = self.op.regions[0].blocks.append(*types, arg_locs=locations)
        inner = Builder(ir.InsertionPoint(condition), location)
        goes_on = inner.compare("LT", condition.arguments[0], limit)
        inner.end_region([goes_on])
        block = self.op.regions[1].blocks.append(*types, arg_locs=locations)
        self.inside = Builder(ir.InsertionPoint(block), location)
        self.counter: ir.Value = block.arguments[0]
        self.arguments: list[ir.Value] = list(block.arguments)[1:]
        self._one = one

    @property
    def before(self) -> Builder:
        """A builder of ops before the loop."""
        return Builder(ir.InsertionPoint(self.op), self.inside.location)

    def close(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Ends the body with the yielded values; returns the loop's results without the counter."""
        following = self.inside.same("add", self.counter, self._one)
        self.inside.end_region([following, *values])
        results: list[ir.Value] = list(self.op.results)
        return results[1:]
