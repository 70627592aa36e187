"""Finds the batch: the dimension of the arguments by which the layer loops can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.batch_dims.graph import Graph
from stablehlo_tools.analysis.batch_dims.layout import Layout
from stablehlo_tools.analysis.batch_dims.seeds import (
    Seeds,
    Trial,
    candidates,
    extended,
    try_seeds,
)
from stablehlo_tools.analysis.layer_loops.reading import LayerLoop
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.transforms.expanding.phases import Phase, plan_phase

_MOST_PLANNED = 8


@dataclass(frozen=True)
class Cut:
    """The arguments that carry the batch, and every layer loop on one microbatch."""

    trial: Trial
    phases: tuple[Phase, ...]


def find_cut(graph: Graph, loops: Sequence[LayerLoop], parts: int, given: Seeds | None) -> Cut:
    """The cut by given arguments, or by those that are found.

    The outermost dimension is taken by which every loop can be cut; integers are tried first, since
    tokens are samples and weights are not. Raises ToolError where there is none: the reason of the
    likeliest.
    """
    if given is not None:
        return _planned(try_seeds(graph, strided(graph, given, parts), parts), loops)
    refusals: list[ToolError] = []
    for group in _groups(graph):
        for trial in _likely(graph, loops, group, parts):
            try:
                return _planned(trial, loops)
            except ToolError as error:
                refusals.append(error)
    if refusals:
        raise refusals[0]
    raise ToolError(
        f"expand-pipeline: no argument has a dimension that {parts} microbatches divide and that "
        "all layer loops carry (P3)",
        loops[0].op.location,
    )


def strided(graph: Graph, seeds: Seeds, parts: int) -> Seeds:
    """The same dimensions, sample k of every `parts` in microbatch k: however a batch is divided
    over devices, each has its share of every microbatch."""
    shapes = {number: graph.shape(number) or () for number in seeds}
    return {
        number: Layout(layout.dim, shapes[number][layout.dim] // parts)
        for number, layout in seeds.items()
    }


def _planned(trial: Trial, loops: Sequence[LayerLoop]) -> Cut:
    chosen = _over_layers(loops, trial)
    return Cut(trial, tuple(plan_phase(loop, trial.dims) for loop in chosen))


def _over_layers(loops: Sequence[LayerLoop], trial: Trial) -> list[LayerLoop]:
    """The loops that take rows of weights, not of samples; of nested ones, the outermost."""
    found: list[LayerLoop] = []
    for loop in loops:
        inside = any(is_inside(loop.op, outer.op) for outer in found)
        stacks = [trial.dims.layout_of(loop.op.results[carry]) for carry in loop.weights]
        if not inside and None in stacks:
            found.append(loop)
    return found


def _groups(graph: Graph) -> Iterable[list[int]]:
    arguments = graph.root.arguments
    yield [n for n in arguments if not is_float(graph.values[n].type)]
    yield [n for n in arguments if is_float(graph.values[n].type)]


def _likely(
    graph: Graph, loops: Sequence[LayerLoop], arguments: Sequence[int], parts: int
) -> list[Trial]:
    """Trials that put a flow of every loop in parts, the likeliest first."""
    found: list[tuple[int, int, int, Trial]] = []
    for place, seeds in enumerate(candidates(graph, arguments, parts)):
        trial = try_seeds(graph, strided(graph, seeds, parts), parts)
        chosen = _over_layers(loops, trial)
        if chosen and all(_carries(loop, trial) for loop in chosen):
            dim = next(iter(seeds.values())).dim
            found.append((len(trial.dims.meetings), dim, place, trial))
    found.sort(key=lambda entry: (entry[1], entry[0], -entry[3].work, entry[2]))
    return [extended(trial) for _, _, _, trial in found[:_MOST_PLANNED]]


def _carries(loop: LayerLoop, trial: Trial) -> bool:
    return any(trial.dims.layout_of(loop.op.results[carry]) for carry in loop.flows)
