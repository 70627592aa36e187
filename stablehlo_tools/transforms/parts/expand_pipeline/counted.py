"""Loops that count, and the scalars they count with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.split_batch.pieces import Place

Body = Callable[[Place, ir.Value, list[ir.Value]], list[ir.Value]]


def i32(place: Place) -> ir.Type:
    """The type of an i32."""
    return ir.IntegerType.get_signless(32, place.context)


def number(place: Place, value: int) -> ir.Value:
    """A constant i32."""
    return place.splat(value, [], i32(place))


class CountedLoop:
    """A `while` from 0 up to a limit. It is there before its body is written, so that what all of
    its iterations need can be written in front of it."""

    def __init__(self, place: Place, limit: ir.Value, carried: Sequence[ir.Value]) -> None:
        zero, one = number(place, 0), number(place, 1)
        operands = [zero, *carried]
        types, location = [value.type for value in operands], place.location
        self.op = ir.Operation.create(
            "stablehlo.while",
            results=types,
            operands=operands,
            regions=2,
            loc=location,
            ip=place.point,
        )
        locations = [location] * len(types)
        condition = self.op.regions[0].blocks.append(*types, arg_locs=locations)
        inner = Place(ir.InsertionPoint(condition), location)
        goes_on = inner.compare("LT", condition.arguments[0], limit)
        return_values(inner, [goes_on])
        block = self.op.regions[1].blocks.append(*types, arg_locs=locations)
        self.inside = Place(ir.InsertionPoint(block), location)
        self.counter: ir.Value = block.arguments[0]
        self.arguments: list[ir.Value] = list(block.arguments)[1:]
        self._one = one

    @property
    def before(self) -> Place:
        """Builds in front of the loop."""
        return Place(ir.InsertionPoint(self.op), self.inside.location)

    def close(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Ends the body; what the loop carries at its end."""
        following = self.inside.same("add", self.counter, self._one)
        return_values(self.inside, [following, *values])
        results: list[ir.Value] = list(self.op.results)
        return results[1:]


def return_values(place: Place, values: Sequence[ir.Value]) -> None:
    """Ends a region of StableHLO."""
    ir.Operation.create(
        "stablehlo.return", operands=list(values), loc=place.location, ip=place.point
    )
