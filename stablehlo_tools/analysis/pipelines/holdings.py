"""What the loop over a chunk's layers reads of stacks that its rank holds, and writes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.analysis.pipelines.entries import Entries
from stablehlo_tools.analysis.pipelines.flows import Flow
from stablehlo_tools.analysis.pipelines.tick_loops import TickLoop, outside_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import is_inside, walk

_SLICE = "stablehlo.dynamic_slice"


class Holdings(NamedTuple):
    """What one direction holds on a rank, in bytes.

    `weights` are the stacks that it takes rows of by chunk, as they are in front of the loop;
    `read` is of those that have rows for each microbatch, which another loop left. `written` is
    what its layers write for the program: rows that they leave, or gradients added up.
    """

    weights: Mapping[ir.Value, int]
    read: int
    written: int


def holdings(
    loop: TickLoop, layers: ir.Operation, flows: Iterable[Flow], entries: Entries
) -> Holdings:
    """What the layers of a direction hold, each stack once."""
    weights: dict[ir.Value, int] = {}
    read: dict[ir.Value, int] = {}
    for op in row_reads(layers):
        stack = _held_outside(op.operands[0], loop.op)
        behind = columns_behind(op, entries)
        if stack is None or Column.CHUNK not in behind:
            continue
        found = read if Column.MICROBATCH in behind else weights
        found[stack] = _bytes(stack)
    return Holdings(weights, sum(read.values()), sum(map(_bytes, _written(loop, layers, flows))))


def kept_bytes(ahead: ir.Operation, back: ir.Operation) -> int:
    """Bytes of the stacks that one layer loop leaves and another takes rows of in the same tick."""
    left = set(ahead.results)
    kept: dict[ir.Value, int] = {}
    for op in row_reads(back):
        stack = outside_of(op.operands[0], back)
        if stack is not None and stack in left:
            kept[stack] = _bytes(stack)
    return sum(kept.values())


def row_reads(layers: ir.Operation) -> Iterator[ir.Operation]:
    """The slices that a layer loop takes, those in branches and inner loops among them."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _SLICE:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(layers, visit)
    return iter(found)


def columns_behind(op: ir.Operation, entries: Entries) -> frozenset[Column]:
    """The columns of any table that say where a slice begins."""
    starts = [op.operands[i] for i in range(1, len(op.operands))]
    return frozenset(column for start in starts for _, column in entries.of(start))


def _held_outside(value: ir.Value, loop: ir.Operation) -> ir.Value | None:
    """A stack as it is in front of the loop over ticks; None for what that makes."""
    op = producer(value)
    while op is not None and op.name == "stablehlo.reshape":
        value = op.operands[0]
        op = producer(value)
    while op is None:
        around = ir.BlockArgument(value).owner.owner.operation
        if around.name != "stablehlo.while" or not _is_or_in(around, loop):
            return value
        outside = outside_of(value, around)
        if outside is None:
            return None
        return _held_outside(outside, loop)
    return None if is_inside(op, loop) else value


def _is_or_in(op: ir.Operation, outer: ir.Operation) -> bool:
    return op == outer or is_inside(op, outer)


def _written(loop: TickLoop, layers: ir.Operation, flows: Iterable[Flow]) -> Iterator[ir.Value]:
    """The carries of the loop over ticks that a layer loop goes on with."""
    handed = {flow.result for flow in flows}
    for position, value in enumerate(layers.operands):
        if value.owner == loop.body and position not in handed:
            yield value


def _bytes(value: ir.Value) -> int:
    return tensor_bytes(ir.ShapedType(value.type)) or 0
