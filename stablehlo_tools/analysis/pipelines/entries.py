"""Which integers of its tables a scalar in a loop over ticks is computed from."""

from __future__ import annotations

from math import prod

from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.analysis.pipelines.tick_loops import TickLoop
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer

_SLICE = "stablehlo.dynamic_slice"

Entry = tuple[int, Column]  # a table of the loop and a column of it


class Entries:
    """The entries behind the scalars of one loop."""

    def __init__(self, loop: TickLoop) -> None:
        self._rows = {row.results[0]: table for table, row in enumerate(loop.rows)}
        self._known: dict[ir.Value, frozenset[Entry]] = {}

    def of(self, value: ir.Value) -> frozenset[Entry]:
        """The entries behind a value; loops, branches and memory are not looked through."""
        if value not in self._known:
            self._known[value] = frozenset()
            self._known[value] = self._behind(value)
        return self._known[value]

    def _behind(self, value: ir.Value) -> frozenset[Entry]:
        op = producer(value)
        if op is None or len(op.regions) or op.name == _SLICE or not _is_small(value):
            return frozenset()
        if op.name == "stablehlo.slice":
            table = self._rows.get(_unreshaped(op.operands[0]))
            start = list(ir.DenseI64ArrayAttr(op.attributes["start_indices"]))[-1]
            if table is not None and shape_of(op.results[0])[-1] == 1:
                return frozenset({(table, Column(start))})
        return frozenset[Entry]().union(*(self.of(operand) for operand in op.operands))


def _is_small(value: ir.Value) -> bool:
    """Whether a value can be a part of a row: a handful of integers or flags."""
    kind = ir.RankedTensorType(value.type)
    return isinstance(kind.element_type, ir.IntegerType) and prod(kind.shape) <= len(Column)


def _unreshaped(value: ir.Value) -> ir.Value:
    op = producer(value)
    while op is not None and op.name == "stablehlo.reshape":
        value = op.operands[0]
        op = producer(value)
    return value
