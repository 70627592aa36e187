"""A set of rank programs as a trace that ui.perfetto.dev opens: a thread for each rank.

Slices are the phases of the schedule, arrows the messages between them, counters what each rank
holds of microbatches. Times are microseconds, of the costs that the set was made with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stablehlo_tools.mpmd.set_report import RankRow, SetReport
from stablehlo_tools.report.document import SCHEMA
from stablehlo_tools.report.schedule_gantt import NAMES, letter_of
from stablehlo_tools.schedules.table import Action, parts
from stablehlo_tools.schedules.validator import other_end

_PROCESS = 1


def set_trace(report: SetReport) -> dict[str, Any]:
    """The trace as plain data for `json.dump`."""
    events = [
        {**_of(_PROCESS), "ph": "M", "name": "process_name", "args": {"name": report.name}},
        *(event for row in report.ranks for event in _thread(report, row)),
        *_arrows(report),
    ]
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": report.name, "version": report.version, "schema": SCHEMA},
        "traceEvents": events,
    }


def _of(thread: int) -> dict[str, Any]:
    return {"pid": _PROCESS, "tid": thread}


def _tid(rank: int) -> int:
    return _PROCESS + 1 + rank


def _thread(report: SetReport, row: RankRow) -> Iterator[dict[str, Any]]:
    """The name of a rank, its phases, and its memory."""
    rank, timeline = row.rank, report.timeline
    of = _of(_tid(rank))
    yield {**of, "ph": "M", "name": "thread_name", "args": {"name": f"rank {rank}"}}
    yield {**of, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": rank}}
    rows = timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank]
    for step, start, end in zip(*rows, strict=True):
        if step is not None and end > start:
            said = {"phase": NAMES[letter_of(step)]}
            yield {
                **of, "ph": "X", "ts": start, "dur": end - start, "name": str(step),
                "cat": letter_of(step), "args": said,
            }  # fmt: skip
    for level in row.levels:
        if level.time is not None:
            name = f"held by rank {rank}"
            amount = {"bytes": round(level.held)}
            yield {**of, "ph": "C", "ts": level.time, "name": name, "args": amount}


def _arrows(report: SetReport) -> Iterator[dict[str, Any]]:
    """From the phase before each send to the phase behind its receive."""
    made: dict[Action, tuple[int, float]] = {}
    read: dict[Action, tuple[int, float]] = {}
    timeline = report.timeline
    for rank, row in enumerate(timeline.table.rows):
        ends, starts = timeline.ends[rank], timeline.starts[rank]
        for at, step in enumerate(row):
            for action in parts(step) if step is not None else ():
                if action.kind.is_compute:
                    continue
                if action.kind.is_send:
                    made[action] = (rank, ends[at])
                    continue
                behind = (i for i in range(at, len(row)) if timeline.ends[rank][i] > starts[i])
                reader = next(behind, None)
                if reader is not None:
                    read[action] = (rank, starts[reader])
    for number, (send, (rank, time)) in enumerate(made.items(), 1):
        target = read.get(other_end(send))
        if target is None:
            continue
        common = {"pid": _PROCESS, "cat": "message", "name": str(send), "id": number}
        yield {**common, "ph": "s", "tid": _tid(rank), "ts": time}
        end = max(time, target[1])
        yield {**common, "ph": "f", "bp": "e", "tid": _tid(target[0]), "ts": end}
