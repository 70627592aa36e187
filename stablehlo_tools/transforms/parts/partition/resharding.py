"""Reshards around an op: operands and results divided in other ways than the values beside it."""

from __future__ import annotations

from stablehlo_tools.analysis.tensor_shardings import SHARDING, Dims, ValueShardings, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import stand_in

RESHARD = "sdy.reshard"
ALL_REDUCE = "sdy.all_reduce"


class Resharder:
    """Puts reshards in, where a value is not divided as wanted."""

    def __init__(self, shardings: ValueShardings) -> None:
        self._shardings = shardings

    def operand(self, op: ir.Operation, number: int, wanted: Dims) -> None:
        """Lets an op take an operand divided as wanted."""
        value = op.operands[number]
        if rank_of(value) and self._shardings.of(value) != wanted:
            op.operands[number] = self._reshard(value, wanted, op.location, ir.InsertionPoint(op))

    def result(self, op: ir.Operation, number: int, wanted: Dims) -> None:
        """Divides a result as wanted, and gives those who use it what they had before.

        An all_reduce that makes it whole stays next to it, and is divided like it: what reduces
        the parts is what made them.
        """
        every = [self._shardings.of(result) for result in op.results]
        old, every[number] = every[number], wanted
        if old == wanted:
            return
        op.attributes[SHARDING] = self._shardings.per_value(every, op.context)
        last, result = op, op.results[number]
        all_reduce = all_reduce_of(result)
        if all_reduce is not None:
            last, result = all_reduce, all_reduce.results[0]
            last.attributes["out_sharding"] = self._shardings.attribute(wanted, op.context)
        if list(result.uses):
            after = ir.InsertionPoint.after(last)
            stand_in(result, self._reshard(result, old, op.location, after))

    def _reshard(
        self, value: ir.Value, dims: Dims, location: ir.Location, point: ir.InsertionPoint
    ) -> ir.Value:
        return ir.Operation.create(
            RESHARD,
            results=[value.type],
            operands=[value],
            attributes={"sharding": self._shardings.attribute(dims, location.context)},
            loc=location,
            ip=point,
        ).results[0]


def all_reduce_of(value: ir.Value) -> ir.Operation | None:
    """The all_reduce by which Shardy makes a partial result whole: the one op that takes it."""
    users = [use.owner.operation for use in value.uses]
    return users[0] if len(users) == 1 and users[0].name == ALL_REDUCE else None
