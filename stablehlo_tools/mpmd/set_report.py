"""What the reports of a set of rank programs show, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.schedules.simulator import Timeline


@dataclass(frozen=True)
class Level:
    """What a rank holds of microbatches behind an action or a message, and the schedule's bound.

    Bytes. `time` is when a phase of the schedule ends, in microseconds; None behind what takes no
    time of its rank.
    """

    behind: str
    held: float
    bound: float
    time: float | None


@dataclass(frozen=True)
class RankRow:
    """A rank's program: what it does, and its memory in bytes.

    `held` and `bound` are the most of the levels, `peak` all that is alive at once, `arguments` and
    the temporaries of functions included, and `limit` what it cannot exceed while the bound holds.
    `weights` are those that the schedule counts. All of these are known of a proven set only.
    """

    rank: int
    stages: tuple[int, ...]
    what: tuple[str, ...]
    actions: int
    sends: int
    receives: int
    held: float = 0.0
    bound: float = 0.0
    peak: float = 0.0
    peak_at: str = ""
    limit: float = 0.0
    weights: float = 0.0
    arguments: float = 0.0
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Link:
    """The messages from a rank to another: of the schedule, and behind it; bytes of a device."""

    source: int
    target: int
    scheduled: int
    scheduled_bytes: float
    finish: int
    finish_bytes: float


@dataclass(frozen=True)
class SetReport:
    """A set of rank programs: its schedule as read back, timed in microseconds, and its proof.

    `ranks` have no levels where the set is not proven, or nobody asked for them.
    """

    name: str
    version: str
    source: str
    hardware: str
    devices: int
    timeline: Timeline
    ranks: tuple[RankRow, ...]
    links: tuple[Link, ...]
    findings: tuple[str, ...]
    finding_count: int

    @property
    def is_proven(self) -> bool:
        """Whether no rule is broken."""
        return not self.finding_count

    @property
    def messages(self) -> int:
        """The tensors that go between ranks."""
        return sum(link.scheduled + link.finish for link in self.links)

    @property
    def bytes(self) -> float:
        """Their bytes, of one device of each rank."""
        return sum(link.scheduled_bytes + link.finish_bytes for link in self.links)
