"""Loops over ticks: a `while` that takes a row of a table a tick and permutes along a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis, RankTable, rank_table
from stablehlo_tools.analysis.trip_counts import Counter, constant_integer, counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.building import shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer

_WHILE = "stablehlo.while"
_SLICE = "stablehlo.dynamic_slice"
_UPDATE = "stablehlo.dynamic_update_slice"
_PERMUTE = "stablehlo.collective_permute"

Classify = Callable[[ir.Operation], Collective | None]
Entry = tuple[int, Column]  # a table of the loop and a column of it


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


@dataclass(frozen=True)
class Flow:
    """What a direction hands from rank to rank: the permute, the loop over a chunk's layers that
    leaves what is sent, and the carry that holds what was received."""

    permute: ir.Operation
    layers: ir.Operation
    result: int  # of the layer loop
    received: int  # carry of the tick loop


def tick_loop(op: ir.Operation, facts: ModuleFacts, known: DeviceValues) -> TickLoop | None:
    """A `while` as a loop over the ticks of one table or two; None for any other loop."""
    count = counted(op, _constant)
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


def _constant(value: ir.Value) -> tuple[int, ...] | None:
    known = constant_integer(value)
    return None if known is None else (known,)


def _row_of(
    op: ir.Operation, loop: ir.Operation, counter: Counter, ticks: int
) -> ir.Value | None:
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


def is_inside(op: ir.Operation, outer: ir.Operation) -> bool:
    """Whether an op stands in a region of another."""
    parent = op.parent
    while parent is not None:
        if parent.operation == outer:
            return True
        parent = parent.operation.parent
    return False


class Entries:
    """Which integers of the tables a scalar of a tick loop is computed from."""

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


def flows_of(
    loop: TickLoop, table: int, entries: Entries, facts: ModuleFacts, classify: Classify, step: int
) -> list[Flow]:
    """What the direction of a table hands on: it is chosen by the table between what was received
    and what comes from outside, goes through the layers, and is sent along the ring."""
    found: dict[ir.Value, Flow] = {}
    chosen = frozenset({(table, Column.RECEIVED)})
    for view in loop.body.operations:
        op = view.operation
        if op.name != "stablehlo.select" or entries.of(op.operands[0]) != chosen:
            continue
        carry = _carry_behind(op.operands[1], loop.body)
        flow = None if carry is None else _flow(loop, carry)
        if flow is not None and _is_ring(flow.permute, loop.axis, facts, classify, step):
            found[flow.permute.results[0]] = flow
    return list(found.values())


def _flow(loop: TickLoop, carry: int) -> Flow | None:
    """The flow whose arrivals a carry holds."""
    permute = _behind(terminator(loop.body).operands[carry], loop.body, _PERMUTE)
    if permute is None:
        return None
    sent = permute.operands[0]
    layers = _behind(sent, loop.body, _WHILE)
    if layers is None:
        return None
    return Flow(permute, layers, _result_behind(sent, layers), carry)


def _is_ring(
    permute: ir.Operation, axis: MeshAxis, facts: ModuleFacts, classify: Classify, step: int
) -> bool:
    collective = classify(permute)
    pairs = None if collective is None else facts.groups(collective)
    return pairs is not None and {(pair[0], pair[1]) for pair in pairs} == axis.ring(step)


def _carry_behind(value: ir.Value, body: ir.Block) -> int | None:
    for source in _sources(value, body):
        if source.owner == body:
            return ir.BlockArgument(source).arg_number
    return None


def _behind(value: ir.Value, body: ir.Block, name: str) -> ir.Operation | None:
    """The op of a name that a value was made by, up to changes of its form."""
    for source in _sources(value, body):
        op = producer(source)
        if op is not None and op.name == name:
            return op
    return None


def _result_behind(value: ir.Value, op: ir.Operation) -> int:
    results = list(op.results)
    while value not in results:
        made = producer(value)
        assert made is not None, "the op was found on this way"
        value = _passed(made)
    return results.index(value)


def _sources(value: ir.Value, body: ir.Block) -> Iterator[ir.Value]:
    """A value and those that it is another form of, back to a loop, a permute or the block's
    arguments."""
    while True:
        yield value
        op = producer(value)
        if op is None or op.block != body or not len(op.operands) or len(op.regions):
            return
        value = _passed(op)


def _passed(op: ir.Operation) -> ir.Value:
    """The operand that a result is a form of."""
    return op.operands[1 if op.name == _UPDATE else 0]


def _unreshaped(value: ir.Value) -> ir.Value:
    op = producer(value)
    while op is not None and op.name == "stablehlo.reshape":
        value = op.operands[0]
        op = producer(value)
    return value
