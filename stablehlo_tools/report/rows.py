"""The rows of the tables of loops and kernels, over all their runs."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.simulator import Run, Simulation
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.report.document import KernelRow, LoopRow

_MOST_KERNELS = 25


def loop_rows(graph: TaskGraph, simulation: Simulation) -> tuple[LoopRow, ...]:
    """One row for each loop, outer ones first, with the time of all its runs."""
    rows: list[LoopRow] = []

    def visit(inner: TaskGraph, runs: list[tuple[Run, int]], depth: int) -> None:
        for task in inner.tasks:
            if task.loop is None:
                continue
            here = [(run.loops[task.id], weight) for run, weight in runs if task.id in run.loops]
            total = sum(
                weight * (run.end[task.id] - run.begin[task.id])
                for run, weight in runs
                if task.id in run.loops
            )
            period = here[0][0].period if here else 0.0
            rows.append(LoopRow(task.name, task.loop.trips, total, period, depth, task.place))
            inside = [
                (iteration, weight * count)
                for loop, weight in here
                for iteration, count in loop.weighted()
            ]
            visit(task.loop.body, inside, depth + 1)

    visit(graph, [(simulation.run, 1)], 0)
    return tuple(rows)


def kernel_rows(graph: TaskGraph) -> tuple[KernelRow, ...]:
    """The kernels that take longest, those of one name and place together."""
    kernels: dict[tuple[str, str], tuple[int, float]] = {}

    def add(inner: TaskGraph, runs: int) -> None:
        for task in inner.tasks:
            if task.loop is not None:
                add(task.loop.body, runs * iterations(task.loop))
            elif task.kind is TaskKind.COMPUTE and task.ns:
                times, ns = kernels.get((task.name, task.place), (0, 0.0))
                kernels[task.name, task.place] = times + runs, ns + runs * task.ns

    add(graph, 1)
    rows = [KernelRow(name, times, ns, place) for (name, place), (times, ns) in kernels.items()]
    return tuple(sorted(rows, key=lambda row: -row.ns)[:_MOST_KERNELS])


def unsteady_loops(run: Run) -> Iterator[tuple[Task, int]]:
    """The loops that were extrapolated, with how many iterations were left out."""
    for number, loop in run.loops.items():
        if loop.folded and not loop.steady:
            yield run.graph.tasks[number], loop.folded
        for iteration in loop.iterations[-1:]:
            yield from unsteady_loops(iteration)
