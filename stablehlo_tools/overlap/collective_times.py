"""The times of each collective of a program, the compute that hides it, and why the rest is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from stablehlo_tools.diagnostics import duration
from stablehlo_tools.dialect.communication_kinds import PAIRWISE
from stablehlo_tools.overlap.bounds import (
    Independence,
    could_end_late,
    could_go_ahead,
    independence,
    iterations,
    stream_totals,
)
from stablehlo_tools.overlap.task_graph import COMPUTE_STREAM, Task, TaskGraph
from stablehlo_tools.overlap.task_simulator import GraphRun, Simulation

type Path = tuple[int, ...]  # the loops around a task, outermost first

_MOST_HIDERS = 5
_AHEAD = "the previous iteration computes its operand early: it could be issued there"
_LATE = "the next iteration reads its result late or never: it could end there"


@dataclass(frozen=True, slots=True)
class Hider:
    """A compute task that ran while a collective was in flight, and the time of the overlap."""

    name: str
    ns: float


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of the program.

    `times` is the number of runs; `ns` and `exposed_ns` are sums over them, `bytes` is per run.
    `hideable_ns` is the part of `ns` that independent compute could cover in some order. `why`
    explains why the rest cannot be hidden; "" if all can.
    """

    number: int
    kind: str
    name: str
    groups: str
    axes: tuple[str, ...]
    stream: str
    algorithm: str
    dtype: str
    bytes: float
    times: int
    ns: float
    exposed_ns: float
    hidden_by: tuple[Hider, ...]
    hideable_ns: float
    why: str
    place: str


@dataclass(slots=True)
class _Sums:
    """Sums over the runs of one collective."""

    times: int = 0
    ns: float = 0.0
    exposed_ns: float = 0.0
    hidden: Counter[str] = field(default_factory=Counter[str])


def graphs_of(graph: TaskGraph, path: Path = ()) -> Iterator[tuple[Path, TaskGraph]]:
    """Yields a graph and the bodies of its loops, each with its path of loop task ids."""
    yield path, graph
    for task in graph.tasks:
        if task.loop is not None:
            yield from graphs_of(task.loop.body, (*path, task.id))


def collective_numbers(graph: TaskGraph) -> dict[tuple[Path, int], int]:
    """A number for each collective, in the order of the program."""
    numbers: dict[tuple[Path, int], int] = {}

    def count(inner: TaskGraph, path: Path) -> None:
        for task in inner.tasks:
            if task.communication is not None and task.communication.is_collective:
                numbers[path, task.id] = len(numbers)
            elif task.loop is not None:
                count(task.loop.body, (*path, task.id))

    count(graph, ())
    return numbers


def collective_rows(graph: TaskGraph, simulation: Simulation) -> tuple[CollectiveRow, ...]:
    """Returns one row for each collective of the program."""
    sums: dict[tuple[Path, int], _Sums] = {}
    _collect(simulation.run, 1, (), sums)
    free = {path: independence(inner, loop_compute(inner)) for path, inner in graphs_of(graph)}
    tasks = {path: inner.tasks for path, inner in graphs_of(graph)}
    # For collectives in loops: the gain that pipelining across iterations could bring.
    hints: dict[tuple[Path, int], str] = {}
    for path, inner in graphs_of(graph):
        for task in inner.tasks:
            if task.loop is not None:
                inside = (*path, task.id)
                # If a collective could move both ways, the second hint replaces the first.
                hints |= dict.fromkeys(((inside, s) for s in could_end_late(task.loop)), _LATE)
                hints |= dict.fromkeys(((inside, s) for s in could_go_ahead(task.loop)), _AHEAD)
    return tuple(
        _row(
            number,
            tasks[path][start],
            sums.get((path, start), _Sums()),
            _why(free[path][start], tasks[path][start].ns, hints.get((path, start)), path),
            free[path][start].free_ns,
        )
        for (path, start), number in collective_numbers(graph).items()
    )


def _collect(run: GraphRun, weight: int, path: Path, sums: dict[tuple[Path, int], _Sums]) -> None:
    for flight in run.all_flights():
        # The time of a bucket is divided equally among its members.
        share = weight / len(flight.starts)
        for start in flight.starts:
            entry = sums.setdefault((path, start), _Sums())
            entry.times += weight
            entry.ns += share * (flight.end - flight.begin)
            entry.exposed_ns += share * flight.exposed
            for name, ns in flight.hidden.items():
                entry.hidden[name] += share * ns  # type: ignore[assignment]
    for task, loop in run.loops.items():
        for iteration, count in loop.weighted_iterations():
            _collect(iteration, weight * count, (*path, task), sums)


def loop_compute(graph: TaskGraph) -> dict[int, float]:
    """The compute within each loop of a graph, in ns."""
    return {
        task.id: stream_totals(task.loop.body)[COMPUTE_STREAM] * iterations(task.loop)
        for task in graph.tasks
        if task.loop is not None
    }


def _row(number: int, task: Task, sums: _Sums, why: str, free_ns: float) -> CollectiveRow:
    sent = task.communication
    assert sent is not None, "a collective start says what it sends"
    each = sums.ns / sums.times if sums.times else task.ns
    return CollectiveRow(
        number=number,
        kind=sent.kind,
        name=task.name,
        groups=groups_text(sent.groups, pairs=sent.kind in PAIRWISE),
        axes=sent.axes,
        stream=sent.stream,
        algorithm=sent.algorithm,
        dtype=sent.dtype,
        bytes=sent.bytes,
        times=sums.times,
        ns=sums.ns,
        exposed_ns=sums.exposed_ns,
        hidden_by=tuple(Hider(n, ns) for n, ns in sums.hidden.most_common(_MOST_HIDERS)),
        hideable_ns=min(each, free_ns) * sums.times,
        why=why,
        place=task.place,
    )


def _why(around: Independence, ns: float, hint: str | None, path: Path) -> str:
    """Returns why no order of its block hides a collective completely; "" if one does."""
    if around.free_ns >= ns:
        return ""
    where = "iteration" if path else "program"
    if around.free_ns >= 1:
        text = f"only {duration(around.free_ns)} of compute in this {where} is independent of it"
    elif around.before_ns or around.after_ns:
        text = f"all compute of this {where} feeds it or needs its result"
    else:
        text = f"this {where} has no compute"
    return f"{text}; {hint}" if hint else text


def groups_text(groups: tuple[tuple[int, ...], ...], *, pairs: bool, width: int = 16) -> str:
    """Returns groups as text: number x size and the first one, `2 x 4 {0,1,2,3}`; `8 pairs {0,1}`.

    Groups of different sizes: `{0,1,2} {3}`, or `9 of 1 to 5 {0}`. A group longer than `width` is
    shortened.
    """
    if not groups:
        return "-"
    texts = [f"{{{','.join(map(str, group))}}}" for group in groups]
    text = texts[0] if len(texts[0]) <= width + 2 else f"{{{groups[0][0]},…,{groups[0][-1]}}}"
    if pairs:
        return f"{len(groups)} pairs {text}" if len(groups) > 1 else f"pair {text}"
    sizes = set(map(len, groups))
    if len(sizes) > 1:
        listed, spread = " ".join(texts), f"{len(groups)} of {min(sizes)} to {max(sizes)} {text}"
        return listed if len(listed) <= width + 8 else spread
    return text if len(groups) == 1 else f"{len(groups)} x {len(groups[0])} {text}"
