"""Which collectives of a loop could be issued an iteration ahead, or end during the next.

A collective could go ahead if all it needs of the iteration before is ready early there: slices of
invariant operands by a counter, the gathers of FSDP. It could end late if the next iteration needs
its result late or not at all: gradients that are only stacked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.overlap.bounds import iterations, stream_totals
from stablehlo_tools.overlap.task_graph import COMPUTE_STREAM, Loop, TaskGraph, TaskKind

_SMALL = 0.05  # of the iteration's work: so early or so late is early or late


def could_go_ahead(loop: Loop) -> set[int]:
    """The collective starts of the body whose operands the iteration before has ready early."""
    body = loop.body
    deps = [task.deps for task in body.tasks]
    work = _work_behind(body, range(len(body.tasks)), deps)
    limit = _SMALL * _total(body)
    late = {argument for argument, result in loop.carries if work[result] > limit}
    hang_on_late = _reached(range(len(body.tasks)), deps, late)
    return {s for s in _starts(body) if s not in hang_on_late and work[s] <= limit}


def could_end_late(loop: Loop) -> set[int]:
    """The collective starts of the body whose results the next iteration needs late or never."""
    body = loop.body
    users = body.users()
    backwards = range(len(body.tasks) - 1, -1, -1)
    work = _work_behind(body, backwards, users)
    limit = _SMALL * _total(body)
    needed = {result for argument, result in loop.carries if work[argument] > limit}
    lead_to_needed = _reached(backwards, users, needed)
    return {s for s in _starts(body) if s not in lead_to_needed and work[s] <= limit}


def _starts(body: TaskGraph) -> Iterable[int]:
    return (t.id for t in body.tasks if t.kind is TaskKind.COLLECTIVE_START)


def _total(body: TaskGraph) -> float:
    return stream_totals(body)[COMPUTE_STREAM]


def _work_behind(
    body: TaskGraph, order: Iterable[int], sources: Sequence[Sequence[int]]
) -> list[float]:
    """The longest chain of compute and collectives that leads to each task, its own left out."""
    finish = [0.0] * len(body.tasks)
    behind = [0.0] * len(body.tasks)
    for i in order:
        behind[i] = max((finish[source] for source in sources[i]), default=0.0)
        loop = body.tasks[i].loop
        own = body.tasks[i].ns if loop is None else iterations(loop) * _total(loop.body)
        finish[i] = behind[i] + own
    return behind


def _reached(order: Iterable[int], sources: Sequence[Sequence[int]], given: set[int]) -> set[int]:
    found = set(given)
    for i in order:
        if i not in found and any(source in found for source in sources[i]):
            found.add(i)
    return found
