"""Cuts a training step into stages: loops over layers by ranges, all else by what it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.reading import layer_loops
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.staging.assignment import Assignment, assign
from stablehlo_tools.mpmd.staging.cutting import Cuts, cut_units, spans_by_stage
from stablehlo_tools.mpmd.staging.dataflow import Dataflow
from stablehlo_tools.mpmd.staging.marks import mark, marked, named_by_user
from stablehlo_tools.mpmd.staging.microbatches import find_microbatch_loop
from stablehlo_tools.mpmd.staging.region import region_block
from stablehlo_tools.mpmd.staging.step import Forward, Step, find_forward
from stablehlo_tools.mpmd.staging.units import layer_loops_by_node, units_of
from stablehlo_tools.mpmd.staging.untying import take_apart
from stablehlo_tools.mpmd.staging.weights import Weigher
from stablehlo_tools.transforms.layer_ranges.backward import backward_loops, layer_chains
from stablehlo_tools.transforms.layer_ranges.marks import range_of
from stablehlo_tools.transforms.split_layers import SplitLayersPass
from stablehlo_tools.transforms.split_weight_gradients import SplitWeightGradientsPass


@dataclass(frozen=True)
class Staged:
    """A step, every op of which has its stage and its phase; it lives as long as its module."""

    module: ir.Module
    step: Step
    forward: Forward
    assignment: Assignment


def read_step(module: ir.Module, microbatches: int | None = None) -> Step:
    """The training step of a module without calls. Raises a located ToolError."""
    block = region_block(module)
    effects = Effects(functions_by_name(module))
    loop = find_microbatch_loop(block, effects, microbatches)
    return Step(loop, Dataflow.of(block), effects)


def has_loop(module: ir.Module, microbatches: int) -> bool:
    """Whether a module without calls has a loop over so many microbatches."""
    try:
        return read_step(module, microbatches).loop.trips == microbatches
    except ToolError:
        return False


def stage_step(module: ir.Module, stages: int, weigher: Weigher) -> Staged:
    """Rewrites a module so that stages stand apart, and assigns its ops to them.

    Raises a located ToolError where it cannot be cut into so many stages.
    """
    step = read_step(module)
    forward = find_forward(step, weigher)
    by_user = named_by_user(step, forward, stages)
    if by_user is not None:
        mark(step, by_user)
    else:
        _cut(module, step, forward, stages, weigher)
    if _has_backward_loops(module):
        SplitWeightGradientsPass().run(module, Diagnostics())
    staged = _assigned(module, stages, weigher)
    while take_apart(staged.step, staged.assignment):
        staged = _assigned(module, stages, weigher)
    return staged


def _assigned(module: ir.Module, stages: int, weigher: Weigher) -> Staged:
    step = read_step(module)
    forward = find_forward(step, weigher)
    return Staged(module, step, forward, assign(step, forward, marked(step, forward), stages))


def _cut(module: ir.Module, step: Step, forward: Forward, stages: int, weigher: Weigher) -> None:
    """Marks the ops of the forward with balanced stages, and cuts the loops over layers."""
    effects = Effects(functions_by_name(module))
    found = layer_loops(step.loop.block, effects)
    loops = layer_loops_by_node(step, found)
    units = units_of(step, forward, loops, weigher)
    cuts: Cuts = cut_units(units, stages, step.loop.op.location)
    mark(step, spans_by_stage(units.spans, cuts))
    counts: Mapping[int, tuple[int, ...]] = {
        index: cuts.counts(units.spans[index]) for index in sorted(forward.nodes & loops.keys())
    }
    for ranges in [each for each in counts.values() if len(each) > 1]:
        number = _first_uncut(module, ranges)
        SplitLayersPass(counts=ranges, loop=number).run(module, Diagnostics())


def _has_backward_loops(module: ir.Module) -> bool:
    block = region_block(module)
    effects = Effects(functions_by_name(module))
    return bool(backward_loops(layer_chains(block, effects), block, effects))


def _first_uncut(module: ir.Module, counts: tuple[int, ...]) -> int:
    """The number of the first loop that has not been cut over so many layers."""
    block = region_block(module)
    effects = Effects(functions_by_name(module))
    uncut = [loop for loop in layer_loops(block, effects) if range_of(loop.op) is None]
    return next(i for i, loop in enumerate(uncut) if loop.trips == sum(counts))
