"""The parts of `main` of a rank, for the mutations of sets: messages, and actions with barriers."""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import producer
from stablehlo_tools.mpmd.reading import RankMessage, RankReading, read_rank

Change = Callable[[RankReading], bool]
Unit = list[ir.Operation]


def unit_of(reading: RankReading, event: int) -> Unit:
    found = reading.events[event]
    if isinstance(found, RankMessage):
        return [found.op]
    before = producer(found.op.operands[0])
    assert before is not None
    behind = next(iter(before.results[-1].uses)).owner.operation
    return [before, found.op, behind]


def units_of(reading: RankReading) -> list[int]:
    return [
        event.index
        for event in reading.events
        if isinstance(event, RankMessage) or event.action is not None
    ]


def exchange_operands(one: ir.Operation, other: ir.Operation, at: int = 0, to: int = 0) -> bool:
    """Exchanges operand `at` of an op and operand `to` of another or the same, if they differ."""
    value, later = one.operands[at], other.operands[to]
    one.operands[at], other.operands[to] = later, value
    return value != later


def relinked(reading: RankReading) -> bool:
    """Puts the chains of tokens through the messages and the actions as they stand now."""
    fresh = read_rank(reading.module, reading.rank, reading.name)
    news = [
        view.operation.results[0]
        for view in fresh.block.operations
        if view.operation.name == "stablehlo.after_all"
    ]
    token = news[0]
    for message in fresh.messages:
        message.op.operands[len(message.op.operands) - 1] = token
        token = message.op.results[len(message.op.results) - 1]
    token = news[1]
    for call in fresh.calls:
        before, _, behind = unit_of(fresh, call.index)
        before.operands[len(before.operands) - 1] = token
        token = behind.results[len(behind.results) - 1]
    return True


def zeros(op: ir.Operation, kind: ir.Type) -> ir.Value:
    shaped = ir.RankedTensorType(kind)
    is_float = isinstance(shaped.element_type, ir.FloatType)
    make = ir.FloatAttr.get if is_float else ir.IntegerAttr.get
    zero = make(shaped.element_type, 0.0 if is_float else 0)
    value = ir.DenseElementsAttr.get_splat(shaped, zero)
    return ir.Operation.create(
        "stablehlo.constant",
        results=[kind],
        attributes={"value": value},
        loc=op.location,
        ip=ir.InsertionPoint(op),
    ).results[0]


def float_type(reading: RankReading) -> ir.Type:
    return ir.F32Type.get(reading.module.context)
