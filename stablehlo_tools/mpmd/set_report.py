"""The data of reports on a set of rank programs."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.schedules.table_simulator import Timeline


@dataclass(frozen=True)
class RankMemoryLevel:
    """The bytes held for microbatches after an action or a message, and the schedule's bound.

    `time` is the end of the schedule's phase in microseconds; None for events that take no time.
    """

    behind: str
    held: float
    bound: float
    time: float | None


@dataclass(frozen=True)
class RankRow:
    """The program of a rank: its counts of actions and messages, and its memory in bytes.

    `held` and `bound` are the maxima of the levels. `peak` is the most that is live at once,
    including `arguments` and the temporaries of functions. `limit` is its upper bound while `held`
    is within the bound. `weights` are those that the schedule counts. All of these are 0 if the set
    is not proven.
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
    levels: tuple[RankMemoryLevel, ...] = ()


@dataclass(frozen=True)
class RankLink:
    """The messages from one rank to another, in and after the schedule; bytes are per device."""

    source: int
    target: int
    scheduled: int
    scheduled_bytes: float
    finish: int
    finish_bytes: float


@dataclass(frozen=True)
class SetReport:
    """A set of rank programs: its schedule as read back, timed in microseconds, and its proof.

    `ranks` have no levels if the set is not proven, or if they were not requested.
    """

    name: str
    version: str
    source: str
    hardware: str
    devices: int
    timeline: Timeline
    ranks: tuple[RankRow, ...]
    links: tuple[RankLink, ...]
    findings: tuple[str, ...]
    finding_count: int

    @property
    def is_proven(self) -> bool:
        """True if no rule is broken."""
        return not self.finding_count

    @property
    def messages(self) -> int:
        """The number of tensors that are sent between ranks."""
        return sum(link.scheduled + link.finish for link in self.links)

    @property
    def bytes(self) -> float:
        """The bytes of all messages, of one device of each rank."""
        return sum(link.scheduled_bytes + link.finish_bytes for link in self.links)
