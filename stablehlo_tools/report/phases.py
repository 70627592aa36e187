"""Divides a training step into forward, backward and update, and into layers, for the timeline.

jax writes its transformations into the name stack of each op: `jvp(` of ops of the forward, and
`transpose(` of ops of the backward. Ops after the last of these update the state. Layers are the
iterations of loops, or the numbered modules of the name stack, as in `jvp(Model)/layers_3/mlp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from stablehlo_tools.overlap.collective_times import Path as LoopPath
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import MemoryProfile
from stablehlo_tools.report.document import Band, TimelineEvent

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_NUMBERED = re.compile(r"/([A-Za-z]\w*?[_.]?\d+)(?=/)")
_LEAST = 0.01  # share of the total of a phase of its own


def phase_of(place: str) -> str:
    """Returns the phase of an op by its name stack; "" if the stack names none."""
    return BACKWARD if "transpose(" in place else FORWARD if "jvp(" in place else ""


def phase_bands(events: Sequence[TimelineEvent], total_ns: float) -> Iterator[Band]:
    """Yields the phases of a program; none without a backward."""
    compute = [event for event in events if event.stream == 0 and event.kind != "wait"]
    if not any(phase_of(event.place) == BACKWARD for event in compute):
        return
    last = max(event.end for event in compute if phase_of(event.place))
    named = [(event, phase_of(event.place) or (event.begin >= last) * UPDATE) for event in compute]
    yield from _runs(named, 0, _LEAST * total_ns)


def module_bands(events: Sequence[TimelineEvent]) -> Iterator[Band]:
    """Yields the numbered modules of the name stack."""
    compute = [event for event in events if event.stream == 0 and event.kind == "compute"]
    found = [(event, _NUMBERED.search(event.place)) for event in compute]
    named = [(event, match[1] if match else "") for event, match in found]
    # One module is no layer among others.
    if len({name for _, name in named} - {""}) > 1:
        yield from _runs(named, 1, 0.0)


def _runs(named: Sequence[tuple[TimelineEvent, str]], level: int, least: float) -> Iterator[Band]:
    """Joins neighbours of one name; an event without one, or a short run, belongs to the last."""
    runs: list[tuple[Band, float]] = []  # with the time of its ops
    for event, name in named:
        ns = event.end - event.begin
        if runs and name in (runs[-1][0].label, ""):
            band, busy = runs[-1]
            runs[-1] = band._replace(end=event.end), busy + ns
        elif name:
            runs.append((Band(event.begin, event.end, name, level), ns))
    joined: list[Band] = []
    for band, busy in runs:
        if joined and (band.label == joined[-1].label or busy < least):
            joined[-1] = joined[-1]._replace(end=band.end)
        else:
            joined.append(band)
    yield from joined


def peak_parts(
    graph: TaskGraph, memory: MemoryProfile, graphs: Mapping[LoopPath, TaskGraph]
) -> dict[str, float]:
    """Returns the bytes at the memory peak by their purpose.

    Arguments that the update reads first are the optimizer's state; the others are weights and
    inputs, or memory for results. Values of the forward are activations if there is a backward."""
    trained = any(
        phase_of(task.place) == BACKWARD for inner in graphs.values() for task in inner.tasks
    )
    users = graph.users()
    parts: dict[str, float] = {}

    def part_of(task: Task) -> str:
        if task.kind is not TaskKind.INPUT:
            is_kept = trained and phase_of(task.place) == FORWARD
            return "activations" if is_kept else "temporaries"
        if not users[task.id]:
            return "results"  # memory of the caller
        # The forward reads weights, and only the update the optimizer's state.
        first = graph.tasks[min(users[task.id])]
        of_update = trained and first.loop is None and not phase_of(first.place)
        return "optimizer state" if of_update else "weights and inputs"

    for holding in memory.alive:
        place = holding.allocated_at
        part = part_of(graphs[place.loops].tasks[place.task])
        parts[part] = parts.get(part, 0.0) + holding.bytes
    return parts
