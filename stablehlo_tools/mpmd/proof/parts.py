"""Sums of a stage that several ranks have a part of: M4.

Where two ranks hold a stage, each for its own microbatches, one sends its sum to the other behind
the schedule. What the other makes of it first is made of its own sum of the same gradient, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.mpmd.proof.dependence import Dependences
from stablehlo_tools.mpmd.proof.findings import Findings, Rule
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.proof.sums import InSums, Slot
from stablehlo_tools.mpmd.reading import Call, Message, Origin, Reading, Source


def check_parts(
    readings: Sequence[Reading],
    labels: Labels,
    sums: Mapping[int, InSums],
    findings: Findings,
) -> None:
    """M4 between ranks, of which `sums` has those of each."""
    sent: dict[int, tuple[Slot, ...]] = {}
    for reading in readings:
        for message in reading.messages:
            if message.is_send and message.operand is not None:
                sent[message.channel] = _sum_of(reading, sums[reading.rank], message.operand)
    for reading in readings:
        dependences = Dependences(reading.module)
        for message in reading.messages:
            label = labels.of(reading, message.index)
            if message.is_send or label is None or label.action is not None:
                continue
            part = sent.get(message.channel, ())
            _check_added(reading, message, part, sums[reading.rank], dependences, findings)


def _sum_of(reading: Reading, sums: InSums, origin: Origin) -> tuple[Slot, ...]:
    """The results that the actions of a rank leave of the sum that a value is the end of; nothing
    where no action made the value."""
    event = reading.events[origin.event] if origin.source is Source.CALL else None
    if not isinstance(event, Call) or event.action is None:
        return ()
    slot = Slot(event.function, origin.number)
    return next((chain for chain in sums.chains if slot in chain), (slot,))


def _check_added(
    reading: Reading,
    message: Message,
    part: tuple[Slot, ...],
    sums: InSums,
    dependences: Dependences,
    findings: Findings,
) -> None:
    received = Origin(Source.MESSAGE, 0, message.index)
    for use in reading.uses.get(received, []) if part else []:
        call = reading.events[use.event] if use.event >= 0 else None
        if not isinstance(call, Call):
            continue
        own = {
            number
            for number, operand in enumerate(call.operands)
            if not set(part).isdisjoint(_sum_of(reading, sums, operand))
        }
        takers = dependences.takers(call.function, use.operand)
        if own and any(own.isdisjoint(taker) for taker in takers):
            said = (
                f"{reading.titled(message.index)} brings what another rank has of the sum that "
                f"result {part[0].number} of @{part[0].function} leaves, and @{call.function} "
                "does not add it to this rank's"
            )
            findings.add(Rule.SUMS, said, reading, call.op)
