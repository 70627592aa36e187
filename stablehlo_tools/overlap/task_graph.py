"""A program as tasks: compute, collective starts, waits and views, with dependences and storages.

The tasks of a graph are in issue order: the text order of a schedule, or that of an exported
program. A loop is one task that holds the graph of its body.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from stablehlo_tools.cost.contention import NONE, Contention
from stablehlo_tools.cost.hardware import HostLink
from stablehlo_tools.dialect.communication_kinds import MEETINGS

COMPUTE_STREAM = "compute"
COLLECTIVES = frozenset(MEETINGS)
_HOST_DOMAIN = "host"  # compilers do not count copies among the collectives in flight


class TaskKind(enum.Enum):
    """The kind of a task, which decides the stream that it runs on."""

    INPUT = "input"
    COMPUTE = "compute"
    VIEW = "view"
    COLLECTIVE_START = "collective_start"
    WAIT = "wait"
    OUTPUT = "output"
    LOOP = "loop"


@dataclass(frozen=True, slots=True)
class Communication:
    """The transfer of a collective start; `kind` is one of COLLECTIVES.

    Compilers also run other asynchronous work, copies between memories and whole kernels; those
    have other kinds.

    `stream` is the queue that it is issued to: collectives of one stream run one after the other.
    `links` carry it; transfers in flight on a common link share its bandwidth. `latency_ns` is the
    part of the task's `ns` that a bucket pays once and that does not occupy the links. `domain` is
    the communication domain: a compiler's scheduler limits the transfers in flight per domain.
    """

    kind: str
    stream: str
    bytes: float
    latency_ns: float = 0.0
    links: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    axes: tuple[str, ...] = ()
    dtype: str = ""
    reduction: str | None = None
    algorithm: str = ""
    domain: str = ""
    contention: Contention = NONE

    @property
    def is_collective(self) -> bool:
        """True if other devices take part."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True, slots=True)
class TaskLoop:
    """The body of a loop and its iterations; `trips` is None if their number is not known.

    A wait in the body whose start is in `carried` waits for that start of the previous iteration.
    `carries` are pairs of tasks of the body: an input, and the task that yields its next value.
    `order` holds every task of the body once, if an iteration issues them in another order than the
    body's. `buckets` are collective starts that are consecutive and run as one.
    """

    body: TaskGraph
    trips: int | None
    carried: frozenset[int] = frozenset()
    carries: tuple[tuple[int, int], ...] = ()
    order: tuple[int, ...] | None = None
    buckets: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def from_trips(
        body: TaskGraph,
        trips: int | None,
        mean: float | None,
        carried: frozenset[int] = frozenset(),
        carries: tuple[tuple[int, int], ...] = (),
    ) -> TaskLoop:
        """Returns a loop with `trips` iterations, or `mean` on average if `trips` is None.

        A mean is rounded up, and the times of an iteration are scaled down accordingly.
        """
        if trips is not None or mean is None:
            return TaskLoop(body, trips, carried, carries)
        most = max(1, ceil(mean))
        return TaskLoop(body.scale_ns(mean / most), most, carried, carries)


@dataclass(frozen=True, slots=True)
class Task:
    """One task; its id is its index in the graph.

    `deps` are the tasks whose results it reads. `storages` are the storages of its result, `allocs`
    those of them that it allocates (indices into the graph's storages). `start` is the start that a
    wait waits for. `persistent` inputs are kept to the end. `by_bytes` names an operation that is
    timed only by its bytes, because its computation is not known. `shares` are the times of a
    kernel's operations and of its memory accesses alone, as shares of its time.
    """

    id: int
    kind: TaskKind
    ns: float = 0.0
    deps: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    allocs: tuple[int, ...] = ()
    start: int | None = None
    persistent: bool = False
    communication: Communication | None = None
    loop: TaskLoop | None = None
    name: str = ""
    op: str = ""
    place: str = ""
    by_bytes: str = ""
    shares: tuple[float, float] = (0.0, 0.0)

    def scale_ns(self, factor: float) -> Task:
        """Returns the task with its ns multiplied by a factor."""
        if factor == 1.0:
            return self
        sent, loop = self.communication, self.loop
        if sent is not None:
            sent = replace(sent, latency_ns=sent.latency_ns * factor)
        if loop is not None:
            loop = replace(loop, body=loop.body.scale_ns(factor))
        return replace(self, ns=self.ns * factor, communication=sent, loop=loop)

    @property
    def needs(self) -> tuple[int, ...]:
        """The tasks that it depends on: those it reads and, for a wait, its start."""
        return self.deps if self.start is None else (self.start, *self.deps)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in issue order and the bytes of each storage."""

    tasks: Sequence[Task]
    storages: Sequence[float] = field(default=())

    def users(self) -> list[list[int]]:
        """The tasks that read each task's results."""
        return users_of([task.deps for task in self.tasks])

    def scale_ns(self, factor: float) -> TaskGraph:
        """Returns the graph with all ns multiplied by a factor, also in the bodies of loops."""
        return replace(self, tasks=[task.scale_ns(factor) for task in self.tasks])

    def walk(self) -> Iterator[TaskGraph]:
        """Yields this graph and the bodies of its loops, outer ones first."""
        yield self
        for task in self.tasks:
            if task.loop is not None:
                yield from task.loop.body.walk()


def users_of(needs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tasks that need each task, in order; `needs` are the tasks that each one needs."""
    users: list[list[int]] = [[] for _ in needs]
    for task, needed in enumerate(needs):
        for dep in needed:
            users[dep].append(task)
    return users


def host_copy(size: float, link: HostLink, *, to_host: bool) -> tuple[Communication, float]:
    """Returns an asynchronous copy of `size` bytes to or from the host's memory, and its ns.

    Copies in one direction run one after the other.
    """
    stream = "to host" if to_host else "to device"
    sent = Communication(kind="copy", stream=stream, bytes=size, domain=_HOST_DOMAIN)
    return sent, size / (link.to_host if to_host else link.to_device)
