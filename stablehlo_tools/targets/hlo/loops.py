"""What goes from one iteration of an HLO loop to the next, and out of it. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.targets.hlo.graph import GraphBuilder
from stablehlo_tools.targets.hlo.module import HloInstruction
from stablehlo_tools.targets.hlo.values import Leaf, Path, Value, element, rebuilt, starts_of

type Leaves = Mapping[Path, Leaf]  # of a loop's tuple, by their place in it


def carries(inputs: Leaves, last: Leaves) -> tuple[tuple[int, int], ...]:
    """The tasks of a body that are inputs, each with the one that makes its next value."""
    return tuple(
        (made.task, leaf.task)
        for path, leaf in last.items()
        if (made := inputs.get(path)) is not None
        and made.task is not None
        and leaf.task is not None
        and leaf.task != made.task
    )


def pair_waits(
    loop: HloInstruction,
    body: GraphBuilder,
    unpaired: Sequence[tuple[int, Path]],
    result: Value,
) -> frozenset[int]:
    """Gives a start to the waits for what the iteration before started; returns those starts.

    Raises ToolError for a wait for what no iteration starts.
    """
    carried: set[int] = set()
    for wait, path in unpaired:
        last = element(result, path)
        starts = starts_of(last) if last is not None else ()
        if not starts:
            name = body.tasks[wait].name
            raise loop.error(f"{name} in its body waits for what was not started")
        body.tasks[wait] = replace(body.tasks[wait], start=starts[-1])
        carried.update(starts)
    return frozenset(carried)


def after_loop(value: Value, first: Leaves, inputs: Leaves, last: Leaves) -> Value:
    """The result of a loop: what the body only passes on is what it was before, and what the last
    iteration started is in flight as what came before the loop was."""

    def after(path: Path, leaf: Leaf) -> Leaf:
        before, inside = first.get(path), last.get(path)
        if before is None or inside is None:
            return leaf
        if path in inputs and inside.task == inputs[path].task:
            return before
        return replace(leaf, starts=before.starts if inside.starts else ())

    return rebuilt(value, after)


def length(graph: TaskGraph) -> float:
    """The time of all tasks of a graph, one after the other; a loop of unknown length runs once."""
    return sum(
        task.ns
        if task.loop is None
        else length(task.loop.body) * (1 if task.loop.trips is None else task.loop.trips)
        for task in graph.tasks
    )
