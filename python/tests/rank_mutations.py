"""Every small mistake that can be made in the program of a rank: for the tests of the proof.

Each mutation changes one thing in a copy of a rank's program and leaves the rest as it is; where
ops move, the chains of tokens follow them, so that only the proof can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.symbols import callee_name, functions_by_name
from stablehlo_tools.ir.values import producer
from stablehlo_tools.mpmd.proof.proving import Proof, prove
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import (
    AFTER_ALL,
    Call,
    Message,
    Origin,
    Reading,
    Source,
    read_rank,
)

Change = Callable[[Reading], bool]
Unit = list[ir.Operation]


def mutants(ranks: RankSet, kind: str, stride: int = 1) -> Iterator[tuple[str, RankSet]]:
    """What a kind of mutation makes of a set, one change at a time, each with its description.

    Every `stride`-th is made. Those that are no valid programs, or are the same as before, are
    left out.
    """
    for rank, program in enumerate(ranks.programs):
        code = bindings.write_bytecode(program.module)
        context = program.module.context
        base = read_rank(program.module, rank, program.name)
        for number, (said, change) in enumerate(KINDS[kind](base)):
            if number % stride:
                continue
            copy = bindings.parse_module(code, context)
            with context, ir.Location.unknown(context):
                is_changed = change(read_rank(copy, rank, program.name))
            if not is_changed or not _is_valid(copy):
                continue
            programs = list(ranks.programs)
            programs[rank] = replace(program, module=copy)
            yield f"rank {rank}: {said}", replace(ranks, programs=tuple(programs))


def proven(ranks: RankSet) -> Proof:
    """The proof of a set, with its findings."""
    return prove(ranks)


def _is_valid(module: ir.Module) -> bool:
    try:
        return bool(module.operation.verify())
    except ir.MLIRError:
        return False


# Parts of `main`: an action is a call and the barriers around it, a message is one op.


def _unit(reading: Reading, event: int) -> Unit:
    found = reading.events[event]
    if isinstance(found, Message):
        return [found.op]
    before = producer(found.op.operands[0])
    assert before is not None
    behind = next(iter(before.results[-1].uses)).owner.operation
    return [before, found.op, behind]


def _units(reading: Reading) -> list[int]:
    return [
        event.index
        for event in reading.events
        if isinstance(event, Message) or event.action is not None
    ]


def _relinked(reading: Reading) -> bool:
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
        before, _, behind = _unit(fresh, call.index)
        before.operands[len(before.operands) - 1] = token
        token = behind.results[len(behind.results) - 1]
    return True


def _zeros(op: ir.Operation, kind: ir.Type) -> ir.Value:
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


# Each kind: descriptions, and the changes.


def _send_removed(reading: Reading) -> Iterator[tuple[str, Change]]:
    return _removed(reading, is_send=True)


def _receive_removed(reading: Reading) -> Iterator[tuple[str, Change]]:
    return _removed(reading, is_send=False)


def _removed(reading: Reading, *, is_send: bool) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        if message.is_send != is_send:
            continue

        def change(copy: Reading, event: int = message.index) -> bool:
            op = copy.events[event].op
            if not is_send:
                op.results[0].replace_all_uses_with(_zeros(op, op.results[0].type))
            token = op.operands[len(op.operands) - 1]
            op.results[len(op.results) - 1].replace_all_uses_with(token)
            op.erase()
            return True

        yield reading.titled(message.index), change


def _call_removed(reading: Reading) -> Iterator[tuple[str, Change]]:
    for call in reading.calls:

        def change(copy: Reading, event: int = call.index) -> bool:
            before, op, behind = _unit(copy, event)
            for result in (*behind.results[:-1], *op.results):
                result.replace_all_uses_with(_zeros(before, result.type))
            behind.results[-1].replace_all_uses_with(before.operands[-1])
            for one in (behind, op, before):
                one.erase()
            return True

        yield reading.titled(call.index), change


def _send_repeated(reading: Reading) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        if not message.is_send:
            continue

        def change(copy: Reading, event: int = message.index) -> bool:
            op = copy.events[event].op
            twin = op.clone(ip=ir.InsertionPoint(op)).operation
            op.operands[1] = twin.results[0]
            return True

        yield reading.titled(message.index), change


def _unit_moved(reading: Reading) -> Iterator[tuple[str, Change]]:
    """A message or an action to any other place; chains follow."""
    units = _units(reading)
    for at, event in enumerate(units):
        for to, other in enumerate(units):
            if to in (at, at + 1):
                continue

            def change(copy: Reading, event: int = event, other: int = other) -> bool:
                target = _unit(copy, other)[0]
                for op in _unit(copy, event):
                    op.move_before(target)
                return _relinked(copy)

            yield f"{reading.titled(event)} before {reading.titled(other)}", change


def _units_swapped(reading: Reading) -> Iterator[tuple[str, Change]]:
    """Two messages, or two actions; chains follow."""
    units = _units(reading)
    for at, event in enumerate(units):
        for other in units[at + 1 :]:
            if type(reading.events[event]) is not type(reading.events[other]):
                continue

            def change(copy: Reading, event: int = event, other: int = other) -> bool:
                first, second = _unit(copy, event), _unit(copy, other)
                mark = _zeros(first[0], ir.RankedTensorType.get([], _float(copy)))
                place = producer(mark)
                assert place is not None
                for op in first:
                    op.move_before(second[0])
                for op in second:
                    op.move_before(place)
                place.erase()
                return _relinked(copy)

            yield f"{reading.titled(event)} and {reading.titled(other)}", change


def _float(reading: Reading) -> ir.Type:
    return ir.F32Type.get(reading.module.context)


def _operands_swapped(reading: Reading) -> Iterator[tuple[str, Change]]:
    """What two sends carry."""
    for one, other in _pairs_of(reading, is_send=True):

        def change(copy: Reading, one: int = one.index, other: int = other.index) -> bool:
            first, second = copy.events[one].op, copy.events[other].op
            value, later = first.operands[0], second.operands[0]
            if value == later:
                return False
            first.operands[0], second.operands[0] = later, value
            return True

        yield f"{reading.titled(one.index)} and {reading.titled(other.index)}", change


def _channels_swapped(reading: Reading) -> Iterator[tuple[str, Change]]:
    """Those of two sends, or of two receives."""
    for is_send in (True, False):
        for one, other in _pairs_of(reading, is_send=is_send):

            def change(copy: Reading, one: int = one.index, other: int = other.index) -> bool:
                first, second = copy.events[one].op, copy.events[other].op
                for name in ("channel_handle", "source_target_pairs"):
                    mine, theirs = first.attributes[name], second.attributes[name]
                    first.attributes[name], second.attributes[name] = theirs, mine
                return True

            yield f"{reading.titled(one.index)} and {reading.titled(other.index)}", change


def _pairs_of(reading: Reading, *, is_send: bool) -> Iterator[tuple[Message, Message]]:
    found = [message for message in reading.messages if message.is_send == is_send]
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            if one.type == other.type:
                yield one, other


def _channel_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    most = max((message.channel for message in reading.messages), default=0)
    for message in reading.messages:
        for channel in range(1, most + 2):
            if channel == message.channel:
                continue

            def change(copy: Reading, event: int = message.index, channel: int = channel) -> bool:
                op = copy.events[event].op
                op.attributes["channel_handle"] = ir.Attribute.parse(
                    f"#stablehlo.channel_handle<handle = {channel}, type = 1>", op.context
                )
                return True

            yield f"{reading.titled(message.index)} on channel {channel}", change


def _devices_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        (source, target), *_ = message.pairs
        for pairs in ([[target, source]], [[source, source]], [[target, target]], []):

            def change(
                copy: Reading, event: int = message.index, pairs: list[list[int]] = pairs
            ) -> bool:
                op = copy.events[event].op
                op.attributes["source_target_pairs"] = ir.Attribute.parse(
                    f"dense<{pairs or ''}> : tensor<{len(pairs)}x2xi64>", op.context
                )
                return True

            yield f"{reading.titled(message.index)} from and to {pairs}", change


def _type_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    """A send of a number instead, or a receive of one."""
    for message in reading.messages:

        def change(copy: Reading, event: int = message.index) -> bool:
            found = copy.events[event]
            assert isinstance(found, Message)
            op, kind = found.op, ir.RankedTensorType.get([3], _float(copy))
            if found.is_send:
                op.operands[0] = _zeros(op, kind)
                return True
            op.results[0].replace_all_uses_with(_zeros(op, op.results[0].type))
            other = ir.Operation.create(
                op.name,
                results=[kind, op.results[1].type],
                operands=list(op.operands),
                attributes=dict(op.attributes.items()),
                loc=op.location,
                ip=ir.InsertionPoint(op),
            )
            op.results[1].replace_all_uses_with(other.results[1])
            op.erase()
            return True

        yield reading.titled(message.index), change


def _microbatch_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    numbers = {call.action.microbatch for call in reading.calls if call.action is not None}
    for call in reading.calls:
        for number in sorted({*numbers, max(numbers) + 1}):
            if call.action is None or number == call.action.microbatch:
                continue

            def change(copy: Reading, event: int = call.index, number: int = number) -> bool:
                before = _unit(copy, event)[0]
                kind = before.operands[0].type
                other = _zeros(before, kind)
                value = ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, number)
                made = producer(other)
                assert made is not None
                made.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, value)
                before.operands[0] = other
                return True

            yield f"{reading.titled(call.index)} of microbatch {number}", change


def _operand_replaced(reading: Reading) -> Iterator[tuple[str, Change]]:
    """Any operand of a call or a send by any other value of its type that is there."""
    for event in reading.events:
        for slot, origin in enumerate(event.operands):
            kind = event.op.operands[slot].type
            for other in _there(reading, event.index, kind):
                if other == origin or _is_alike(reading, event, origin, other):
                    continue

                def change(
                    copy: Reading, at: int = event.index, slot: int = slot, other: Origin = other
                ) -> bool:
                    copy.events[at].op.operands[slot] = _value(copy, other)
                    return True

                what = f"{reading.titled(event.index)} takes {reading.described(other)}"
                yield f"{what} for {reading.described(origin)} as operand {slot}", change


def _is_alike(reading: Reading, event: Call | Message, origin: Origin, other: Origin) -> bool:
    """Whether nobody could tell: of a function that is called once, its fixed operands."""
    is_once = (
        isinstance(event, Call)
        and sum(isinstance(e, Call) and e.function == event.function for e in reading.events) == 1
    )
    return is_once and _is_fixed(reading, origin) and _is_fixed(reading, other)


def _is_fixed(reading: Reading, origin: Origin) -> bool:
    if origin.source is not Source.CALL:
        return origin.source is not Source.MESSAGE
    call = reading.events[origin.event]
    return isinstance(call, Call) and call.action is None


def _there(reading: Reading, event: int, kind: ir.Type) -> Iterator[Origin]:
    """The values of a type that are there when an event begins."""
    for number, argument in enumerate(reading.block.arguments):
        if argument.type == kind:
            yield Origin(Source.ARGUMENT, number)
    for before in reading.events[:event]:
        tensors = [result for result in before.op.results if result.type == kind]
        for result in tensors:
            number = ir.OpResult(result).result_number
            source = Source.CALL if isinstance(before, Call) else Source.MESSAGE
            yield Origin(source, number, before.index)


def _value(reading: Reading, origin: Origin) -> ir.Value:
    if origin.source is Source.ARGUMENT:
        return reading.block.arguments[origin.number]
    return reading.events[origin.event].op.results[origin.number]


def _callee_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    types = {
        name: str(function.attributes["function_type"])
        for name, function in functions_by_name(reading.module).items()
    }
    for event in reading.events:
        if not isinstance(event, Call):
            continue
        for name, kind in types.items():
            if name == event.function or kind != types[event.function]:
                continue

            def change(copy: Reading, at: int = event.index, name: str = name) -> bool:
                op = copy.events[at].op
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(name, op.context)
                return callee_name(op) == name

            yield f"{reading.titled(event.index)} as @{name}", change


def _token_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    """A message or an action that takes the token of an earlier one than the last."""
    for event in reading.events:
        if isinstance(event, Call) and event.action is None:
            continue
        op = _unit(reading, event.index)[0]
        count = sum(1 for _ in _tokens_before(op))
        for number in range(count):

            def change(copy: Reading, at: int = event.index, number: int = number) -> bool:
                op = _unit(copy, at)[0]
                token = list(_tokens_before(op))[number]
                last = len(op.operands) - 1
                makers = [producer(op.operands[last]), producer(token)]
                if all(made is not None and made.name == AFTER_ALL for made in makers):
                    return False  # one new token is as good as the other
                if op.operands[last] == token:
                    return False
                op.operands[last] = token
                return True

            yield f"{reading.titled(event.index)} takes token {number}", change


def _tokens_before(op: ir.Operation) -> Iterator[ir.Value]:
    for view in op.block.operations:
        other = view.operation
        if other == op:
            return
        for result in other.results:
            if bindings.TokenType.isinstance(result.type):
                yield result


def _return_changed(reading: Reading) -> Iterator[tuple[str, Change]]:
    for slot, origin in enumerate(reading.returned):
        op = reading.events[origin.event].op
        kind = op.results[origin.number].type
        for other in _there(reading, len(reading.events), kind):
            if other == origin:
                continue

            def change(copy: Reading, slot: int = slot, other: Origin = other) -> bool:
                end = ir.InsertionPoint.at_block_terminator(copy.block).ref_operation
                assert end is not None
                end.operation.operands[slot] = _value(copy, other)
                return True

            yield f"result {slot} is {reading.described(other)}", change


def _barrier_left_out(reading: Reading) -> Iterator[tuple[str, Change]]:
    """An action whose results do not go through the barrier behind it."""
    for call in reading.calls:

        def change(copy: Reading, event: int = call.index) -> bool:
            behind = _unit(copy, event)[-1]
            for operand, through in zip(behind.operands, behind.results, strict=True):
                through.replace_all_uses_with(operand)
            behind.erase()
            return True

        yield reading.titled(call.index), change


KINDS: dict[str, Callable[[Reading], Iterator[tuple[str, Change]]]] = {
    "send-removed": _send_removed,
    "receive-removed": _receive_removed,
    "call-removed": _call_removed,
    "send-repeated": _send_repeated,
    "moved": _unit_moved,
    "swapped": _units_swapped,
    "operands-swapped": _operands_swapped,
    "channels-swapped": _channels_swapped,
    "channel-changed": _channel_changed,
    "devices-changed": _devices_changed,
    "type-changed": _type_changed,
    "microbatch-changed": _microbatch_changed,
    "operand-replaced": _operand_replaced,
    "callee-changed": _callee_changed,
    "token-changed": _token_changed,
    "return-changed": _return_changed,
    "barrier-left-out": _barrier_left_out,
}
