"""Finds the results that reuse the memory of an operand that ends with its kernel.

XLA lets a kernel write over an operand under three conditions: the kernel reads each element where
it writes it, both are of one size, and the operand has no later use. An all_reduce can, too. The
next value of a carry reuses the memory of its last value, if that has ended by then. A program's
arguments live to its end. An argument is written over only if it is donated, and only by a result
of the program. For other results, XLA:GPU allocates memory before it runs the program.
(xla/service/gpu/fusion_can_share_buffer, HloDataflowAnalysis::CanShareOperandBufferWithUser)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from stablehlo_tools.analysis.tasks.kernel_groups import from_memory, size_of
from stablehlo_tools.analysis.tasks.nodes import KernelRole, Ref, TaskNode
from stablehlo_tools.cost.kernels import WorkKind
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import kept_storages, last_uses


def read_in_step(
    members: Sequence[TaskNode], written: Sequence[TaskNode], nodes: Mapping[int, TaskNode]
) -> Mapping[int, Sequence[Ref]]:
    """Returns the values that a kernel may write the results of its nodes `written` over.

    For each node, these are refs of the same size that the kernel reads from memory. Each element
    is read only to compute the result's element at the same place.
    """
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
        if node.role is KernelRole.RESHAPE or (
            node.role is KernelRole.FUSIBLE and node.kind is WorkKind.ELEMENTWISE
        ):
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


def body_in_place(
    graph: TaskGraph, over: Mapping[int, Sequence[int]], carried: Mapping[int, int]
) -> TaskGraph:
    """Returns the graph of a loop's body with storages joined.

    Each next value in `carried` joins the storage that the iteration starts from, if that has ended
    before. Any other storage in `over` joins the first of its candidates that ends where it begins.
    """
    fixed = {s for task in _inputs(graph) if task.persistent for s in task.allocs}
    return _join_storages(graph, over, carried, {}, fixed)


def program_in_place(
    graph: TaskGraph, over: Mapping[int, Sequence[int]], *, set_aside: bool
) -> TaskGraph:
    """Returns the graph of a whole program with storages joined.

    Each result joins a donated argument of its size, if that has ended by then. Any other storage
    in `over` joins the first of its candidates that ends where it begins. Arguments live to the
    end. If `set_aside`, memory for results that reuse no argument is allocated from the start.
    """
    sizes, inputs, returned = graph.storages, _inputs(graph), _output_storages(graph)
    own = {s for task in inputs for s in task.allocs}
    donated: dict[float, list[int]] = defaultdict(list)
    for task in reversed(inputs):
        for storage in task.allocs if not task.persistent else ():
            if storage not in returned:
                donated[sizes[storage]].append(storage)
    given_back = {
        storage: donated[sizes[storage]].pop()
        for storage in returned
        if storage not in own and donated[sizes[storage]]
    }
    return _as_called(_join_storages(graph, over, {}, given_back, own), set_aside=set_aside)


def _inputs(graph: TaskGraph) -> list[Task]:
    return [task for task in graph.tasks if task.kind is TaskKind.INPUT]


def _output_storages(graph: TaskGraph) -> list[int]:
    """Returns the storages of a program's results, each once."""
    outputs = (task for task in graph.tasks if task.kind is TaskKind.OUTPUT)
    return list(dict.fromkeys(s for task in outputs for s in task.storages))


def _join_storages(
    graph: TaskGraph,
    over: Mapping[int, Sequence[int]],
    carried: Mapping[int, int],
    given_back: Mapping[int, int],
    fixed: Set[int],
) -> TaskGraph:
    """Returns the graph with storages joined.

    Only storages in `carried` and `given_back` may join a `fixed` one.
    """
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

    def rename(task: Task) -> Task:
        if not any(storage in joined for storage in task.storages):
            return task
        storages = tuple(sorted({joined.get(s, s) for s in task.storages}))
        allocs = tuple(s for s in task.allocs if s not in joined)
        return replace(task, storages=storages, allocs=allocs)

    return TaskGraph([*map(rename, tasks)], graph.storages) if joined else graph


def _as_called(graph: TaskGraph, *, set_aside: bool) -> TaskGraph:
    """Returns the graph of a whole program in which arguments live to the end.

    If `set_aside`, memory for results that reuse no argument is allocated from the start.
    """
    inputs = {s for task in _inputs(graph) for s in task.allocs}
    own = [s for s in _output_storages(graph) if s not in inputs] if set_aside else []
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
