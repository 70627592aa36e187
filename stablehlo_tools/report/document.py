"""Defines the document that every view renders: one or more timed programs, as plain data.

`inspect --json` prints `to_json` without events and memory curve; the page of `report` embeds it
with them. Times are nanoseconds from the program's start, sizes bytes. The page of
`inspect` describes each field. `SCHEMA` changes when a field changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from stablehlo_tools.overlap.collective_times import CollectiveRow
from stablehlo_tools.report.pipeline_report import PipelineReport

SCHEMA = "stablehlo-tools/cost/1"


@dataclass(frozen=True, slots=True)
class LoopRow:
    """One loop; `trips` is None if unknown, and then one iteration was timed."""

    name: str
    trips: int | None
    ns: float
    period_ns: float  # of one iteration in the steady state
    depth: int  # of nesting, 0 outermost
    place: str


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The kernels of one name and place: number of runs, and time of all runs."""

    name: str
    times: int
    ns: float
    place: str


@dataclass(frozen=True, slots=True)
class Alive:
    """A storage that is alive at the memory peak."""

    name: str
    bytes: float
    place: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and its gain by itself: ns of the total, bytes of the memory peak.

    `share` is of the total or of the device's memory, the larger. `pipeline` is the pass pipeline
    for `opt -p`; None if the user has to change the code.
    """

    id: str  # of the cause
    gain_ns: float
    gain_bytes: float
    share: float
    cause: str
    place: str
    remedy: str
    pipeline: str | None


@dataclass(frozen=True, slots=True)
class Advised:
    """The advice for a program: items with a share of at least `least`, largest gain first.

    Gains are of `total_ns`, the time of the program in a compiler's order. `modelled_ns` is that
    time by the model that computes the gains. `search` is the command that compiles combinations
    of changes; "" if no compiler targets the device.
    """

    total_ns: float
    least: float
    items: tuple[Advice, ...]
    modelled_ns: float
    search: str = ""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A task on its stream. `collective` is a row's number, -1 for compute.

    `label` is the text to draw; `place` is the source line. With `folded` > 0 it is a block for
    that many further iterations of a loop. `critical` marks the tasks of the critical path.
    """

    stream: int
    begin: float
    end: float
    label: str
    op: str
    place: str
    kind: str  # compute, collective, wait (the compute stream waits), loop (folded)
    collective: int = -1
    folded: int = 0
    critical: bool = False


class Band(NamedTuple):
    """A phase (level 0) or a layer (level 1) of a program, from `begin` to `end` ns."""

    begin: float
    end: float
    label: str
    level: int


class TimelineDrawing(NamedTuple):
    """The data of a timeline: names of the streams by number, events, bands and memory steps.

    A memory step is (ns, bytes alive from then on).
    """

    streams: tuple[str, ...]
    events: Sequence[TimelineEvent]
    bands: Sequence[Band]
    memory: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One timed program. `target` names the schedule: "as written", "XLA:GPU", …"""

    name: str
    target: str
    hardware: str
    devices: int
    total_ns: float
    compute_ns: float
    communication_ns: float
    exposed_ns: float
    contended_ns: float  # total, with the compute slowed down by collectives that run beside it
    floor_ns: float
    floor_is: str  # "compute stream", "stream NVLink dp", "critical path"
    slot_floor_ns: float | None  # with one collective per domain in flight, as on XLA:GPU
    critical_path_ns: float
    peak_bytes: float
    capacity_bytes: float
    alive: tuple[Alive, ...]
    streams: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    loops: tuple[LoopRow, ...]
    kernels: tuple[KernelRow, ...] = ()  # those with the longest time
    notes: tuple[str, ...] = ()
    pipelines: tuple[PipelineReport, ...] = ()
    advised: Advised | None = None  # None if not requested
    events: Sequence[TimelineEvent] = field(default=())
    bands: Sequence[Band] = field(default=())
    memory: Sequence[tuple[float, float]] = field(default=())  # (ns, bytes alive from then on)
    peak_parts: Mapping[str, float] = field(default_factory=dict[str, float])  # bytes by purpose
    # Computes the timeline if it was left out; None if it is here, or not available.
    draw: Callable[[], TimelineDrawing] | None = field(default=None, compare=False, repr=False)

    def with_timeline(self) -> ProgramReport:
        """Returns the report with its events and memory curve, computing them if left out."""
        if self.draw is None:
            return self
        return replace(self, **self.draw()._asdict(), draw=None)

    @property
    def other_waits_ns(self) -> float:
        """The exposed time that is not for collectives: copies and kernels of other streams."""
        return max(0.0, self.exposed_ns - sum(row.exposed_ns for row in self.collectives))

    @property
    def bounded_figures(self) -> dict[str, float]:
        """The figures that `inspect --at-most` bounds, by name.

        `bytes` are those that all collectives move in all runs.
        """
        return {
            "exposed_ns": self.exposed_ns,
            "bytes": sum(row.times * row.bytes for row in self.collectives),
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page, before the programs; `headings` may be empty.

    `drawing` is an SVG picture below the table."""

    title: str
    hint: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    drawing: str = ""


class CandidatePoint(NamedTuple):
    """A candidate of a search in the chart of time against memory."""

    total_ns: float
    peak_bytes: float
    label: str


@dataclass(frozen=True, slots=True)
class Document:
    """The results of a command, with programs to compare: before and after, or several targets.

    `candidates`: those of a search, the export first (None without one) and the answer second."""

    title: str
    version: str
    programs: tuple[ProgramReport, ...]
    sections: tuple[Section, ...] = ()
    candidates: tuple[CandidatePoint | None, ...] = ()

    def to_json(self, *, timeline: bool) -> dict[str, Any]:
        """Returns plain data, with or without the events and memory curves."""
        programs = [_plain(program) for program in self.programs]
        if not timeline:
            for program in programs:
                del program["events"], program["bands"], program["memory"]
        head = {"title": self.title, "version": self.version}
        return {"schema": SCHEMA, **head, "programs": programs}


def _plain(program: ProgramReport) -> dict[str, Any]:
    """Returns the fields as plain data; without pipelines and advice if there are none."""
    fields = asdict(replace(program, pipelines=(), advised=None, draw=None))
    del fields["pipelines"], fields["advised"], fields["draw"]
    if program.advised is not None:
        fields["ordered_ns"] = program.advised.total_ns
        fields["advice"] = [asdict(item) for item in program.advised.items]
    if program.pipelines:
        fields["pipelines"] = [each.to_json() for each in program.pipelines]
    return fields
