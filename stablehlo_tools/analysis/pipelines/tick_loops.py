"""Loops over ticks: a `while` that takes a row of a table, or of two, in each iteration."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis, RankTable, rank_table
from stablehlo_tools.analysis.trip_counts import Counter, constant_integer, counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import is_inside

_SLICE = "stablehlo.dynamic_slice"


@dataclass(frozen=True)
class TickLoop:
    """A loop that reads row `tick` of each of its tables; `rows` are the ops that do."""

    op: ir.Operation
    ticks: int
    tables: tuple[RankTable, ...]
    rows: tuple[ir.Operation, ...]

    @property
    def body(self) -> ir.Block:
        """What runs in a tick."""
        return self.op.regions[1].blocks[0]

    @property
    def axis(self) -> MeshAxis:
        """The axis that all tables lie on."""
        return self.tables[0].axis


def tick_loop(op: ir.Operation, facts: ModuleFacts, known: DeviceValues) -> TickLoop | None:
    """A `while` as a loop over the ticks of one table or two; None for any other loop."""
    count = counted(op, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1 or count.starts[0] != 0:
        return None
    ticks = count.trips[0]
    rows: list[ir.Operation] = []
    tables: list[RankTable] = []
    for view in op.regions[1].blocks[0].operations:
        table = _row_of(view.operation, op, count.counter, ticks)
        found = None if table is None else rank_table(table, facts, known)
        if found is not None:
            rows.append(view.operation)
            tables.append(found)
    if not 1 <= len(tables) <= 2 or len({table.axis for table in tables}) != 1:
        return None
    return TickLoop(op, ticks, tuple(tables), tuple(rows))


def _row_of(op: ir.Operation, loop: ir.Operation, counter: Counter, ticks: int) -> ir.Value | None:
    """The table of which an op of a loop's body takes the row of the tick."""
    if op.name != _SLICE or len(op.operands) != 4 or counter.step != 1:
        return None
    table, first, tick, column = (op.operands[i] for i in range(4))
    body = loop.regions[1].blocks[0]
    taken = shape_of(op.results[0])
    if taken != [1, 1, len(Column)] or shape_of(table) != [1, ticks, len(Column)]:
        return None
    if tick != body.arguments[counter.position]:
        return None
    if constant_integer(first) != 0 or constant_integer(column) != 0:
        return None
    return outside_of(table, loop)


def outside_of(value: ir.Value, loop: ir.Operation) -> ir.Value | None:
    """A value as it is in front of a loop: captured, or handed on as it came; None for others."""
    body = loop.regions[1].blocks[0]
    if value.owner == body:
        number = ir.BlockArgument(value).arg_number
        same = terminator(body).operands[number] == value
        return loop.operands[number] if same else None
    op = producer(value)
    return None if op is not None and is_inside(op, loop) else value
