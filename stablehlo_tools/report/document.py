"""The document that every view is made from: one or more timed programs, as plain data.

`to_json` is what `inspect --json` prints, without events and memory curve, and what the page of
`report` is drawn from, with them. Times are nanoseconds from the program's start, sizes bytes.
docs/inspect.md describes each field; `SCHEMA` grows when a field changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from stablehlo_tools.overlap.collective_times import CollectiveRow
from stablehlo_tools.report.pipeline_report import PipelineReport

SCHEMA = "stablehlo-tools/cost/1"


@dataclass(frozen=True, slots=True)
class LoopRow:
    """One loop; `trips` is None where the count is not known and one iteration was timed."""

    name: str
    trips: int | None
    ns: float
    period_ns: float  # of one iteration in the steady state
    depth: int  # of nesting, 0 outermost
    place: str


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Kernels of one name and place: how often they run, and how long all together."""

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
    """Something to do, and what it gains by itself: ns of the total, bytes of the memory peak.

    `share` is that of the total or of the device's memory, whichever is larger. `pipeline` is what
    `opt -p` takes to do it; None where only the user's code can.
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
    """What to do about a program, what gains most first: all that is `least` of it or more.

    `total_ns` is what the gains are of: the program as a compiler would order it. `modelled_ns` is
    what the model that gains are counted in has for that. `search` is the command that compiles
    several changes together; "" of a device that no compiler is for.
    """

    total_ns: float
    least: float
    items: tuple[Advice, ...]
    modelled_ns: float
    search: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A task on its stream. `collective` is a row's number, -1 for compute.

    `label` names what is drawn; `place` is the source line. `folded` > 0 marks a block that stands
    for so many further iterations of a loop that are not drawn one by one. `critical` marks the
    tasks of the critical path.
    """

    stream: int
    begin: float
    end: float
    label: str
    op: str
    place: str
    kind: str  # compute, collective, wait (the compute stream stands still), loop (folded)
    collective: int = -1
    folded: int = 0
    critical: bool = False


class Drawing(NamedTuple):
    """What a timeline is drawn of: the names of the streams that events are on by number, and
    (ns, bytes alive from then on)."""

    streams: tuple[str, ...]
    events: Sequence[Event]
    memory: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program, timed. `target` says whose schedule it is: "as written", "XLA:GPU", …"""

    name: str
    target: str
    hardware: str
    devices: int
    total_ns: float
    compute_ns: float
    communication_ns: float
    exposed_ns: float
    contended_ns: float  # in all, with what collectives take of compute beside them
    floor_ns: float
    floor_is: str  # "compute stream", "stream NVLink dp", "critical path"
    slot_floor_ns: float | None  # with one collective of a domain in flight, as XLA:GPU has them
    critical_path_ns: float
    peak_bytes: float
    capacity_bytes: float
    alive: tuple[Alive, ...]
    streams: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    loops: tuple[LoopRow, ...]
    kernels: tuple[KernelRow, ...] = ()  # those that take longest
    notes: tuple[str, ...] = ()
    pipelines: tuple[PipelineReport, ...] = ()
    advised: Advised | None = None  # None where nothing was asked
    events: Sequence[Event] = field(default=())
    memory: Sequence[tuple[float, float]] = field(default=())  # (ns, bytes alive from then on)
    # What makes the timeline where it was left out; None where it is there, or cannot be had.
    draw: Callable[[], Drawing] | None = field(default=None, compare=False, repr=False)

    def with_timeline(self) -> ProgramReport:
        """The report with its events and memory curve, where they were left out."""
        if self.draw is None:
            return self
        drawn = self.draw()
        return replace(
            self, streams=drawn.streams, events=drawn.events, memory=drawn.memory, draw=None
        )

    @property
    def other_waits_ns(self) -> float:
        """Of what is exposed, what is waited for that is no collective: copies, and kernels, of
        streams beside the compute stream."""
        return max(0.0, self.exposed_ns - sum(row.exposed_ns for row in self.collectives))

    @property
    def bounded_figures(self) -> dict[str, float]:
        """What `inspect --at-most` bounds, by name: `bytes` are those that all collectives move
        over all their runs."""
        return {
            "exposed_ns": self.exposed_ns,
            "bytes": sum(row.times * row.bytes for row in self.collectives),
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page, before the programs; `headings` are empty where there are none."""

    title: str
    hint: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """What a command found out, programs side by side: before and after, or several targets."""

    title: str
    version: str
    programs: tuple[ProgramReport, ...]
    sections: tuple[Section, ...] = ()

    def to_json(self, *, timeline: bool) -> dict[str, Any]:
        """Plain data, with the events and memory curves or without."""
        programs = [_plain(program) for program in self.programs]
        if not timeline:
            for program in programs:
                del program["events"], program["memory"]
        head = {"title": self.title, "version": self.version}
        return {"schema": SCHEMA, **head, "programs": programs}


def _plain(program: ProgramReport) -> dict[str, Any]:
    """The fields; those of pipelines where there are any, and of advice where it was sought."""
    fields = asdict(replace(program, pipelines=(), advised=None, draw=None))
    del fields["pipelines"], fields["advised"], fields["draw"]
    if program.advised is not None:
        fields["ordered_ns"] = program.advised.total_ns
        fields["advice"] = [asdict(item) for item in program.advised.items]
    if program.pipelines:
        fields["pipelines"] = [each.to_json() for each in program.pipelines]
    return fields
