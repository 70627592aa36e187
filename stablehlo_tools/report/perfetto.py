"""Renders timelines as a trace in the JSON trace event format, for ui.perfetto.dev.

A program is a process, a stream a thread, the memory curve a counter. An arrow points from each
collective to the wait for it. Source of the format: "Trace Event Format", Google, 2016. Comments
about the reader describe Perfetto's trace processor (importers/json).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from stablehlo_tools.overlap.collective_times import CollectiveRow
from stablehlo_tools.report.document import SCHEMA, Document, ProgramReport, TimelineEvent

# The reader has one table of thread ids for all processes, so that ids must be unique across them.
# It treats the thread with the process's id as the main thread.
_IDS_OF_A_PROCESS = 1_000


def perfetto_trace(document: Document) -> dict[str, Any]:
    """Returns the trace as plain data for `json.dump`.

    Times are microseconds, rounded to whole nanoseconds as in the reader. `displayTimeUnit` comes
    before the events because the reader streams.
    """
    events: list[dict[str, Any]] = []
    flows = count(1)
    for index, program in enumerate(document.programs):
        process = _TraceProcess(program, 1 + index * _IDS_OF_A_PROCESS)
        events += process.names(index)
        events += process.slices()
        events += process.arrows(flows)
        events += process.memory()
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": document.title, "version": document.version, "schema": SCHEMA},
        "traceEvents": events,
    }


class _TraceProcess:
    """The trace events of one program."""

    def __init__(self, program: ProgramReport, pid: int) -> None:
        self._program = program
        self._pid = pid
        self._rows = {row.number: row for row in program.collectives}
        self._events = sorted(program.events, key=lambda event: (event.begin, event.end))
        self._threads, self._tids = _threads(self._events, len(program.streams), pid)

    def names(self, index: int) -> Iterator[dict[str, Any]]:
        """Yields the names of the process and its threads, and their order on the screen."""
        program = self._program
        of_process = {"ph": "M", "pid": self._pid, "tid": self._pid}
        named = f"{program.name} ({program.target}, {program.hardware})"
        yield {**of_process, "name": "process_name", "args": {"name": named}}
        yield {**of_process, "name": "process_sort_index", "args": {"sort_index": index}}
        for place, (tid, stream) in enumerate(self._threads):
            of_thread = {"ph": "M", "pid": self._pid, "tid": tid}
            name = {"name": program.streams[stream]}
            yield {**of_thread, "name": "thread_name", "args": name}
            yield {**of_thread, "name": "thread_sort_index", "args": {"sort_index": place}}

    def slices(self) -> Iterator[dict[str, Any]]:
        """Yields one complete event for each task."""
        for event in self._events:
            begin = _whole_ns(event.begin)
            folded = f" × {event.folded} more iterations" if event.folded else ""
            yield {
                "ph": "X",
                "pid": self._pid,
                "tid": self._tids[id(event)],
                "ts": begin / 1e3,
                "dur": (_whole_ns(event.end) - begin) / 1e3,
                "name": event.label + folded,
                "cat": event.kind,
                "args": _args(event, self._rows.get(event.collective)),
            }

    def arrows(self, flows: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Yields flow events from a collective's begin to each wait for it of nonzero length."""
        sends = _by_collective(self._events, "collective")
        for number, waits in _by_collective(self._events, "wait").items():
            runs = sends.get(number, [])  # sorted by begin
            for wait in waits:
                # The run with the end nearest to the wait's. It must begin before the wait ends: in
                # a loop, later runs may have started.
                at = bisect_right(runs, _whole_ns(wait.end) - 1, key=lambda e: _whole_ns(e.begin))
                send = min(reversed(runs[:at]), key=lambda e: abs(e.end - wait.end), default=None)
                if send is None:
                    continue
                common = {"pid": self._pid, "cat": "wait", "name": "waits for", "id": next(flows)}
                begin = _whole_ns(send.begin)
                # An arrow must not point back in time, and must end inside the wait.
                end = max(begin, _whole_ns(wait.begin))
                start, arrival = self._tids[id(send)], self._tids[id(wait)]
                yield {**common, "ph": "s", "tid": start, "ts": begin / 1e3}
                yield {**common, "ph": "f", "bp": "e", "tid": arrival, "ts": end / 1e3}

    def memory(self) -> Iterator[dict[str, Any]]:
        """Yields the memory curve as a counter of the process."""
        for ns, size in self._program.memory:
            yield {
                "ph": "C",
                "pid": self._pid,
                "tid": self._pid,
                "ts": _whole_ns(ns) / 1e3,
                "name": "memory",
                "args": {"bytes": round(size)},
            }


def _threads(
    events: Sequence[TimelineEvent], streams: int, pid: int
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Returns the threads as (id, stream), and the thread of each event by the event's `id`.

    A stream is one thread. If a task begins before the end of another one, it gets a second thread.
    The reader requires slices of a thread to nest or be disjoint. `events` are sorted by begin.
    """
    free: list[list[int]] = [[0] for _ in range(streams)]  # when the threads of a stream are free
    places: list[tuple[TimelineEvent, int]] = []
    for event in events:
        threads = free[event.stream]
        begin, end = _whole_ns(event.begin), _whole_ns(event.end)
        thread = next((at for at, time in enumerate(threads) if time <= begin), len(threads))
        threads[thread : thread + 1] = [end]
        places.append((event, thread))
    first = [pid + 1 + sum(map(len, free[:stream])) for stream in range(streams)]
    threads = [
        (first[stream] + thread, stream)
        for stream, ends in enumerate(free)
        for thread in range(len(ends))
    ]
    return threads, {id(event): first[event.stream] + thread for event, thread in places}


def _whole_ns(ns: float) -> int:
    """Rounds both ends of a task instead of its length, so that neighbours do not overlap."""
    return round(ns)


def _by_collective(events: Sequence[TimelineEvent], kind: str) -> dict[int, list[TimelineEvent]]:
    """Returns the events of a kind by collective, without those of zero length."""
    events_of: dict[int, list[TimelineEvent]] = {}
    for event in events:
        shown = _whole_ns(event.end) > _whole_ns(event.begin)
        if event.kind == kind and event.collective >= 0 and shown:
            events_of.setdefault(event.collective, []).append(event)
    return events_of


def _args(event: TimelineEvent, row: CollectiveRow | None) -> dict[str, Any]:
    args: dict[str, Any] = {"op": event.op, "place": event.place}
    if event.folded:
        args["folded iterations"] = event.folded
    if event.critical:
        args["critical path"] = True
    if row is not None:
        args |= {
            "collective": row.number,
            "kind": row.kind,
            "bytes": _figure(row.bytes),
            "dtype": row.dtype,
            "groups": row.groups,
            "axes": ", ".join(row.axes),
            "algorithm": row.algorithm,
            "runs": row.times,
            "ns of all runs": _figure(row.ns),
            "exposed ns of all runs": _figure(row.exposed_ns),
            "hidden by": ", ".join(by.name for by in row.hidden_by),
        }
    return args


def _figure(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
