"""Reads loops over ticks, and the flows, sums and stacks that their tables control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, tensor_bytes
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import constant_integer, count_trips, counter_of, known_integer
from stablehlo_tools.analysis.pipelines.rank_tables import Column, RankAxis, RankTable, rank_table
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    COLLECTIVE_PERMUTE,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    SELECT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import LAYOUT, Trait, ops_with, short_names
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import before_reshapes, key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import is_inside, ops_named, terminator
from stablehlo_tools.ir.while_loop import is_invariant

Entry = tuple[int, Column]  # a table of the loop and a column of it
Classify = Callable[[ir.Operation], Collective | None]
_REDUCES = short_names(ops_with(Trait.ACROSS_DEVICES))
_FORMS = LAYOUT - {"stablehlo.reverse"} | {CONVERT, SELECT, SLICE}


@dataclass(frozen=True)
class TickLoop:
    """A loop that reads row `tick` of each of its tables; `rows` are the ops that read."""

    op: ir.Operation
    ticks: int
    tables: tuple[RankTable, ...]
    rows: tuple[ir.Operation, ...]

    @property
    def body(self) -> ir.Block:
        """The block of a tick."""
        return While(self.op).body

    @property
    def axis(self) -> RankAxis:
        """The mesh axis that all tables are divided along."""
        return self.tables[0].axis


def tick_loop(op: ir.Operation, facts: ModuleFacts, known: DeviceValues) -> TickLoop | None:
    """Returns a `while` as a loop over the ticks of its tables; None for any other loop.

    It has one table, or as many forward as backward ones.
    """
    count = count_trips(op, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1 or count.starts[0] != 0:
        return None
    ticks = count.trips[0]
    rows: list[ir.Operation] = []
    tables: list[RankTable] = []
    for view in While(op).body.operations:
        # Reads of the row of this tick, from a table that each rank has its own part of.
        row = view.operation
        if row.name != DYNAMIC_SLICE or len(row.operands) != 4 or count.counter.step != 1:
            continue
        table, first, tick, column = row.operands
        taken, whole = shape_of(row.results[0]), shape_of(table)
        if taken != [1, 1, len(Column)] or whole != [1, ticks, len(Column)]:
            continue
        if tick != While(op).body.arguments[count.counter.position]:
            continue
        if constant_integer(first) != 0 or constant_integer(column) != 0:
            continue
        table = outside_of(table, op)
        by_rank = None if table is None else rank_table(table, facts, known)
        if by_rank is not None:
            rows.append(row)
            tables.append(by_rank)
    paired = len(tables) == 1 or len(tables) % 2 == 0
    if not paired or len({table.axis for table in tables}) != 1:
        return None
    return TickLoop(op, ticks, tuple(tables), tuple(rows))


def outside_of(value: ir.Value, loop: ir.Operation) -> ir.Value | None:
    """Returns the value outside of a loop that a value equals; None if the loop computes it.

    The value itself is captured from outside, or is an invariant carry.
    """
    if value.owner == While(loop).body:
        number = ir.BlockArgument(value).arg_number
        return loop.operands[number] if is_invariant(loop, number) else None
    op = producer(value)
    return None if op is not None and is_inside(op, loop) else value


class Entries:
    """The table entries that the scalars of one loop are computed from."""

    def __init__(self, loop: TickLoop) -> None:
        self._rows = {row.results[0]: table for table, row in enumerate(loop.rows)}
        self._known: dict[ir.Value, frozenset[Entry]] = {}

    def find_entries(self, value: ir.Value) -> frozenset[Entry]:
        """Returns the entries that a value is computed from.

        The search stops at loops, branches and dynamic slices.
        """
        if value not in self._known:
            self._known[value] = frozenset()
            self._known[value] = self._behind(value)
        return self._known[value]

    def _behind(self, value: ir.Value) -> frozenset[Entry]:
        op = producer(value)
        if op is None or len(op.regions) or op.name == DYNAMIC_SLICE:
            return frozenset()
        if not isinstance(element_of(value), ir.IntegerType) or prod(shape_of(value)) > len(Column):
            return frozenset()  # not part of a row
        if op.name == "stablehlo.slice":
            table = self._rows.get(before_reshapes(op.operands[0]))
            start = list(ir.DenseI64ArrayAttr(op.attributes["start_indices"]))[-1]
            if table is not None and shape_of(op.results[0])[-1] == 1:
                return frozenset({(table, Column(start))})
        return frozenset[Entry]().union(*(self.find_entries(operand) for operand in op.operands))


@dataclass(frozen=True)
class RingFlow:
    """A value that a direction sends from rank to rank.

    `layers` is the loop over a chunk's layers that returns the sent value, and `permute` sends it.
    The carry `received` of the tick loop holds the received value.
    """

    permute: ir.Operation
    layers: ir.Operation
    result: int  # number of the layer loop's result
    received: int  # carry of the tick loop


def flows_of(
    loop: TickLoop, table: int, entries: Entries, facts: ModuleFacts, classify: Classify, step: int
) -> list[RingFlow]:
    """Returns the flows of the direction of a table.

    Such a flow starts at a select, by the table, between what was received and a value from
    outside. It goes through the layers, and is sent along the ring.
    """
    flows: dict[ir.Value, RingFlow] = {}
    chosen = frozenset({(table, Column.RECEIVED)})
    for view in loop.body.operations:
        op = view.operation
        if op.name != SELECT or entries.find_entries(op.operands[0]) != chosen:
            continue
        received = (v for v in _sources(op.operands[1], loop.body) if v.owner == loop.body)
        argument = next(received, None)
        if argument is None:
            continue
        carry = ir.BlockArgument(argument).arg_number
        permute = _behind(terminator(loop.body).operands[carry], loop.body, COLLECTIVE_PERMUTE)
        layers = None if permute is None else _behind(permute.operands[0], loop.body, WHILE)
        if permute is None or layers is None:
            continue
        if _is_ring(permute, loop.axis, facts, classify, step):
            left: list[ir.Value] = list(layers.results)
            sent = next(v for v in _sources(permute.operands[0], loop.body) if v in left)
            flows[permute.results[0]] = RingFlow(permute, layers, left.index(sent), carry)
    return list(flows.values())


def flows_behind(
    loop: TickLoop,
    layers: Sequence[ir.Operation],
    facts: ModuleFacts,
    classify: Classify,
    step: int,
) -> list[RingFlow]:
    """Returns the flows from layer loops that take turns.

    Selects choose the loop whose result is sent along the ring.
    """
    found: list[RingFlow] = []
    for carry, end in enumerate(terminator(loop.body).operands):
        permute = _behind(end, loop.body, COLLECTIVE_PERMUTE)
        if permute is None or not _is_ring(permute, loop.axis, facts, classify, step):
            continue
        waiting = [permute.operands[0]]
        while waiting:
            value = waiting.pop()
            op = producer(value)
            if op is None or op.block != loop.body:
                continue
            if op in layers:
                found.append(RingFlow(permute, op, ir.OpResult(value).result_number, carry))
            elif op.name == SELECT:
                waiting += [op.operands[1], op.operands[2]]
            elif len(op.operands) and not len(op.regions):
                waiting.append(_source_operand(op))
    return found


def layers_of(loop: TickLoop, table: int, entries: Entries) -> ir.Operation | None:
    """Returns the loop over layers with the trip count of a table; None if there is none."""
    limit = frozenset({(table, Column.LAYERS)})
    for view in loop.body.operations:
        op = view.operation
        counter = counter_of(op) if op.name == WHILE else "no loop"
        if not isinstance(counter, str) and entries.find_entries(counter.bound) == limit:
            return op
    return None


def _is_ring(
    permute: ir.Operation, axis: RankAxis, facts: ModuleFacts, classify: Classify, step: int
) -> bool:
    collective = classify(permute)
    pairs = None if collective is None else facts.groups(collective)
    return pairs is not None and frozenset((pair[0], pair[1]) for pair in pairs) == axis.ring(step)


def _behind(value: ir.Value, body: ir.Block, name: str) -> ir.Operation | None:
    """Returns the op of a name that makes a value, up to changes of its form; None for others."""
    for source in _sources(value, body):
        op = producer(source)
        if op is not None and op.name == name:
            return op
    return None


def _sources(value: ir.Value, body: ir.Block) -> Iterator[ir.Value]:
    """Yields a value and the values that it is a form of.

    It goes back to a loop, a permute or the block's arguments.
    """
    while True:
        yield value
        op = producer(value)
        if op is None or op.block != body or not len(op.operands) or len(op.regions):
            return
        value = _source_operand(op)


def _source_operand(op: ir.Operation) -> ir.Value:
    """Returns the operand that a result is a form of."""
    return op.operands[1 if op.name == DYNAMIC_UPDATE_SLICE else 0]


def final_reductions(
    loop: ir.Operation, axis: RankAxis, facts: ModuleFacts, classify: Classify
) -> Iterator[Collective]:
    """Yields the reductions over the axis of a tick loop's results, or of forms of them."""
    waiting = list(loop.results)
    seen: set[ir.Value | ir.Operation] = set()
    while waiting:
        for use in waiting.pop().uses:
            op = use.owner.operation
            if key_of(op) in seen or op.block != loop.block:
                continue
            seen.add(key_of(op))
            if op.name in _FORMS:
                waiting += op.results
                continue
            collective = classify(op)
            if collective is None or collective.kind not in _REDUCES:
                continue
            groups = facts.groups(collective)
            if groups is None:
                continue
            number = {device: n for n, group in enumerate(groups) for device in group}
            # Over the whole axis, and perhaps over others.
            if all(len({number.get(device) for device in line}) == 1 for line in axis.groups):
                yield collective


class Holdings(NamedTuple):
    """The bytes that one direction holds on a rank.

    `weights` are the stacks that it slices by chunk, as they are before the loop. `read` counts the
    stacks with rows for each microbatch, which another loop wrote. `written` counts the carries
    that its layers write for the program: stacked rows, or accumulated gradients.
    """

    weights: Mapping[ir.Value, int]
    read: int
    written: int


def holdings(
    loop: TickLoop, layers: ir.Operation, flows: Iterable[RingFlow], entries: Entries
) -> Holdings:
    """Returns the bytes that the layers of a direction hold, each stack counted once."""
    weights: dict[ir.Value, int] = {}
    read: dict[ir.Value, int] = {}
    for op in ops_named(layers, {DYNAMIC_SLICE}):
        stack = _held_outside(op.operands[0], loop.op)
        behind = {
            column for start in list(op.operands)[1:] for _, column in entries.find_entries(start)
        }
        if stack is None or Column.CHUNK not in behind:
            continue
        stacks = read if Column.MICROBATCH in behind else weights
        stacks[stack] = value_bytes(stack)
    handed = {flow.result for flow in flows}
    written = [  # the carries that the layers update
        value_bytes(value)
        for position, value in enumerate(layers.operands)
        if value.owner == loop.body and position not in handed
    ]
    return Holdings(weights, sum(read.values()), sum(written))


def kept_bytes(ahead: ir.Operation, back: ir.Operation) -> int:
    """Returns the bytes of stacks that one layer loop returns and another one slices."""
    left = set(ahead.results)
    kept: dict[ir.Value, int] = {}
    for op in ops_named(back, {DYNAMIC_SLICE}):
        stack = outside_of(op.operands[0], back)
        if stack is not None and stack in left:
            kept[stack] = value_bytes(stack)
    return sum(kept.values())


def _held_outside(value: ir.Value, loop: ir.Operation) -> ir.Value | None:
    """Returns a stack as it is before the tick loop; None if the loop computes it."""
    value = before_reshapes(value)
    op = producer(value)
    if op is not None:
        return None if is_inside(op, loop) else value
    around = ir.BlockArgument(value).owner.owner.operation
    if around.name != WHILE or not (around == loop or is_inside(around, loop)):
        return value
    outside = outside_of(value, around)
    return None if outside is None else _held_outside(outside, loop)


def value_bytes(value: ir.Value) -> int:
    """Returns the bytes of a tensor; 0 if they are unknown."""
    return tensor_bytes(ir.ShapedType(value.type)) or 0
