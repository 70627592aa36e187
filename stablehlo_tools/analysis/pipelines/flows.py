"""What a direction of a pipeline hands from rank to rank, found by where the table chooses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.analysis.pipelines.entries import Entries
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis
from stablehlo_tools.analysis.pipelines.tick_loops import TickLoop
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer

_WHILE = "stablehlo.while"
_UPDATE = "stablehlo.dynamic_update_slice"
_PERMUTE = "stablehlo.collective_permute"

Classify = Callable[[ir.Operation], Collective | None]


@dataclass(frozen=True)
class Flow:
    """What a direction hands from rank to rank: the permute, the loop over a chunk's layers that
    leaves what is sent, and the carry that holds what was received."""

    permute: ir.Operation
    layers: ir.Operation
    result: int  # of the layer loop
    received: int  # carry of the tick loop


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
    return pairs is not None and frozenset((pair[0], pair[1]) for pair in pairs) == axis.ring(step)


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
    results: list[ir.Value] = list(op.results)
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
