"""Finds the action of the schedule that each message belongs to, and checks M5.

A channel identifies a message. The manifest has the action of each channel. The value that is sent
is read from the sender's program, and the two have to agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE
from stablehlo_tools.mpmd.manifest import FINISH, Manifest, ManifestTransfer
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFindings
from stablehlo_tools.mpmd.reading import RankCall, RankMessage, RankReading
from stablehlo_tools.schedules.forms import step_of
from stablehlo_tools.schedules.table import Action, ActionKind
from stablehlo_tools.schedules.validator import other_end

_SENT_BY = {
    ActionKind.FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.BACKWARD: ActionKind.SEND_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.SEND_BACKWARD,
    ActionKind.RECEIVE_BACKWARD: ActionKind.SEND_BACKWARD,
}


type Pairs = tuple[tuple[int, ...], ...]  # of devices


class Label(NamedTuple):
    """An end of a transfer (None after the schedule), and the number of its tensor."""

    action: Action | None
    tensor: int
    transfer: ManifestTransfer


@dataclass(frozen=True)
class MessageLabels:
    """The labels of the messages, from the manifest's entries for their channels.

    A message on an unknown channel has no label. The labels of a rank are computed on first use.

    `sends` has the action of each transfer, by its text, and `tensors` the number of its tensors.
    """

    transfers: Mapping[int, ManifestTransfer]
    sends: Mapping[str, Action | None]
    tensors: Mapping[str, int]
    _of_ranks: dict[int, dict[int, Label]] = field(default_factory=dict[int, dict[int, Label]])
    _actions: dict[int, list[Action | None]] = field(
        default_factory=dict[int, list[Action | None]], compare=False
    )

    @staticmethod
    def of_manifest(manifest: Manifest) -> MessageLabels:
        """Returns the labels of the programs of a manifest."""
        tensors = Counter(transfer.action for transfer in manifest.transfers)
        steps = {text: None if text == FINISH else step_of(text) for text in tensors}
        sends = {
            text: step if isinstance(step, Action) and step.kind.is_send else None
            for text, step in steps.items()
        }
        return MessageLabels(manifest.of_channel(), sends, tensors)

    def of_rank(self, reading: RankReading) -> Mapping[int, Label]:
        """Returns the labels of a rank by the index of the event."""
        if reading.rank not in self._of_ranks:
            known: dict[int, Label] = {}
            for message in reading.messages:
                if (transfer := self.transfers.get(message.channel)) is not None:
                    send = self.sends[transfer.action]
                    action = send if send is None or message.is_send else other_end(send)
                    known[message.index] = Label(action, transfer.tensor, transfer)
            self._of_ranks[reading.rank] = known
        return self._of_ranks[reading.rank]

    def actions(self, reading: RankReading) -> list[Action | None]:
        """Returns the action of each event of a rank; None outside the schedule."""
        if reading.rank not in self._actions:
            known = self.of_rank(reading)
            listed: list[Action | None] = []
            for event in reading.events:
                if isinstance(event, RankCall):
                    listed.append(event.action)
                else:
                    label = known.get(event.index)
                    listed.append(None if label is None else label.action)
            self._actions[reading.rank] = listed
        return self._actions[reading.rank]


def check_transfers(
    manifest: Manifest,
    readings: Sequence[RankReading],
    labels: MessageLabels,
    findings: RankFindings,
) -> None:
    """Checks M5: each message agrees with the manifest's entry for its channel, and each channel
    has one send and one receive."""
    _check_listed(manifest, labels.sends, findings)
    ends: defaultdict[tuple[int, bool], list[tuple[RankReading, RankMessage]]] = defaultdict(list)
    pairs_of: dict[tuple[int, int], Pairs] = {}
    for reading in readings:
        of_events = labels.of_rank(reading)
        for message in reading.messages:
            label = of_events.get(message.index)
            if label is None:
                said = f"{reading.describe_event(message.index)}: the manifest has no such channel"
                findings.add(ProofRule.MESSAGES, said, reading, message.op)
                continue
            ends[message.channel, message.is_send].append((reading, message))
            ranks = label.transfer.source, label.transfer.target
            if ranks not in pairs_of:
                pairs_of[ranks] = label.transfer.pairs(manifest.devices)
            _check_message(label.transfer, pairs_of[ranks], reading, message, findings)
    for transfer in manifest.transfers:
        for is_send in (True, False):
            found = ends[transfer.channel, is_send]
            if len(found) == 1:
                continue
            word, rank = ("sent", transfer.source) if is_send else ("received", transfer.target)
            told = f"channel {transfer.channel} ({transfer.action}) is {word} {len(found)} times"
            of = next((each for each in readings if each.rank == rank), None)
            missing = (of, None if of is None else of.main)
            where, op = (found[1][0], found[1][1].op) if found else missing
            findings.add(ProofRule.MESSAGES, f"{told}, not once", where, op)


def check_messages(reading: RankReading, labels: MessageLabels, findings: RankFindings) -> None:
    """Checks M5 within one rank: the sent values, and the order of the tensors of an action."""
    _check_groups(reading, labels, findings)
    _check_sent(reading, labels, findings)


def _check_listed(
    manifest: Manifest, sends: Mapping[str, Action | None], findings: RankFindings
) -> None:
    channels = [transfer.channel for transfer in manifest.transfers]
    if sorted(channels) != list(range(1, len(channels) + 1)):
        findings.add(
            ProofRule.MESSAGES,
            f"the channels of {len(channels)} transfers must be 1 to {len(channels)}",
        )
    place = manifest.table.placement
    for transfer in manifest.transfers:
        if not transfer.is_scheduled:
            continue
        send = sends[transfer.action]
        if send is None:
            said = f"channel {transfer.channel} is for {transfer.action}, which is not a send"
            findings.add(ProofRule.MESSAGES, said)
            continue
        other = other_end(send)
        if not 0 <= other.stage < manifest.table.stages or send.stage >= manifest.table.stages:
            said = (
                f"channel {transfer.channel} is for {send}, but stage {other.stage} does not exist"
            )
            findings.add(ProofRule.MESSAGES, said)
            continue
        ranks = tuple(place.rank_of(end.stage, end.microbatch) for end in (send, other))
        if ranks != (transfer.source, transfer.target):
            said = (
                f"channel {transfer.channel} is from rank {transfer.source} to rank "
                f"{transfer.target}, but {send} goes from rank {ranks[0]} to rank {ranks[1]}"
            )
            findings.add(ProofRule.MESSAGES, said)


def _check_message(
    transfer: ManifestTransfer,
    pairs: Pairs,
    reading: RankReading,
    message: RankMessage,
    findings: RankFindings,
) -> None:
    """Checks rank, type and devices of one end of a transfer. `pairs` are its devices."""
    rank = transfer.source if message.is_send else transfer.target
    is_host, channel_type = message.is_host_transfer, message.channel_type
    found = (reading.rank, message.type, message.pairs, is_host, channel_type)
    wanted = (rank, transfer.type, pairs, False, DEVICE_TO_DEVICE)
    if found == wanted:
        return
    texts = (
        f"it belongs to rank {rank}",
        f"it carries {message.type}, not {transfer.type}",
        f"its pairs are {list(map(list, message.pairs))}, not {list(map(list, pairs))}",
        "it transfers to or from the host",
        f"its channel has type {channel_type}, not device to device",
    )
    for there, right, said in zip(found, wanted, texts, strict=True):
        if there != right:
            title = reading.describe_event(message.index)
            findings.add(
                ProofRule.MESSAGES, f"{title} ({transfer.action}): {said}", reading, message.op
            )


def _check_groups(reading: RankReading, labels: MessageLabels, findings: RankFindings) -> None:
    """Checks that all tensors of an action are adjacent and in order: 0, 1, …."""
    known = labels.of_rank(reading)
    labelled = [(event, known.get(event.index)) for event in reading.events]
    for action, row in groupby(labelled, lambda each: each[1] and each[1].action):
        listed = [(event, label) for event, label in row if label is not None]
        if action is None:
            continue
        (event, label), numbers = listed[0], [label.tensor for _, label in listed]
        count = labels.tensors[label.transfer.action]
        if numbers != list(range(count)):
            said = f"the tensors of {action} here are {numbers}, not all {count} in a row"
            findings.add(ProofRule.MESSAGES, said, reading, event.op)


def _check_sent(reading: RankReading, labels: MessageLabels, findings: RankFindings) -> None:
    """Checks that a sent value is of the stage and the microbatch of its channel."""
    known, actions = labels.of_rank(reading), labels.actions(reading)
    last = max((call.index for call in reading.calls), default=-1)
    for message in reading.messages:
        label, sent = known.get(message.index), message.operand
        if label is None:
            continue
        said = ""
        if label.action is None:
            said = "it comes before the last action" if message.index < last else ""
        elif sent is not None:
            # the action that yields the value: a phase, or a receive of the schedule
            made = actions[sent.event] if sent.event >= 0 else None
            if made is None:
                value = reading.describe_origin(sent)
                said = f"it sends {value}, which does not belong to a microbatch"
            elif not _may_send(label.action, made):
                said = f"it sends {reading.describe_origin(sent)}, which belongs to {made}"
        if said:
            title = f"{reading.describe_event(message.index)} ({label.transfer.action})"
            findings.add(ProofRule.MESSAGES, f"{title}: {said}", reading, message.op)


def _may_send(send: Action, made: Action) -> bool:
    """Returns True if a send may send the result of an action.

    It must be of the send's microbatch, and of its stage. A value that is passed through may be of
    a stage before it (after it, for gradients). A gradient may be a result of the forward, if the
    backward has nothing to compute for it.
    """
    if made.microbatch != send.microbatch or made.kind not in _SENT_BY:
        return False
    if made.stage == send.stage:
        return _SENT_BY[made.kind] is send.kind or send.kind is ActionKind.SEND_BACKWARD
    is_forward = send.kind is ActionKind.SEND_FORWARD
    if _SENT_BY[made.kind] is not send.kind:
        return False
    return made.stage < send.stage if is_forward else made.stage > send.stage


def check_fifo(
    readings: Sequence[RankReading], labels: MessageLabels, findings: RankFindings
) -> None:
    """Checks that receives from one rank are in the order of that rank's sends."""
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[tuple[RankReading, RankMessage]]] = defaultdict(
        list
    )
    for reading in readings:
        known = labels.of_rank(reading)
        for message in reading.messages:
            label = known.get(message.index)
            if label is None:
                continue
            ranks = (label.transfer.source, label.transfer.target)
            if message.is_send:
                sent[ranks].append(message.channel)
            else:
                received[ranks].append((reading, message))
    for ranks, ends in received.items():
        for channel, (reading, message) in zip(sent[ranks], ends, strict=False):
            if channel != message.channel:
                said = (
                    f"{reading.describe_event(message.index)} is at the position of channel "
                    f"{channel}, which rank {ranks[0]} sends; messages between two ranks match in "
                    "order"
                )
                findings.add(ProofRule.MESSAGES, said, reading, message.op)
                break
