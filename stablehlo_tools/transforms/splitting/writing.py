"""Small changes to ops that the emission makes."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.building import Builder

_PER_VALUE = frozenset({"sdy.sharding", "mhlo.sharding"})


def combined(op: ir.Operation, kind: str, made: Sequence[Sequence[ir.Value]]) -> ir.Value:
    """The one result of an op, from what each part gives."""
    build = Builder(ir.InsertionPoint(op), op.location)
    total = made[0][0]
    for (part,) in made[1:]:
        total = build.same(kind, total, part)
    return total


def replace_end(end: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Lets a terminator return other values."""
    ir.Operation.create(
        end.name, operands=list(values), loc=end.location, ip=ir.InsertionPoint(end)
    )
    end.erase()


def attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    """Those that do not speak of each result."""
    return {name: value for name, value in op.attributes.items() if name not in _PER_VALUE}
