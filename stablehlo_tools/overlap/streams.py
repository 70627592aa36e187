"""What is in flight on the streams of a device, and how transfers share a link.

A stream runs its transfers one after the other in issue order. A link carries the transfers at the
head of several streams at once: each gets an equal share of it, and a transfer that crosses several
links moves at the pace of its slowest. The latency of a transfer occupies no link.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

LATENCY = ": latency"  # what follows a stream's name where the latency at its head is meant
_NOT_YET = float("inf")


@dataclass(slots=True, eq=False)
class Flight:
    """One collective, or one bucket of them, from its issue to its end.

    `hidden` is how long each compute task ran meanwhile, or the compute stream waited for another
    transfer, by the name that the task or the wait is shown under. `stall` is how long the compute
    stream stood still in the waits for this one; of that, what it stood still while an earlier
    transfer of the same stream was in flight is `exposed` of the earlier one.
    """

    starts: tuple[int, ...]  # tasks
    stream: str
    ns: float
    latency_ns: float
    links: tuple[str, ...] = ()
    begin: float = _NOT_YET
    end: float = _NOT_YET
    stall: float = 0.0
    exposed: float = 0.0
    hidden: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Head:
    """The transfer at the head of a stream: its latency ends at `ready`, then `left` ns remain."""

    flight: Flight
    ready: float
    left: float


class Streams:
    """The communication streams of one device.

    `users` says which streams use each link; links of one stream alone are never shared, so the
    end of a transfer on those is known as it is issued.
    """

    def __init__(self, users: Mapping[str, frozenset[str]]) -> None:
        self._contended = {s for streams in users.values() if len(streams) > 1 for s in streams}
        self._free: dict[str, float] = {}
        self._now = 0.0
        self._heads: dict[str, _Head] = {}
        self._queues: dict[str, deque[Flight]] = {}
        self._open: dict[str, deque[Flight]] = {}  # not known to be over, in issue order

    def issue(self, flight: Flight, clock: float) -> None:
        """Puts a flight at the end of its stream's queue."""
        stream = flight.stream
        self._open.setdefault(stream, deque()).append(flight)
        if stream not in self._contended:
            flight.begin = max(clock, self._free.get(stream, 0.0))
            flight.end = self._free[stream] = flight.begin + flight.ns
            return
        self._advance(clock)
        self._queues.setdefault(stream, deque()).append(flight)
        if stream not in self._heads:
            self._next(stream)

    def end_of(self, flight: Flight, clock: float) -> float:
        """When a flight ends, if nothing else is issued before that."""
        if flight.end == _NOT_YET:
            self._advance(clock)
            while flight.end == _NOT_YET:
                self._step(_NOT_YET)
        return flight.end

    def stall(self, flight: Flight, name: str, begin: float, end: float) -> None:
        """Notes that the compute stream stood still in this interval, waiting for a flight.

        What is in flight before it on its stream is exposed; on other streams it is hidden.
        """
        flight.stall += end - begin
        in_flight = self.hide(name, begin, end, flight.stream)
        flight.exposed += end - begin - in_flight

    def hide(self, name: str, begin: float, end: float, stalled: str | None = None) -> float:
        """Notes what went on in this interval under whatever is in flight.

        On the stream that the compute stream stands still for, `stalled`, that is exposed; the
        result is for how long.
        """
        exposed = 0.0
        if self._contended:
            self._advance(end)
        for stream, queue in self._open.items():
            while queue and queue[0].end <= begin:
                queue.popleft()
            for flight in queue:
                if flight.begin >= end:
                    break
                overlap = min(end, flight.end) - max(begin, flight.begin)
                if overlap > 0 and stream == stalled:
                    flight.exposed += overlap
                    exposed += overlap
                elif overlap > 0:
                    flight.hidden[name] = flight.hidden.get(name, 0.0) + overlap
        return exposed

    def drain(self) -> float:
        """Lets everything end; when the last transfer does."""
        while self._heads:
            self._step(_NOT_YET)
        return max([0.0, *self._free.values()])

    def shares_links(self, stream: str) -> bool:
        """Whether another stream uses a link of this one."""
        return stream.removesuffix(LATENCY) in self._contended

    def backlog(self, clock: float) -> dict[str, float]:
        """What later transfers have to wait for on each stream, in ns from the clock."""
        if self._contended:
            self._advance(clock)
        backlog = {stream: max(0.0, free - clock) for stream, free in self._free.items()}
        for stream, head in self._heads.items():
            waiting = sum(flight.ns for flight in self._queues[stream])
            backlog[f"{stream}{LATENCY}"] = max(0.0, head.ready - clock)
            backlog[stream] = head.left + waiting
        return backlog

    def shift(self, clock: float, delta: float, grown: Mapping[str, float]) -> None:
        """Moves whatever is under way at `clock` by so much, as if time had been left out.

        `grown` is by how much the backlog of streams has grown in that time.
        """
        for stream, free in self._free.items():
            if free > clock:
                self._free[stream] = free + delta + grown.get(stream, 0.0)
        self._now += delta
        for stream, head in self._heads.items():
            head.ready += delta
            head.left = max(0.0, head.left + grown.get(stream, 0.0))

    def _next(self, stream: str) -> None:
        """The next transfer of a stream comes to its head."""
        queue = self._queues[stream]
        if not queue:
            self._heads.pop(stream, None)
            return
        flight = queue.popleft()
        flight.begin = max(self._now, self._free.get(stream, 0.0))
        ready = flight.begin + flight.latency_ns
        self._heads[stream] = _Head(flight, ready, flight.ns - flight.latency_ns)

    def _advance(self, to: float) -> None:
        while self._now < to and self._heads:
            self._step(to)
        self._now = max(self._now, to)

    def _step(self, limit: float) -> None:
        """Goes on to the next change of any head, or to the limit."""
        now = self._now
        heads = list(self._heads.items())
        moving = [head for _, head in heads if head.ready <= now]
        load = Counter(link for head in moving for link in head.flight.links)
        paces = [
            1.0 / max([1, *(load[link] for link in head.flight.links)])
            if head.ready <= now
            else 0.0
            for _, head in heads
        ]
        changes = [
            now + head.left / pace if pace else head.ready
            for (_, head), pace in zip(heads, paces, strict=True)
        ]
        then = self._now = min(limit, *changes)
        for (stream, head), pace, change in zip(heads, paces, changes, strict=True):
            if pace and change <= then:
                head.flight.end = self._free[stream] = then
                self._next(stream)
            elif pace:
                head.left -= (then - now) * pace
