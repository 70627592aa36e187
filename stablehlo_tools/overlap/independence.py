"""How much compute is independent of each collective: what some order could hide it behind.

Compute is independent of a collective if it is no ancestor of its start and no descendant of its
waits. Tasks that depend on each other through the iterations of a loop count as independent within
one iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind

_CHUNK = 8192  # collectives at a time: bounds the memory
_BITS_OF_BYTE = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(float)


@dataclass(frozen=True, slots=True)
class Independence:
    """Nanoseconds of the compute that feeds a collective, that needs it, and of all the rest."""

    before_ns: float
    after_ns: float
    free_ns: float


def independence(graph: TaskGraph, loop_ns: Mapping[int, float]) -> dict[int, Independence]:
    """For each collective start of this graph, loop bodies left out.

    `loop_ns` is the compute within each loop task.
    """
    starts = [task.id for task in graph.tasks if task.kind is TaskKind.COLLECTIVE_START]
    ns = np.array([_compute_ns(task, loop_ns) for task in graph.tasks])
    total = float(ns.sum())
    found: dict[int, Independence] = {}
    users = graph.users()
    for begin in range(0, len(starts), _CHUNK):
        chunk = starts[begin : begin + _CHUNK]
        after = _reached(graph.tasks, chunk, [t.deps for t in graph.tasks], ns)
        before = _reached(graph.tasks[::-1], chunk, users, ns)
        for index, start in enumerate(chunk):
            feeds, needs = float(before[index]), float(after[index])
            found[start] = Independence(feeds, needs, max(0.0, total - feeds - needs))
    return found


def _compute_ns(task: Task, loop_ns: Mapping[int, float]) -> float:
    if task.kind is TaskKind.COMPUTE:
        return task.ns
    return loop_ns.get(task.id, 0.0)


def _reached(
    tasks: Sequence[Task], starts: Sequence[int], sources: Sequence[Sequence[int]], ns: np.ndarray
) -> np.ndarray:
    """The time of all compute that each start reaches, going through the tasks in this order.

    `sources[i]` are the tasks that task i is reached from.
    """
    words = -(-len(starts) // 64)
    bits = np.zeros((len(tasks), words), dtype=np.uint64)
    for index, start in enumerate(starts):
        bits[start, index // 64] = np.uint64(1 << index % 64)
    for task in tasks:
        row = bits[task.id]
        for source in sources[task.id]:
            np.bitwise_or(row, bits[source], out=row)
    return _sums(bits, ns)[: len(starts)]


def _sums(bits: np.ndarray, ns: np.ndarray) -> np.ndarray:
    """The sum of ns over the rows in which each bit is set.

    Byte by byte: the rows are first summed by the value of the byte, then by its bits.
    """
    timed = np.flatnonzero(ns)
    weights = ns[timed]
    columns = np.ascontiguousarray(bits[timed].view(np.uint8).T)
    by_value = np.stack([np.bincount(c, weights, minlength=256) for c in columns])
    return (by_value @ _BITS_OF_BYTE).ravel()
