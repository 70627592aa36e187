"""Which results take the place of an operand that ends with the kernel that reads it.

XLA lets a kernel write over an operand if it reads each element where it writes it, if the two are
of one size, and if nothing reads the operand afterwards; an all_reduce, too. What a loop hands to
its next iteration lies where the last one's value lay, if that has ended by then. A program's
arguments stay to its end, and only what is given back for one that is donated is written over it;
for other results XLA:GPU sets memory aside before it runs.
(xla/service/gpu/fusion_can_share_buffer, HloDataflowAnalysis::CanShareOperandBufferWithUser)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
    graph: TaskGraph,
    over: Mapping[int, Sequence[int]],
    carried: Mapping[int, int],
    given_back: Mapping[int, int],
    fixed: Set[int],
) -> TaskGraph:
    """The graph with storages joined: of a loop's body each next value of `carried` with the one
    that the iteration starts from, and of a program each result of `given_back` with the argument
    whose place is kept for it, if that has ended by then; any other of `over` with the first of its
    candidates that ends where it begins and is not `fixed`."""
    tasks = graph.tasks
    last = last_uses(graph, range(len(tasks)), of_transfers=False)
    kept = kept_storages(tasks)
    joined: dict[int, int] = {}

    def ends(storage: int, at: int) -> bool:
        return storage not in kept and last.get(storage, at) <= at

    for task in tasks:
        for made in task.allocs if task.kind is not TaskKind.INPUT else ():
            start = carried.get(made, given_back.get(made))
            places = [joined.get(place, place) for place in over.get(made, ())]
            if start is not None:
                in_step = made in given_back or start in places
                fits = ends(start, task.id if in_step else task.id - 1)
                places = [start] if fits else []
            else:
                places = [p for p in places if ends(p, task.id) and p not in fixed]
            if places:
                (place, *_) = places
                joined[made] = place
                last[place] = last.get(made, task.id)
                if made in kept:
                    kept.add(place)
    return _renamed(graph, joined) if joined else graph


def as_called(graph: TaskGraph, *, set_aside: bool) -> TaskGraph:
    """The graph of a whole program with its arguments there to the end, and if it is `set_aside`
    the memory of what it returns that is in none of them there from the start."""
    inputs = {s for t in graph.tasks if t.kind is TaskKind.INPUT for s in t.allocs}
    returned = (s for t in graph.tasks if t.kind is TaskKind.OUTPUT for s in t.storages)
    own = [s for s in dict.fromkeys(returned) if s not in inputs] if set_aside else []
    apart = frozenset(own)

    def change(task: Task) -> Task:
        if task.kind is TaskKind.INPUT:
            return replace(task, persistent=True)
        if apart.isdisjoint(task.allocs):
            return task
        return replace(task, allocs=tuple(s for s in task.allocs if s not in apart))

    tasks = [change(task) for task in graph.tasks]
    for number, storage in enumerate(own):
        tasks.append(
            Task(
                id=len(tasks),
                kind=TaskKind.INPUT,
                storages=(storage,),
                allocs=(storage,),
                persistent=True,
                name=f"result {number}",
                op="result",
            )
        )
    return TaskGraph(tasks, graph.storages)


def _renamed(graph: TaskGraph, joined: Mapping[int, int]) -> TaskGraph:
    def change(task: Task) -> Task:
        if not any(storage in joined for storage in task.storages):
            return task
        storages = tuple(sorted({joined.get(s, s) for s in task.storages}))
        return replace(
            task, storages=storages, allocs=tuple(s for s in task.allocs if s not in joined)
        )

    return TaskGraph([change(task) for task in graph.tasks], graph.storages)
