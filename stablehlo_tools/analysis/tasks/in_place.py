"""Which results take the place of an operand that ends with the kernel that reads it.

XLA lets a kernel write over an operand if it reads each element where it writes it, if the two are
of one size, and if nothing reads the operand afterwards; an all_reduce, too. What a loop hands to
its next iteration lies where the last one's value lay, if that has ended by then.
(xla/service/gpu/fusion_can_share_buffer, HloDataflowAnalysis::CanShareOperandBufferWithUser)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.analysis.tasks.kernels import from_memory, size_of
from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role
from stablehlo_tools.cost.kernels import WorkKind
from stablehlo_tools.overlap.memory import kept_storages, last_uses
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind


def read_in_step(
    members: Sequence[Node], written: Sequence[Node], nodes: Mapping[int, Node]
) -> Mapping[int, Sequence[Ref]]:
    """What a kernel may write the results of its nodes `written` over: by the node, the refs of one
    size that it reads from memory, each element only where that of the result is made."""
    inside = {node.index for node in members}
    in_step: dict[int, set[Ref]] = {}
    out_of_step: set[Ref] = set()
    for node in members:
        read: set[Ref] = set()
        for source in node.sources:
            if source[0] in inside:
                read |= in_step[source[0]]
                continue
            for ref in from_memory(node, source, nodes):
                if ref[0] in inside:
                    read |= in_step[ref[0]]
                elif ref == source:
                    read.add(ref)
                else:
                    out_of_step.add(ref)  # at another index, as a broadcast reads it
        if _is_elementwise(node):
            in_step[node.index] = read
        else:
            in_step[node.index] = set()
            out_of_step |= read
    found: dict[int, Sequence[Ref]] = {}
    for node in written:
        others = [in_step[other.index] for other in written if other is not node]
        free = in_step[node.index] - out_of_step.union(*others)
        size = sum(node.result_bytes)
        found[node.index] = sorted(ref for ref in free if size_of(ref, nodes) == size)
    return found


def _is_elementwise(node: Node) -> bool:
    return node.role is Role.RESHAPE or (
        node.role is Role.FUSIBLE and node.kind is WorkKind.ELEMENTWISE
    )


def put_in_place(
    graph: TaskGraph, over: Mapping[int, Sequence[int]], carried: Mapping[int, int]
) -> TaskGraph:
    """The graph with storages joined: of each storage of `over` with the first of its candidates
    that ends where it begins; of a loop's body each next value of `carried` with the one that the
    iteration starts from, if that has ended before."""
    tasks = graph.tasks
    last = last_uses(graph, range(len(tasks)), of_transfers=False)
    kept = kept_storages(tasks)
    inputs = {s: t.persistent for t in tasks if t.kind is TaskKind.INPUT for s in t.allocs}
    joined: dict[int, int] = {}

    def ends(storage: int, at: int) -> bool:
        return storage not in kept and last.get(storage, at) <= at

    for task in tasks:
        for made in task.allocs if task.kind is not TaskKind.INPUT else ():
            start = carried.get(made)
            places = [joined.get(place, place) for place in over.get(made, ())]
            if start is not None:
                fits = ends(start, task.id - 1) or (start in places and ends(start, task.id))
                places = [start] if fits else []
            else:
                places = [p for p in places if ends(p, task.id) and not inputs.get(p, False)]
            if places:
                (place, *_) = places
                joined[made] = place
                last[place] = last.get(made, task.id)
                if made in kept:
                    kept.add(place)
    return _renamed(graph, joined) if joined else graph


def _renamed(graph: TaskGraph, joined: Mapping[int, int]) -> TaskGraph:
    def change(task: Task) -> Task:
        if not any(storage in joined for storage in task.storages):
            return task
        storages = tuple(sorted({joined.get(s, s) for s in task.storages}))
        return replace(
            task, storages=storages, allocs=tuple(s for s in task.allocs if s not in joined)
        )

    return TaskGraph([change(task) for task in graph.tasks], graph.storages)
