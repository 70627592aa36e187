"""Finds the batch: the dimension of the arguments along which the layer loops can be divided."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    Seeds,
    SeedTrial,
    extend_trial,
    fewer_parts,
    group_samples,
    has_integers,
    search,
    sizes_undivided,
    stride_samples,
    try_seeds,
    why_undivided,
    with_needed,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loop_carries import LayerLoop
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import CONVERT, RESHAPE, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.reshapes import reshape_factors
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase, plan_phase

# Trials to plan at once, the likeliest first; each plan visits the bodies of all loops.
_MOST_PLANNED = 8


@dataclass(frozen=True)
class BatchCut:
    """The arguments that carry the batch, and every layer loop on one microbatch."""

    trial: SeedTrial
    phases: tuple[LayerPhase, ...]


def find_cut(graph: Graph, loops: Sequence[LayerLoop], parts: int, given: Seeds | None) -> BatchCut:
    """Returns the cut along dimensions of given arguments, or of those that a search finds.

    The search takes the outermost dimension along which every loop can be divided. It tries
    integers first, since tokens are samples and weights are not. Raises ToolError if there is none,
    with the reason of the likeliest one.
    """
    refusals: list[ToolError] = []
    if given is not None:
        for way in (*cuts(graph, given, parts), *group_samples(graph, given, parts)):
            try:
                return _plan_cut(try_seeds(graph, way, parts), loops)
            except ToolError as error:
                refusals.append(error)
        raise refusals[0]
    goes_over_samples = False
    tries = (search(graph, parts, ways, to_the_end=True) for ways in (cuts, group_samples))
    for trials in map(list, chain.from_iterable(tries)):
        # Every loop reads rows of samples in a division that works: none is over layers.
        goes_over_samples |= any(t.independent and not _over_layers(loops, t) for t in trials)
        for trial in _likely(loops, trials):
            try:
                return _plan_cut(trial, loops)
            except ToolError as error:
                if not _cuts_features(loops, trial):
                    refusals.append(error)
    undivided_batch = _divisibility_error(graph, loops, parts, are_refused=bool(refusals))
    if undivided_batch is not None:
        raise undivided_batch
    if refusals:
        raise refusals[0]
    place = loops[0].op.location
    if goes_over_samples:
        raise ToolError(
            "expand-pipeline: the program has no loop over layers: this one runs over samples, or "
            "over values computed from them (P2); write the layers as a lax.scan over stacked "
            "weights, or run roll-layers first if they are written out one after the other",
            place,
        )
    raise ToolError(
        f"expand-pipeline: no argument has a dimension that {parts} microbatches divide and that "
        "every loop over layers carries from layer to layer (P3)",
        place,
        tuple(note(said, place) for said in sizes_undivided(graph, parts)),
    )


def _divisibility_error(
    graph: Graph, loops: Sequence[LayerLoop], parts: int, *, are_refused: bool
) -> ToolError | None:
    """Returns the refusal of a batch that fewer microbatches divide, but so many do not; None if
    such a batch is not found.

    If other batches `are_refused` for another reason, only integers count: floats may be features.
    """
    for fewer in fewer_parts(graph, parts):
        likely = (_likely(loops, trials) for trials in search(graph, fewer, cuts, to_the_end=True))
        for trial in chain.from_iterable(likely):
            said = why_undivided(graph, trial.seeds, parts, "microbatches")
            is_sure = not are_refused or has_integers(graph, trial.seeds)
            if (
                said is not None
                and is_sure
                and trial.independent
                and not _cuts_features(loops, trial)
            ):
                return said.refusal("expand-pipeline", "P3", loops[0].op.location)
    return None


def cuts(graph: Graph, seeds: Seeds, parts: int) -> list[Seeds]:
    """Returns ways to cut the same dimensions: strided, and as the program itself does. The program
    may cut the samples of each device in order, if that gives the same number of parts."""
    ways = [stride_samples(graph, seeds, parts)]
    if len(seeds) == 1:
        ((number, layout),) = seeds.items()
        ways += [
            {number: DimTiling(layout.dim, outer)}
            for outer in _cut_behind(graph.values[number], layout.dim, parts)
        ]
    return list({tuple(way.items()): way for way in ways}.values())


def _cut_behind(value: ir.Value, dim: int, parts: int) -> list[int]:
    """Returns the sizes before the parts in reshapes that split a dimension of a value into so
    many."""
    outers: list[int] = []
    if 0 in shape_of(value):
        return outers
    for use in value.uses:
        user = use.owner.operation
        if user.name in (SHARDING_CONSTRAINT, CONVERT):
            outers += _cut_behind(user.results[0], dim, parts)
        elif user.name == RESHAPE:
            before, after = (tuple(shape_of(each)) for each in (value, user.results[0]))
            for factor in reshape_factors(before, after):
                part = factor.before
                if factor.size == parts and factor.after and part and part.dim == dim:
                    outers.append(before[dim] // (parts * part.step))
    return [outer for outer in outers if outer > 1]


def _plan_cut(trial: SeedTrial, loops: Sequence[LayerLoop]) -> BatchCut:
    """Returns the cut by a trial. It includes arguments from which the trial takes pieces, such as
    labels, if these can be divided, too."""
    longer = with_needed(trial)
    if longer is not trial:
        # If the longer list of arguments is refused, the shorter one may still work.
        with contextlib.suppress(ToolError):
            return _planned_alone(longer, loops)
    return _planned_alone(trial, loops)


def _planned_alone(trial: SeedTrial, loops: Sequence[LayerLoop]) -> BatchCut:
    chosen = _over_layers(loops, trial)
    return BatchCut(trial, tuple(plan_phase(loop, trial.dims) for loop in chosen))


def _over_layers(loops: Sequence[LayerLoop], trial: SeedTrial) -> list[LayerLoop]:
    """Returns the loops that read rows of weights, not of samples; of nested ones, the outermost.

    Rows of samples have the batch among their dimensions.
    """
    outermost: list[LayerLoop] = []
    for loop in loops:
        inside = any(is_inside(loop.op, outer.op) for outer in outermost)
        stacks = [trial.dims.tiling_of(loop.op.results[carry]) for carry in loop.weights]
        if not inside and any(layout is None or layout.dim == 0 for layout in stacks):
            outermost.append(loop)
    return outermost


def _likely(loops: Sequence[LayerLoop], trials: Iterable[SeedTrial]) -> Iterator[SeedTrial]:
    """Returns trials that divide a flow of every layer loop, the likeliest first."""
    likely: list[SeedTrial] = []
    for found in trials:
        trial = found
        # A loop over chunks of tokens may also read rows of labels: divide these, too.
        if trial.independent and not _puts_flows_in_parts(loops, trial):
            trial = with_needed(trial)
        if _puts_flows_in_parts(loops, trial):
            likely.append(trial)

    def unlikeliness(trial: SeedTrial) -> tuple[int, int, int]:
        """Returns a key. Outer dimensions are likelier, then fewer meetings, then more work."""
        dim = min(layout.dim for layout in trial.seeds.values())
        return dim, len(trial.dims.meetings), -trial.work

    return map(extend_trial, sorted(likely, key=unlikeliness)[:_MOST_PLANNED])


def _puts_flows_in_parts(loops: Sequence[LayerLoop], trial: SeedTrial) -> bool:
    chosen = _over_layers(loops, trial)
    return bool(chosen) and all(
        any(trial.dims.tiling_of(loop.op.results[carry]) for carry in loop.flows) for loop in chosen
    )


def _cuts_features(loops: Sequence[LayerLoop], trial: SeedTrial) -> bool:
    """Returns True if the cut is likely one of features: of rows of weights, or along the last
    dimension of a tensor of floats."""
    graph = trial.dims.graph
    stacks = [loop.op.operands[carry] for loop in loops for carry in loop.weights]
    return any(
        graph.values[number] in stacks
        or (
            is_float(graph.values[number].type)
            and 0 < layout.dim == len(graph.shape(number) or ()) - 1
        )
        for number, layout in trial.seeds.items()
    )
