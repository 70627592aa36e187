"""Mistakes in the actions of a rank, their order, and what they take."""

from __future__ import annotations

from collections.abc import Iterator

from rank_units import Change, exchange_operands, float_type, relinked, unit_of, units_of, zeros

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import AFTER_ALL
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import callee_name, functions_by_name
from stablehlo_tools.mpmd.origins import Origin, Source
from stablehlo_tools.mpmd.reading import RankCall, RankMessage, RankReading


def call_removed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    for call in reading.calls:

        def change(copy: RankReading, event: int = call.index) -> bool:
            before, op, behind = unit_of(copy, event)
            for result in (*behind.results[:-1], *op.results):
                result.replace_all_uses_with(zeros(before, result.type))
            behind.results[-1].replace_all_uses_with(before.operands[-1])
            for one in (behind, op, before):
                one.erase()
            return True

        yield reading.describe_event(call.index), change


def unit_moved(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """A message or an action to any other place; chains follow."""
    units = units_of(reading)
    for at, event in enumerate(units):
        for to, other in enumerate(units):
            if to in (at, at + 1):
                continue

            def change(copy: RankReading, event: int = event, other: int = other) -> bool:
                target = unit_of(copy, other)[0]
                for op in unit_of(copy, event):
                    op.move_before(target)
                return relinked(copy)

            yield f"{reading.describe_event(event)} before {reading.describe_event(other)}", change


def units_swapped(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two messages, or two actions; chains follow."""
    units = units_of(reading)
    for at, event in enumerate(units):
        for other in units[at + 1 :]:
            if type(reading.events[event]) is not type(reading.events[other]):
                continue

            def change(copy: RankReading, event: int = event, other: int = other) -> bool:
                first, second = unit_of(copy, event), unit_of(copy, other)
                mark = zeros(first[0], ir.RankedTensorType.get([], float_type(copy)))
                place = producer(mark)
                assert place is not None
                for op in first:
                    op.move_before(second[0])
                for op in second:
                    op.move_before(place)
                place.erase()
                return relinked(copy)

            yield f"{reading.describe_event(event)} and {reading.describe_event(other)}", change


def microbatch_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    numbers = {call.action.microbatch for call in reading.calls if call.action is not None}
    for call in reading.calls:
        for number in sorted({*numbers, max(numbers) + 1}):
            if call.action is None or number == call.action.microbatch:
                continue

            def change(copy: RankReading, event: int = call.index, number: int = number) -> bool:
                before = unit_of(copy, event)[0]
                kind = before.operands[0].type
                other = zeros(before, kind)
                value = ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, number)
                made = producer(other)
                assert made is not None
                made.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, value)
                before.operands[0] = other
                return True

            yield f"{reading.describe_event(call.index)} of microbatch {number}", change


def operand_replaced(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Any operand of a call or a send by any other value of its type that is there.

    After the schedule only values that go nowhere else: what a round takes besides does not follow
    from anything that is in a set.
    """
    last = reading.calls[-1].index
    for event in reading.events:
        for slot, origin in enumerate(event.operands):
            if event.index > last and (
                _is_fixed(reading, origin) or len(reading.origins.uses(origin)) > 1
            ):
                continue
            kind = event.op.operands[slot].type
            for other in _there(reading, event.index, kind):
                if other == origin or _is_alike(reading, event, origin, other):
                    continue

                def change(
                    copy: RankReading,
                    at: int = event.index,
                    slot: int = slot,
                    other: Origin = other,
                ) -> bool:
                    copy.events[at].op.operands[slot] = _value(copy, other)
                    return True

                what = (
                    f"{reading.describe_event(event.index)} takes {reading.describe_origin(other)}"
                )
                yield f"{what} for {reading.describe_origin(origin)} as operand {slot}", change


def _is_alike(
    reading: RankReading, event: RankCall | RankMessage, origin: Origin, other: Origin
) -> bool:
    """Whether nobody could tell: of a function that is called once, its fixed operands."""
    is_once = (
        isinstance(event, RankCall)
        and sum(isinstance(e, RankCall) and e.function == event.function for e in reading.events)
        == 1
    )
    return is_once and _is_fixed(reading, origin) and _is_fixed(reading, other)


def _is_fixed(reading: RankReading, origin: Origin) -> bool:
    if origin.source is not Source.CALL:
        return origin.source is not Source.MESSAGE
    call = reading.events[origin.event]
    return isinstance(call, RankCall) and call.action is None


def _there(reading: RankReading, event: int, kind: ir.Type) -> Iterator[Origin]:
    """The values of a type that are there when an event begins."""
    for number, argument in enumerate(reading.block.arguments):
        if argument.type == kind:
            yield Origin(Source.ARGUMENT, number)
    for before in reading.events[:event]:
        tensors = [result for result in before.op.results if result.type == kind]
        for result in tensors:
            number = ir.OpResult(result).result_number
            source = Source.CALL if isinstance(before, RankCall) else Source.MESSAGE
            yield Origin(source, number, before.index)


def _value(reading: RankReading, origin: Origin) -> ir.Value:
    if origin.source is Source.ARGUMENT:
        return reading.block.arguments[origin.number]
    return reading.events[origin.event].op.results[origin.number]


def operands_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two operands of an action of one type. Of a function that is called once nothing but its body
    says which is which."""
    for call in reading.calls:
        types = [operand.type for operand in call.op.operands]
        if sum(other.function == call.function for other in reading.calls) == 1:
            continue
        for at, origin in enumerate(call.operands):
            for to in range(at + 1, len(types)):
                if types[at] != types[to] or origin == call.operands[to]:
                    continue

                def change(
                    copy: RankReading, event: int = call.index, at: int = at, to: int = to
                ) -> bool:
                    op = copy.events[event].op
                    return exchange_operands(op, op, at, to)

                yield f"operands {at} and {to} of {reading.describe_event(call.index)}", change


def callee_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    types = {
        name: str(function.attributes["function_type"])
        for name, function in functions_by_name(reading.module).items()
    }
    for event in reading.events:
        if not isinstance(event, RankCall):
            continue
        for name, kind in types.items():
            if name == event.function or kind != types[event.function]:
                continue

            def change(copy: RankReading, at: int = event.index, name: str = name) -> bool:
                op = copy.events[at].op
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(name, op.context)
                return callee_name(op) == name

            yield f"{reading.describe_event(event.index)} as @{name}", change


def token_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """A message or an action that takes the token of an earlier one than the last."""
    for event in reading.events:
        if isinstance(event, RankCall) and event.action is None:
            continue
        op = unit_of(reading, event.index)[0]
        count = sum(1 for _ in _tokens_before(op))
        for number in range(count):

            def change(copy: RankReading, at: int = event.index, number: int = number) -> bool:
                op = unit_of(copy, at)[0]
                token = list(_tokens_before(op))[number]
                last = len(op.operands) - 1
                makers = [producer(op.operands[last]), producer(token)]
                if all(made is not None and made.name == AFTER_ALL for made in makers):
                    return False  # one new token is as good as the other
                if op.operands[last] == token:
                    return False
                op.operands[last] = token
                return True

            yield f"{reading.describe_event(event.index)} takes token {number}", change


def _tokens_before(op: ir.Operation) -> Iterator[ir.Value]:
    for view in op.block.operations:
        other = view.operation
        if other == op:
            return
        for result in other.results:
            if bindings.TokenType.isinstance(result.type):
                yield result


def return_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    for slot, origin in enumerate(reading.returned):
        op = reading.events[origin.event].op
        kind = op.results[origin.number].type
        for other in _there(reading, len(reading.events), kind):
            if other == origin:
                continue

            def change(copy: RankReading, slot: int = slot, other: Origin = other) -> bool:
                end = ir.InsertionPoint.at_block_terminator(copy.block).ref_operation
                assert end is not None
                end.operation.operands[slot] = _value(copy, other)
                return True

            yield f"result {slot} is {reading.describe_origin(other)}", change


def barrier_left_out(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """An action whose results do not go through the barrier behind it."""
    for call in reading.calls:

        def change(copy: RankReading, event: int = call.index) -> bool:
            behind = unit_of(copy, event)[-1]
            for operand, through in zip(behind.operands, behind.results, strict=True):
                through.replace_all_uses_with(operand)
            behind.erase()
            return True

        yield reading.describe_event(call.index), change


def barrier_stretched(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """A residual that goes through the barrier before a later action, which does not take it."""
    for at, made in enumerate(reading.calls):
        for later in reading.calls[at + 1 :]:

            def change(copy: RankReading, made: int = made.index, later: int = later.index) -> bool:
                value = copy.events[made].op.results[0]
                before = unit_of(copy, later)[0]
                operands = [value, *before.operands]
                wider = ir.Operation.create(
                    before.name,
                    results=[operand.type for operand in operands],
                    operands=operands,
                    loc=before.location,
                    ip=ir.InsertionPoint(before),
                )
                for old, new in zip(before.results, wider.results[1:], strict=True):
                    old.replace_all_uses_with(new)
                before.erase()
                return True

            yield f"result 0 of {made.action} held until {later.action}", change
