"""The Perfetto trace: well-formed, and as the JSON importer of Perfetto's trace processor asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import report_documents
from report_documents import Clock

from stablehlo_tools.report.document import Document
from stablehlo_tools.report.perfetto import perfetto_trace

EVERY_DOCUMENT = (
    report_documents.tiny,
    report_documents.before_after,
    report_documents.many_events,
    report_documents.hostile_names,
    report_documents.empty,
    report_documents.no_collectives,
    report_documents.unknown_trips,
)


def events(document: Document, phase: str) -> list[dict[str, Any]]:
    return [event for event in perfetto_trace(document)["traceEvents"] if event["ph"] == phase]


def whole_ns(microseconds: float) -> int:
    """The importer keeps whole nanoseconds; what is written must have no more."""
    ns = round(microseconds * 1e3)
    assert abs(microseconds * 1e3 - ns) < 1e-3
    return ns


@pytest.mark.parametrize("make", EVERY_DOCUMENT, ids=lambda make: make.__name__)
def test_is_what_the_importer_reads(make: Callable[[], Document]) -> None:
    document = make()
    trace = perfetto_trace(document)
    text = json.dumps(trace, allow_nan=False)
    assert json.loads(text) == trace
    # The reader streams: a unit after the first chunk of events comes too late.
    assert list(trace)[-1] == "traceEvents"
    assert trace["displayTimeUnit"] == "ns"
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXCsf"
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["pid"] > 0
        assert event["tid"] > 0
        if event["ph"] != "M":
            assert isinstance(event["ts"], float)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], float)
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())


@pytest.mark.parametrize("make", EVERY_DOCUMENT, ids=lambda make: make.__name__)
def test_slices_of_a_thread_lie_apart(make: Callable[[], Document]) -> None:
    """Slices that overlap without nesting are misplaced by the importer."""
    ends: dict[int, int] = {}
    for event in events(make(), "X"):
        begin = whole_ns(event["ts"])
        assert begin >= ends.get(event["tid"], 0)
        ends[event["tid"]] = begin + whole_ns(event["dur"])


def test_slices_shorter_than_a_nanosecond_lie_apart() -> None:
    clock = Clock()
    for index in range(50):
        clock.compute(f"task {index}", 0.37)
    end = 0
    for event in events(Document("short", "0.1.0", (clock.program("step"),)), "X"):
        begin = whole_ns(event["ts"])
        assert begin >= end
        end = begin + whole_ns(event["dur"])


def test_tasks_that_overlap_get_threads_of_their_own() -> None:
    clock = Clock()
    for begin in (0.0, 500.0, 1000.0):
        clock.now = begin
        clock.compute(f"at {begin}", 1000.0)
    document = Document("overlap", "0.1.0", (clock.program("step"),))
    slices = events(document, "X")
    assert slices[0]["tid"] == slices[2]["tid"] != slices[1]["tid"]
    names = [event for event in events(document, "M") if event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in names] == ["compute", "compute"]


def test_threads_of_all_processes_have_their_own_ids() -> None:
    """The importer keeps names of threads by their id alone."""
    document = report_documents.before_after()
    names = [event for event in events(document, "M") if event["name"] == "thread_name"]
    assert len({event["tid"] for event in names}) == len(names)
    assert [event["args"]["name"] for event in names] == [
        stream for program in document.programs for stream in program.streams
    ]
    processes = [event for event in events(document, "M") if event["name"] == "process_name"]
    assert not {event["pid"] for event in processes} & {event["tid"] for event in names}
    assert [event["args"]["name"] for event in processes] == [
        "before (as written, 8 × H100 SXM)",
        "after (XLA:GPU, 8 × H100 SXM)",
    ]
    order = [e["args"]["sort_index"] for e in events(document, "M") if "thread_sort" in e["name"]]
    assert order == [0, 1, 2, 3] * 2


def test_a_task_is_a_slice_with_what_is_known_of_it() -> None:
    slices = {event["name"]: event for event in events(report_documents.tiny(), "X")}
    sent = slices["grads"]
    assert (sent["ts"], sent["dur"]) == (2.0, 3.0)
    assert sent["cat"] == "collective"
    assert sent["args"] == {
        "op": "all_reduce",
        "place": "llama.py:88 in block",
        "collective": 0,
        "kind": "all_reduce",
        "bytes": 4 * 2**20,
        "dtype": "bf16",
        "groups": "[[0..7]]",
        "axes": "data",
        "algorithm": "ring",
        "runs": 1,
        "ns of all runs": 3000.0,
        "exposed ns of all runs": 2000.0,
        "hidden by": "second",
    }
    assert slices["second"]["args"] == {"op": "dot_general", "place": "llama.py:101 in attention"}


def test_folded_iterations_are_one_slice() -> None:
    folded = [e for e in events(report_documents.before_after(), "X") if e["cat"] == "loop"]
    assert {event["name"] for event in folded} == {"layers × 29 more iterations"}
    assert all(event["args"]["folded iterations"] == 29 for event in folded)


def test_memory_is_a_counter() -> None:
    curve = [(e["ts"], e["args"]["bytes"]) for e in events(report_documents.tiny(), "C")]
    gib = 2**30
    assert curve == [(0.0, 1 * gib), (2.0, 3 * gib), (5.0, 2 * gib)]


@pytest.mark.parametrize("make", EVERY_DOCUMENT, ids=lambda make: make.__name__)
def test_arrows_lead_from_a_collective_into_its_wait(make: Callable[[], Document]) -> None:
    """The importer binds both ends to the slice that is open then on the thread."""
    document = make()
    slices = events(document, "X")
    starts = {event["id"]: event for event in events(document, "s")}
    ends = {event["id"]: event for event in events(document, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(events(document, "s"))
    waits = [event for event in slices if event["cat"] == "wait" and event["dur"]]
    assert len(starts) == len(waits)
    by_thread: dict[int, list[dict[str, Any]]] = {}
    for event in slices:
        by_thread.setdefault(event["tid"], []).append(event)

    def around(end: dict[str, Any]) -> dict[str, Any]:
        [found] = [
            event
            for event in by_thread[end["tid"]]
            if event["ts"] <= end["ts"] < event["ts"] + event["dur"]
        ]
        return found

    for number in list(starts)[:300]:
        start, end = starts[number], ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert around(start)["cat"] == "collective"
        assert around(end)["cat"] == "wait"
        assert around(start)["args"]["collective"] == around(end)["args"]["collective"]


def test_arrow_starts_at_the_run_that_is_waited_for() -> None:
    """In a loop the next run may be under way when the wait for the one before begins."""
    clock = Clock()
    number = clock.collective("all_gather", "weights", "NVLink", 1.0)
    clock.send(number, 5000.0)
    clock.compute("layer", 1000.0)
    flying = clock._flying.pop(number)  # pyright: ignore[reportPrivateUsage]
    clock.send(number, 5000.0)
    clock._flying[number] = flying  # pyright: ignore[reportPrivateUsage]
    clock.compute("layer", 1000.0)
    clock.wait(number)
    clock.compute("layer", 9000.0)
    document = Document("ahead", "0.1.0", (clock.program("step"),))
    [start], [end] = events(document, "s"), events(document, "f")
    assert (start["ts"], end["ts"]) == (0.0, 2.0)
