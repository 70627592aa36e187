"""Mistakes in the messages of a rank: what changes, and how."""

from __future__ import annotations

from collections.abc import Iterator

from rank_units import Change, exchange_operands, float_type, relinked, zeros

from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.reading import RankCall, RankMessage, RankReading


def send_removed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    return _removed(reading, is_send=True)


def sends_swapped(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two sends in the other order: the first one moves behind the second; the chain follows."""
    for one, other in _pairs_of(reading, is_send=True, alike=False):

        def change(copy: RankReading, one: int = one.index, other: int = other.index) -> bool:
            copy.events[one].op.move_after(copy.events[other].op)
            return relinked(copy)

        yield (
            f"{reading.describe_event(one.index)} and {reading.describe_event(other.index)}",
            change,
        )


def receive_moved_up(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """A receive before every send in front of it: one of these may be what it waits for."""
    for at, receive in enumerate(reading.messages):
        if receive.is_send:
            continue
        for send in reading.messages[:at]:
            if not send.is_send:
                continue

            def change(copy: RankReading, event: int = receive.index, to: int = send.index) -> bool:
                copy.events[event].op.move_before(copy.events[to].op)
                return relinked(copy)

            yield (
                f"{reading.describe_event(receive.index)} before "
                f"{reading.describe_event(send.index)}",
                change,
            )


def receive_removed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    return _removed(reading, is_send=False)


def _removed(reading: RankReading, *, is_send: bool) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        if message.is_send != is_send:
            continue

        def change(copy: RankReading, event: int = message.index) -> bool:
            op = copy.events[event].op
            if not is_send:
                op.results[0].replace_all_uses_with(zeros(op, op.results[0].type))
            token = op.operands[len(op.operands) - 1]
            op.results[len(op.results) - 1].replace_all_uses_with(token)
            op.erase()
            return True

        yield reading.describe_event(message.index), change


def send_repeated(reading: RankReading) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        if not message.is_send:
            continue

        def change(copy: RankReading, event: int = message.index) -> bool:
            op = copy.events[event].op
            twin = op.clone(ip=ir.InsertionPoint(op)).operation
            op.operands[1] = twin.results[0]
            return True

        yield reading.describe_event(message.index), change


def operands_swapped(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """What two sends carry, of which one is of the schedule. What those behind it carry does not
    follow from anything that is in a set, nor which is which of what is computed only once."""
    last = reading.calls[-1].index
    return exchanged(
        (one, other)
        for one, other in _pairs_of(reading, is_send=True)
        if one.index < last and not _is_of_one_call(reading, one, other)
    )


def parts_swapped(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """What two sends behind the schedule carry of sums. Only where the other rank has a part of
    each as well it follows which is which."""
    last = reading.calls[-1].index
    return exchanged(
        (one, other)
        for one, other in _pairs_of(reading, is_send=True)
        if one.index > last and _is_of_action(reading, one) and _is_of_action(reading, other)
    )


def exchanged(pairs: Iterator[tuple[RankMessage, RankMessage]]) -> Iterator[tuple[str, Change]]:
    """What the two sends of each pair carry."""
    for one, other in pairs:

        def change(copy: RankReading, one: int = one.index, other: int = other.index) -> bool:
            return exchange_operands(copy.events[one].op, copy.events[other].op)

        yield f"channels {one.channel} and {other.channel}", change


def _is_of_one_call(reading: RankReading, one: RankMessage, other: RankMessage) -> bool:
    """Whether two sends send results of one call, the only one of its function."""
    assert one.operand is not None
    assert other.operand is not None
    maker = reading.events[one.operand.event]
    return (
        one.operand.event == other.operand.event
        and isinstance(maker, RankCall)
        and sum(call.function == maker.function for call in reading.calls) == 1
    )


def _is_of_action(reading: RankReading, send: RankMessage) -> bool:
    assert send.operand is not None
    maker = reading.events[send.operand.event]
    return isinstance(maker, RankCall) and maker.action is not None


def channels_swapped(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Those of two sends, or of two receives."""
    for is_send in (True, False):
        for one, other in _pairs_of(reading, is_send=is_send):

            def change(copy: RankReading, one: int = one.index, other: int = other.index) -> bool:
                first, second = copy.events[one].op, copy.events[other].op
                for name in ("channel_handle", "source_target_pairs"):
                    mine, theirs = first.attributes[name], second.attributes[name]
                    first.attributes[name], second.attributes[name] = theirs, mine
                return True

            yield (
                f"{reading.describe_event(one.index)} and {reading.describe_event(other.index)}",
                change,
            )


def _pairs_of(
    reading: RankReading, *, is_send: bool, alike: bool = True
) -> Iterator[tuple[RankMessage, RankMessage]]:
    found = [message for message in reading.messages if message.is_send == is_send]
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            if not alike or one.type == other.type:
                yield one, other


def channel_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    most = max((message.channel for message in reading.messages), default=0)
    for message in reading.messages:
        for channel in range(1, most + 2):
            if channel == message.channel:
                continue

            def change(
                copy: RankReading, event: int = message.index, channel: int = channel
            ) -> bool:
                op = copy.events[event].op
                op.attributes["channel_handle"] = ir.Attribute.parse(
                    f"#stablehlo.channel_handle<handle = {channel}, type = 1>", op.context
                )
                return True

            yield f"{reading.describe_event(message.index)} on channel {channel}", change


def devices_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    for message in reading.messages:
        sources = tuple(pair[0] for pair in message.pairs)
        targets = tuple(pair[1] for pair in message.pairs)
        ends = [(targets, sources), (sources, sources), (targets, targets)]
        ends += [(sources, targets[::-1]), (sources[1:], targets[1:])]
        for source, target in dict.fromkeys(ends):
            pairs = [list(pair) for pair in zip(source, target, strict=True)]
            if pairs == [list(pair) for pair in message.pairs]:
                continue

            def change(
                copy: RankReading, event: int = message.index, pairs: list[list[int]] = pairs
            ) -> bool:
                op = copy.events[event].op
                op.attributes["source_target_pairs"] = ir.Attribute.parse(
                    f"dense<{pairs or ''}> : tensor<{len(pairs)}x2xi64>", op.context
                )
                return True

            yield f"{reading.describe_event(message.index)} from and to {pairs}", change


def type_changed(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """A send of a number instead, or a receive of one."""
    for message in reading.messages:

        def change(copy: RankReading, event: int = message.index) -> bool:
            found = copy.events[event]
            assert isinstance(found, RankMessage)
            op, kind = found.op, ir.RankedTensorType.get([3], float_type(copy))
            if found.is_send:
                op.operands[0] = zeros(op, kind)
                return True
            op.results[0].replace_all_uses_with(zeros(op, op.results[0].type))
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

        yield reading.describe_event(message.index), change
