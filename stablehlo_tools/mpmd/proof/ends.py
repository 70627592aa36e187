"""Checks inputs and outputs (M9), values outside the schedule (M12), and sums of two ranks (M4).

The schedule implies the operands of its actions. For `prepare`, the rounds of the finish, their
messages and the results of `main`, the manifest contains them (`wiring` in mpmd/reading.py). M12 is
checked only for ranks whose wiring it has.

If two ranks hold a stage, each for its own microbatches, one sends its sum to the other after the
schedule. The other must combine it with its own sum of the same gradient before any other op.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry, ManifestPiece
from stablehlo_tools.mpmd.origins import Origin, Source
from stablehlo_tools.mpmd.proof.dependences import Dependences
from stablehlo_tools.mpmd.proof.flow import InSums, Slot
from stablehlo_tools.mpmd.proof.labels import MessageLabels
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFindings
from stablehlo_tools.mpmd.rank_set import piece_type
from stablehlo_tools.mpmd.reading import RETURN_KEY, RankCall, RankMessage, RankReading, wiring


class _Side(NamedTuple):
    """The arguments of all ranks, or their results."""

    entry: str
    own: str
    types: Sequence[Sequence[ir.Type]]


def check_ends(manifest: Manifest, readings: Sequence[RankReading], findings: RankFindings) -> None:
    """Checks M9: every argument and result has one fitting entry, and the outputs are complete."""
    blocks = [Function(reading.main).body for reading in readings]
    arguments = [[argument.type for argument in block.arguments] for block in blocks]
    results = [[value.type for value in terminator(block).operands] for block in blocks]
    inputs = _Side("input", "argument", arguments)
    outputs = _Side("output", "result", results)
    for side, entries in ((inputs, manifest.inputs), (outputs, manifest.outputs)):
        named: dict[tuple[int, int], list[str]] = {}
        for entry in entries:
            for piece in entry.pieces:
                named.setdefault((piece.rank, piece.number), []).append(entry.path)
        for reading, types in zip(readings, side.types, strict=True):
            for number in range(len(types)):
                paths = named.get((reading.rank, number), [])
                if len(paths) != 1:
                    of = (
                        f"belongs to {' and '.join(paths)}"
                        if paths
                        else f"belongs to no {side.entry}"
                    )
                    said = f"{side.own} {number} {of} in the manifest"
                    findings.add(ProofRule.ENDS, said, reading, reading.main)
        for entry in entries:
            for piece in entry.pieces:
                _check_piece(side, entry, piece, readings, findings)
    for entry in manifest.outputs:
        _check_whole(entry, findings)


def _check_piece(
    side: _Side,
    entry: ManifestEntry,
    piece: ManifestPiece,
    readings: Sequence[RankReading],
    findings: RankFindings,
) -> None:
    title = f"{side.entry} {entry.path}"
    if not 0 <= piece.rank < len(readings) or not 0 <= piece.number < len(side.types[piece.rank]):
        said = (
            f"{title} should have a piece in {side.own} {piece.number} of rank {piece.rank}, "
            "which does not exist"
        )
        findings.add(ProofRule.ENDS, said)
        return
    reading = readings[piece.rank]
    type_ = side.types[piece.rank][piece.number]
    shape, dim = _shape(entry), piece.dim
    is_there = dim is None or (
        0 <= dim < len(shape) and 0 <= piece.start < piece.limit <= shape[dim]
    )
    if not is_there:
        said = f"{title}: rows {piece.start} to {piece.limit} are outside dimension {piece.dim}"
        findings.add(ProofRule.ENDS, said, reading, reading.main)
    elif (wanted := piece_type(entry, piece)) != str(type_):
        said = f"{title} is {side.own} {piece.number}, of type {type_}, but its piece is {wanted}"
        findings.add(ProofRule.ENDS, said, reading, reading.main)


def _check_whole(entry: ManifestEntry, findings: RankFindings) -> None:
    """Checks that the pieces of an output are disjoint and cover it."""
    if len(entry.pieces) == 1 and entry.pieces[0].dim is None:
        return
    dims, shape = {piece.dim for piece in entry.pieces}, _shape(entry)
    dim = dims.pop() if len(dims) == 1 else None
    size = shape[dim] if dim is not None and 0 <= dim < len(shape) else None
    spans = sorted((piece.start, piece.limit) for piece in entry.pieces)
    if [*(start for start, _ in spans), size] != [0, *(limit for _, limit in spans)]:
        said = f"the pieces of output {entry.path} overlap or do not cover it"
        findings.add(ProofRule.ENDS, said)


def _shape(entry: ManifestEntry) -> list[int]:
    """Returns the dimensions of an input or output, read from the text of the type."""
    return [int(size) for size in re.findall(r"(\d+)x", entry.type)]


def check_outside(
    manifest: Manifest, readings: Sequence[RankReading], findings: RankFindings
) -> None:
    """Checks M12."""
    scheduled = {transfer.channel for transfer in manifest.transfers if transfer.is_scheduled}
    for reading in readings:
        expected = manifest.ranks[reading.rank].wiring
        if expected:
            wired = wiring(reading, scheduled)
            places = {
                f"@{event.function}"
                if isinstance(event, RankCall)
                else f"channel {event.channel}": event.op
                for event in reading.events
            }
            for name in dict.fromkeys((*expected, *wired)):
                said = _difference(name, wired.get(name), expected.get(name))
                if said:
                    findings.add(ProofRule.OUTSIDE, said, reading, places.get(name, reading.main))


def _difference(name: str, actual: Sequence[str] | None, expected: Sequence[str] | None) -> str:
    if actual is None:
        return f"{name} is missing: the manifest lists it outside the schedule"
    if expected is None:
        return f"{name} is outside the schedule, but the manifest does not list it there"
    for number, (there, wanted) in enumerate(zip_longest(actual, expected, fillvalue="nothing")):
        if there != wanted:
            what = "@main returns" if name == RETURN_KEY else f"{name} takes"
            return f"{what} {there} as number {number}, but the manifest has {wanted}"
    return ""


def check_parts(
    readings: Sequence[RankReading],
    labels: MessageLabels,
    sums: Mapping[int, InSums],
    findings: RankFindings,
) -> None:
    """Checks M4 between ranks; `sums` has the sums of each rank."""
    sent: dict[int, tuple[Slot, ...]] = {}
    for reading, message in _behind(readings, labels):
        if message.operand is not None:
            sent[message.channel] = _sum_of(reading, sums[reading.rank], message.operand)
    dependences = {reading.rank: Dependences(reading.module) for reading in readings}
    for reading, message in _behind(readings, labels):
        if not message.is_send:
            part, rank = sent.get(message.channel, ()), reading.rank
            _check_added(reading, message, part, sums[rank], dependences[rank], findings)


def _behind(
    readings: Sequence[RankReading], labels: MessageLabels
) -> Iterator[tuple[RankReading, RankMessage]]:
    """Yields the messages after the schedule."""
    for reading in readings:
        known = labels.of_rank(reading)
        for message in reading.messages:
            label = known.get(message.index)
            if label is not None and label.action is None:
                yield reading, message


def _sum_of(reading: RankReading, sums: InSums, origin: Origin) -> tuple[Slot, ...]:
    """Returns the results of a rank's actions that form the sum that a value is.

    Returns () if the value is not a result of an action.
    """
    event = reading.events[origin.event] if origin.source is Source.CALL else None
    if not isinstance(event, RankCall) or event.action is None:
        return ()
    slot = Slot(event.function, origin.number)
    return next((chain for chain in sums.chains if slot in chain), (slot,))


def _check_added(
    reading: RankReading,
    message: RankMessage,
    part: tuple[Slot, ...],
    sums: InSums,
    dependences: Dependences,
    findings: RankFindings,
) -> None:
    (received,) = message.results
    for use in reading.origins.uses(received) if part else []:
        call = reading.events[use.event] if use.event >= 0 else None
        if not isinstance(call, RankCall):
            continue
        # Every op that reads the received part must also depend on this rank's own sum.
        own = {
            number
            for number, operand in enumerate(call.operands)
            if not set(part).isdisjoint(_sum_of(reading, sums, operand))
        }
        takers = dependences.takers(call.function, use.operand)
        if own and any(own.isdisjoint(taker) for taker in takers):
            said = (
                f"{reading.describe_event(message.index)} receives another rank's part of the sum, "
                f"result {part[0].number} of @{part[0].function}, but @{call.function} does not "
                "add it to this rank's part"
            )
            findings.add(ProofRule.SUMS, said, reading, call.op)
