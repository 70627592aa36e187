"""Plans of border exchanges: the elements of a divided dimension that each device needs.

A dimension of n elements over p devices is held in blocks of ceil(n / p). The elements of the last
blocks beyond n are padding, with undefined contents. An op that moves elements, or reads their
neighbours, needs another range on device d than the device's block:

    x[3:]            of 32 over 4     device d needs 8d + 3 up to 8d + 11 of x
    3 x 3 conv       of 32 over 4     device d needs 8d - 1 up to 8d + 9, zeros around 0 to 32
    concatenate      of a and b       some elements of a's blocks, some of b's

All of these are one problem: put a target, whose ranges may overlap, together from pieces of
sources. `plan` solves it with each device's own elements and with messages. A message is one slice
of a source's block that some devices send, each to one other device. Plans are pure numbers;
`halo_writing` writes them as ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class DimensionParts:
    """A dimension of `size` elements as devices hold it: device d has `length` places from
    `starts[d]` on. The contents of places before 0 or from `size` on are undefined."""

    size: int
    length: int
    starts: tuple[int, ...]

    @staticmethod
    def blocks(size: int, parts: int) -> DimensionParts:
        """Returns the blocks of ceil(size / parts) into which Shardy and XLA divide a dimension."""
        return DimensionParts.steps(size, -(-size // parts), parts)

    @staticmethod
    def steps(
        size: int, length: int, parts: int, step: int | None = None, start: int = 0
    ) -> DimensionParts:
        """Returns ranges of one length whose starts are `step` apart (default: the length)."""
        step = length if step is None else step
        return DimensionParts(size, length, tuple(start + step * d for d in range(parts)))

    def dilate_parts(self, step: int) -> DimensionParts:
        """Returns the parts after inserting step - 1 places after each place of a part."""
        size = (self.size - 1) * step + 1 if self.size else 0
        return DimensionParts(
            size, self.length * step, tuple(start * step for start in self.starts)
        )

    def reverse_parts(self) -> DimensionParts:
        """Returns the parts of the reversed dimension, if each device has reversed its own part."""
        starts = tuple(self.size - start - self.length for start in self.starts)
        return DimensionParts(self.size, self.length, starts)

    def defined_size(self, device: int) -> int:
        """Returns the number of places of a device's part that hold elements, if no part starts
        before 0."""
        return max(0, min(self.length, self.size - self.starts[device]))


@dataclass(frozen=True)
class HaloPiece:
    """`size` elements of a source from `start` on, at `place` of the target."""

    source: int
    start: int
    place: int
    size: int


@dataclass(frozen=True)
class HaloMessage:
    """A collective_permute of `size` elements of a part. Pair n of devices sends the elements from
    `offsets[n]` on."""

    source: int
    size: int
    pairs: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class PlacedRun:
    """Places `low` up to `high` of a target on one device, filled with elements `low + offset` and
    so on of a supply. A supply is a source's own part, a message (numbered after the sources) or
    the filling."""

    supply: int
    low: int
    high: int
    offset: int


FILLING = -1  # the supply that is a scalar


@dataclass(frozen=True)
class HaloPlan:
    """The messages and runs by which every device gets its range of a target. Places without a run
    have undefined contents."""

    target: DimensionParts
    messages: tuple[HaloMessage, ...]
    runs: tuple[tuple[PlacedRun, ...], ...]  # by device, in order of their places

    @property
    def sent(self) -> int:
        """The most elements that a device sends along this dimension."""
        return sum(message.size for message in self.messages)


@dataclass(frozen=True)
class _HaloTransfer:
    source: int
    sender: int
    receiver: int
    start: int  # in the sender's part
    place: int  # in the receiver's range
    size: int


# Cached, because the choices by cost ask for the same plans again and again.
@lru_cache(maxsize=4096)
def plan(
    sources: tuple[DimensionParts, ...],
    pieces: tuple[HaloPiece, ...],
    target: DimensionParts,
    fills: bool = False,
) -> HaloPlan:
    """Plans how to put a target together. With `fills`, places between the pieces get the filling;
    without it, their contents are undefined."""
    devices = range(len(target.starts))
    transfers = [t for d in devices for t in _needed_transfers(sources, pieces, target, d)]
    remote = [t for t in transfers if t.sender != t.receiver]
    sent = [
        (m, own) for k in range(len(sources)) for m, own in _messages(remote, k, sources[k].length)
    ]
    runs: list[list[PlacedRun]] = [[] for _ in devices]
    for t in transfers:
        if t.sender == t.receiver:
            end = t.place + t.size
            runs[t.receiver].append(PlacedRun(t.source, t.place, end, t.start - t.place))
    for number, (message, carried) in enumerate(sent):
        offsets = dict(zip(message.pairs, message.offsets, strict=True))
        for t in carried:
            offset = t.start - offsets[t.sender, t.receiver] - t.place
            runs[t.receiver].append(
                PlacedRun(len(sources) + number, t.place, t.place + t.size, offset)
            )
    if fills:
        for d in devices:
            runs[d] += list(_gaps(runs[d], target, d))
    ordered = tuple(tuple(sorted(each, key=lambda run: run.low)) for each in runs)
    return HaloPlan(target, tuple(message for message, _ in sent), ordered)


def _needed_transfers(
    sources: Sequence[DimensionParts],
    pieces: Sequence[HaloPiece],
    target: DimensionParts,
    device: int,
) -> Iterator[_HaloTransfer]:
    """Yields the transfers that supply the elements of a device's range."""
    first = target.starts[device]
    low, high = max(first, 0), min(first + target.length, target.size)
    for piece in pieces:
        begin, end = max(low, piece.place), min(high, piece.place + piece.size)
        shift = piece.start - piece.place
        for holder, start, stop in _held(sources[piece.source], begin + shift, end + shift):
            local = start - sources[piece.source].starts[holder]
            place = start - shift - first
            yield _HaloTransfer(piece.source, holder, device, local, place, stop - start)


def _held(parts: DimensionParts, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the devices that hold a range of elements, each with its part of the range."""
    # The starts of reversed parts descend.
    order = sorted(range(len(parts.starts)), key=lambda d: parts.starts[d])
    starts = [parts.starts[d] for d in order]
    at = max(bisect_right(starts, begin) - 1, 0)
    while begin < end and at < len(order):
        stop = min(end, starts[at] + parts.length)
        if stop > begin:
            yield order[at], begin, stop
            begin = stop
        at += 1


_Sent = tuple[HaloMessage, list[_HaloTransfer]]


def _messages(transfers: Sequence[_HaloTransfer], source: int, length: int) -> list[_Sent]:
    """Returns few messages that carry all transfers from a source, whose parts have one length.

    A message is the same slice of every sender's part. Slices with different offsets are used
    instead if they send less.
    """
    longest = sorted((t for t in transfers if t.source == source), key=lambda t: -t.size)
    fixed, free = (_rounds(longest, length, fixed=fixed) for fixed in (True, False))
    costs = [sum(message.size for message, _ in rounds) for rounds in (fixed, free)]
    return free if costs[1] < costs[0] else fixed


def _rounds(longest: Sequence[_HaloTransfer], length: int, *, fixed: bool) -> list[_Sent]:
    """Packs transfers, longest first, into messages by first fit. Each device sends, and receives,
    at most once in a message."""
    rounds: list[list[_HaloTransfer]] = []
    for t in longest:
        for taken in rounds:
            first = taken[0]
            inside = first.start <= t.start and t.start + t.size <= first.start + first.size
            alone = all(t.sender != u.sender and t.receiver != u.receiver for u in taken)
            if alone and (inside or not fixed):
                taken.append(t)
                break
        else:
            rounds.append([t])
    sent: list[_Sent] = []
    for taken in rounds:
        first, last = taken[0], length - taken[0].size
        offsets = tuple(first.start if fixed else min(t.start, last) for t in taken)
        pairs = tuple((t.sender, t.receiver) for t in taken)
        sent.append((HaloMessage(first.source, first.size, pairs, offsets), taken))
    return sent


def _gaps(runs: Sequence[PlacedRun], target: DimensionParts, device: int) -> Iterator[PlacedRun]:
    """Yields the places of a device's range that are in the target and get no element of a
    source."""
    first = target.starts[device]
    at, end = max(0, -first), min(target.length, target.size - first)
    for run in sorted(runs, key=lambda run: run.low):
        if at < run.low:
            yield PlacedRun(FILLING, at, run.low, 0)
        at = max(at, run.high)
    if at < end:
        yield PlacedRun(FILLING, at, end, 0)
