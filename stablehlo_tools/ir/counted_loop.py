"""Loops that count, and the scalars they count with."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder


class CountedLoop:
    """A `while` from 0 up to a limit. It is there before its body is written, so that what all of
    its iterations need can be written in front of it."""

    def __init__(self, build: Builder, limit: ir.Value, carried: Sequence[ir.Value]) -> None:
        zero, one = build.i32(0), build.i32(1)
        operands = [zero, *carried]
        types, location = [value.type for value in operands], build.location
        self.op = ir.Operation.create(
            "stablehlo.while",
            results=types,
            operands=operands,
            regions=2,
            loc=location,
            ip=build.point,
        )
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
        """Builds in front of the loop."""
        return Builder(ir.InsertionPoint(self.op), self.inside.location)

    def close(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Ends the body; what the loop carries at its end."""
        following = self.inside.same("add", self.counter, self._one)
        self.inside.end_region([following, *values])
        results: list[ir.Value] = list(self.op.results)
        return results[1:]
