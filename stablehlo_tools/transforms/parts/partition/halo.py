"""Which elements of a divided dimension go to which device: plans of border exchanges.

A dimension of n elements over p devices is held in blocks of ceil(n / p); what the last blocks hold
beyond n is padding, and undefined. An op that moves elements, or looks at their neighbours, needs
on device d another range than the device's block:

    x[3:]            of 32 over 4     device d needs 8d + 3 up to 8d + 11 of x
    3 x 3 conv       of 32 over 4     device d needs 8d - 1 up to 8d + 9, zeros around 0 to 32
    concatenate      of a and b       some elements of a's blocks, some of b's

All of these are one question: a target whose ranges may overlap is put together from pieces of
sources. `plan` answers it by what each device has itself, and by messages: a message is one slice
of a source's block that some devices send, each to one other. Plans are pure numbers; `moving`
writes them as ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Parts:
    """A dimension of `size` elements as devices hold it: `length` places each, device d those from
    `starts[d]` on. Places before 0 or from `size` on hold nothing that is defined."""

    size: int
    length: int
    starts: tuple[int, ...]

    @staticmethod
    def blocks(size: int, parts: int) -> Parts:
        """As Shardy and XLA divide it: blocks of ceil(size / parts)."""
        return Parts.steps(size, -(-size // parts), parts)

    @staticmethod
    def steps(size: int, length: int, parts: int, step: int | None = None, start: int = 0) -> Parts:
        """Ranges of one length, each `step` (their length) behind the one before."""
        step = length if step is None else step
        return Parts(size, length, tuple(start + step * d for d in range(parts)))

    def spread(self, step: int) -> Parts:
        """With step - 1 places between neighbours, and behind the last place of a part."""
        size = (self.size - 1) * step + 1 if self.size else 0
        return Parts(size, self.length * step, tuple(start * step for start in self.starts))

    def reversed(self) -> Parts:
        """The elements in the opposite order, which each device has turned round in its part."""
        starts = tuple(self.size - start - self.length for start in self.starts)
        return Parts(self.size, self.length, starts)

    def defined(self, device: int) -> int:
        """How many places of a device's part hold elements, where parts start in order."""
        return max(0, min(self.length, self.size - self.starts[device]))


@dataclass(frozen=True)
class Piece:
    """`size` elements of a source from `start` on, at `place` of the target."""

    source: int
    start: int
    place: int
    size: int


@dataclass(frozen=True)
class Message:
    """What goes over the wire at once: `size` elements of a part, from `offsets[n]` on at the
    source of pair n."""

    source: int
    size: int
    pairs: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """On one device, places `low` up to `high` of its target are elements `low + offset` and so on
    of a supply: a source's own part, a message (numbered on from the sources), or the filling."""

    supply: int
    low: int
    high: int
    offset: int


FILLING = -1  # the supply that is one number


@dataclass(frozen=True)
class Plan:
    """How every device gets its range of a target; what no run names may be anything."""

    target: Parts
    messages: tuple[Message, ...]
    runs: tuple[tuple[Run, ...], ...]  # by device, in order of their places

    @property
    def sent(self) -> int:
        """How many elements a device sends at most, along this dimension."""
        return sum(message.size for message in self.messages)


@dataclass(frozen=True)
class _Transfer:
    source: int
    sender: int
    receiver: int
    start: int  # in the sender's part
    place: int  # in the receiver's range
    size: int


@lru_cache(maxsize=4096)
def plan(
    sources: tuple[Parts, ...], pieces: tuple[Piece, ...], target: Parts, fills: bool = False
) -> Plan:
    """How to put a target together. With `fills`, the places of the target between pieces get a
    filling; without, they may hold anything."""
    devices = range(len(target.starts))
    transfers = [t for d in devices for t in _needed(sources, pieces, target, d)]
    remote = [t for t in transfers if t.sender != t.receiver]
    sent = [
        (m, own) for k in range(len(sources)) for m, own in _messages(remote, k, sources[k].length)
    ]
    runs: list[list[Run]] = [[] for _ in devices]
    for t in transfers:
        if t.sender == t.receiver:
            end = t.place + t.size
            runs[t.receiver].append(Run(t.source, t.place, end, t.start - t.place))
    for number, (message, carried) in enumerate(sent):
        offsets = dict(zip(message.pairs, message.offsets, strict=True))
        for t in carried:
            offset = t.start - offsets[t.sender, t.receiver] - t.place
            runs[t.receiver].append(Run(len(sources) + number, t.place, t.place + t.size, offset))
    if fills:
        for d in devices:
            runs[d] += list(_gaps(runs[d], target, d))
    ordered = tuple(tuple(sorted(each, key=lambda run: run.low)) for each in runs)
    return Plan(target, tuple(message for message, _ in sent), ordered)


def _needed(
    sources: Sequence[Parts], pieces: Sequence[Piece], target: Parts, device: int
) -> Iterator[_Transfer]:
    """Where each element of a device's range comes from."""
    first = target.starts[device]
    low, high = max(first, 0), min(first + target.length, target.size)
    for piece in pieces:
        begin, end = max(low, piece.place), min(high, piece.place + piece.size)
        shift = piece.start - piece.place
        for holder, start, stop in _held(sources[piece.source], begin + shift, end + shift):
            local = start - sources[piece.source].starts[holder]
            place = start - shift - first
            yield _Transfer(piece.source, holder, device, local, place, stop - start)


def _held(parts: Parts, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The devices that hold a range of elements, and which of them."""
    order = sorted(range(len(parts.starts)), key=lambda d: parts.starts[d])
    starts = [parts.starts[d] for d in order]
    at = max(bisect_right(starts, begin) - 1, 0)
    while begin < end and at < len(order):
        stop = min(end, starts[at] + parts.length)
        if stop > begin:
            yield order[at], begin, stop
            begin = stop
        at += 1


_Sent = tuple[Message, list[_Transfer]]


def _messages(transfers: Sequence[_Transfer], source: int, length: int) -> list[_Sent]:
    """Few messages that carry all transfers from a source, of parts of one length: a message is the
    same slice of every sender's part, or slices of one size anywhere where that is less to send."""
    longest = sorted((t for t in transfers if t.source == source), key=lambda t: -t.size)
    fixed, free = (_rounds(longest, length, fixed=fixed) for fixed in (True, False))
    costs = [sum(message.size for message, _ in rounds) for rounds in (fixed, free)]
    return free if costs[1] < costs[0] else fixed


def _rounds(longest: Sequence[_Transfer], length: int, *, fixed: bool) -> list[_Sent]:
    """First fit: each round has a sender and a receiver once."""
    rounds: list[list[_Transfer]] = []
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
        sent.append((Message(first.source, first.size, pairs, offsets), taken))
    return sent


def _gaps(runs: Sequence[Run], target: Parts, device: int) -> Iterator[Run]:
    """The places of a device's range that lie in the target and get nothing from a source."""
    first = target.starts[device]
    at, end = max(0, -first), min(target.length, target.size - first)
    for run in sorted(runs, key=lambda run: run.low):
        if at < run.low:
            yield Run(FILLING, at, run.low, 0)
        at = max(at, run.high)
    if at < end:
        yield Run(FILLING, at, end, 0)
