"""Folds a program that is a pipeline already to the plain loop over layers that it computes.

A model that its author wrote as a pipeline runs one schedule. Folded, it is a loop over layers on
the whole batch again, and `expand-pipeline` can expand it to any schedule.

    %out:4 = stablehlo.while(%own, %tick, %arriving, %outputs) {     // in a manual computation
      %in = stablehlo.select %is_first, %microbatch[%tick], %arriving
      %y = stage(%own, %in)
      %sent = "stablehlo.collective_permute"(%y)
      %kept = stablehlo.dynamic_update_slice %outputs, %y, %tick - 1
    }
  ==>
    %batch = stablehlo.reshape %x : (tensor<3x2x4xf32>) -> tensor<6x4xf32>
    %out:3 = stablehlo.while(%weights, %layer, %h = %batch) {
      %y = stage(%weights[%layer], %h)
    }

The pass finds a pipeline by its computation, not by names. It computes the integers that steer the
loop (ticks, ranks, entries of tables) for every tick and rank. From the outputs, it follows values
back through ops that only move them: selects, branches, slices and updates at known positions,
permutes between ranks, and rotations of a dimension. The result is a chain of stages for each
microbatch; ramp-up and ramp-down are not part of it. Ranks may be devices of a mesh axis
(`shard_map`, or the output of `expand-pipeline`) or positions along a dimension of one program's
state (praxis, MaxText). Microbatches may go around any number of times.

A stage that is a loop over its layers gives one loop over all layers. A differentiated stage may
have its layers written out, if all compute the same function. Any other stage is one layer. Ops
before the first stage and after the last run on the whole batch. If a stage combines the samples of
a microbatch, a loop over microbatches goes around the loop over layers.

A training step folds together with its backward, to a loop over the layers that stores the
residuals of each, and one in reverse that computes the gradients of each. Manual axes of data or
tensor parallelism are left to the partitioner: values that devices hold in part become whole, and
collectives over these axes are removed.

Sums over ticks become sums over microbatches. In ramp-up and ramp-down, the pipeline multiplies
unused values by zero cotangents; the pass assumes that these values are finite. If one is not, the
gradients of the pipeline are NaN, and those of the loop are right.

Preconditions:
  P1  No op of the pipeline has a token or a side effect.
  P2  The number of iterations of the loop is known.
  P3  Between ranks, along one axis of the mesh, values are only moved. No stage computes with a
      value that another one computes in the same tick; if the stages are along a dimension, each
      computes its own part. Manual computations along other axes can be written for all of their
      devices: an all_reduce joins the terms of a sum before any op that is not linear, and no value
      depends on the position of a device along them. A loop for which this fails stays, with a
      warning.
  P4  Stages compute the values that leave the pipeline, each element on one rank. None is a sum
      over all ranks, and none is masked by a product with zero (garbage may be NaN).
  P5  All microbatches go through equally many stages, with the same weights, and a stage takes its
      input from one other stage. Its other operands depend on the stage or on the microbatch.
  P6  If the pipeline is differentiated, one second loop, its backward, reads the residuals of its
      ticks: a cell of it those of the same microbatch and stage. The gradients of weights are sums
      over its ticks that start from zero: one for each layer that a stage runs in turn. No carry
      starts from infinity or NaN.

Guarantees: the signature stays. The same ops compute values, on more samples: bitwise as before if
the backend computes a row of a dot the same way for any number of rows, except that a masked sum
may have turned -0.0 into 0.0. Gradients are sums over the whole batch, added in another order.
Weights keep the order of their storage if that is the order of the layers. Calls are inlined if a
loop is folded. A program without a pipeline stays unchanged, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note, warning
from stablehlo_tools.ir.cleanup import drop_unused_carries, share_all
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.fold_pipeline.folded_training import (
    fold_training,
    settle_integers,
)
from stablehlo_tools.transforms.parts.fold_pipeline.folding import fold
from stablehlo_tools.transforms.parts.fold_pipeline.global_moves import (
    permutes_inside,
    write_copying_loops_as_moves,
    write_moves_globally,
)
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import (
    LoopRegion,
    Ranks,
    manual_around,
)
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import (
    add_terms_first,
    axis_of,
    backward_of,
    entering_alike,
    erase_open_constraints,
    hoist_slices,
    loops_of,
    may_be_pipeline,
    multiply_instead_of_adding_alike,
    part_integers,
    region_of,
    separate_backward,
    take_from_outside,
)
from stablehlo_tools.transforms.parts.fold_pipeline.rejoining import rejoin
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import SameStageError
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import UnresolvedError
from stablehlo_tools.transforms.parts.free_axes import NotFreeError, free_axes


@dataclass(frozen=True)
class FoldPipelinePass(Pass):
    """Pipelines become the plain loops over layers that they compute.

    `explain`: a note for each loop that is a pipeline, with its number of stages.
    """

    name: ClassVar[str] = "fold-pipeline"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.FOLD)
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        refuse_tokens(module, "fold-pipeline", "P1")
        current = copy_module(module)
        inline_all_calls(current)
        with ir.Location.unknown(module.context):
            # First of all: otherwise each stage would contain a copying loop.
            write_copying_loops_as_moves(current, Function(entry_function(current)).body)
        number, folded, stay = 0, list[Diagnostic](), list[Diagnostic]()
        while number < len(loops := _loops(current)):
            loop = loops[number]
            with ir.Location.unknown(module.context):
                tried, stages = current, 0
                try:
                    tried, stages = _try_fold(current, number)
                except NotFreeError as error:
                    stay.append(
                        warning(
                            "fold-pipeline: a loop with permutes stays, because the manual axis "
                            f'"{error.axis}" around it cannot be left to the '
                            f"partitioner: {error.op.name}: {error} (P3)",
                            error.op.location,
                        )
                    )
            # A fold changes the loops of the module, so `number` stays and is tried again.
            if stages < 2:
                number += 1
                continue
            folded.append(note(f"fold-pipeline: a pipeline of {stages} stages", loop.location))
            current = tried
        diagnostics.collected += stay
        if not folded and not stay:
            diagnostics.warn(
                "fold-pipeline: nothing is folded: no loop sends its results to the next device by "
                "collective_permute, or moves them along a dimension of its state as jnp.roll "
                "does; stages that are written out one after the other are not searched for",
                entry_function(module).location,
            )
        if not folded:
            return
        if self.explain:
            diagnostics.collected += folded
        values = DeviceValues(current, ModuleFacts.from_module(current))
        rejoin(Function(entry_function(current)).body, values)
        share_all(current)
        drop_unused_carries(Function(entry_function(current)).body)
        take_over(module, current)


def _loops(module: ir.Module) -> list[ir.Operation]:
    return list(loops_of(Function(entry_function(module)).body))


def _try_fold(module: ir.Module, number: int) -> tuple[ir.Module, int]:
    """Returns a copy of a module with a loop folded, and the number of its stages; below two, it is
    not a pipeline. Raises ToolError, or NotFreeError if the loop is in a manual computation whose
    other axes cannot be left to the partitioner."""
    loop = _loops(module)[number]
    between = permutes_inside(loop)
    if between:
        # In a copy, write manual computations in loops that only move elements as moves of whole
        # tensors. The loop may then be a pipeline in one program.
        copied = copy_module(module)
        block = Function(entry_function(copied)).body
        write_moves_globally(copied, block)
        # A tick may read slots of a buffer by integers that the pipeline keeps.
        region = _region(_loops(copied)[number], copied)
        if region is not None:
            backward = backward_of(region.loop, region.ticks)
            if backward is not None:
                settle_integers(region, backward)
        # Integers that are settled now may decide more of the moves.
        write_moves_globally(copied, block)
        part_integers(_loops(copied)[number])
        drop_unused_carries(block)
        module = copied
    elif may_be_pipeline(loop):
        module = _alone(module, number)
    if not may_be_pipeline(_loops(module)[number]):
        return module, 0
    return _fold_loop(module, number, between)


def _alone(module: ir.Module, number: int) -> ir.Module:
    """Returns a module in which the manual computations of a loop and its backward are over the
    axis of the stages alone: a copy if they are over other axes, too. Raises NotFreeError."""
    loop = _loops(module)[number]
    manual = manual_around(loop)
    if manual is None or len(manual_axes(manual)) == 1:
        return module
    ranks = axis_of(loop, manual, ModuleFacts.from_module(module))
    if ranks is None:
        return module
    copied = copy_module(module)
    around = manual_around(_loops(copied)[number])
    assert around is not None
    free_axes(copied, [around], ranks.axis)
    return copied


def _fold_loop(module: ir.Module, number: int, between: bool) -> tuple[ir.Module, int]:
    """Returns a copy of a module with a loop folded, if it is a pipeline, and with its backward if
    it has one. Also returns the number of stages; below two, the loop is not a pipeline.

    `between`: the loop moves elements between devices, as no other loop with a backward does.
    Raises ToolError.
    """
    tried = copy_module(module)
    loop = _loops(tried)[number]
    region = _region(loop, tried)
    if region is None or not region.ticks:  # a loop that never runs passes nothing on
        return tried, 0
    # Gradients that are taken inside of shard_map share its manual computation.
    if separate_backward(region):
        loop = _loops(tried)[number]
        region = _region(loop, tried)
        assert region is not None
    anchor = region.manual or loop
    effect = _effect(anchor)
    backward, refusal = backward_of(anchor, region.ticks), None
    if backward is not None:
        effect = effect or _effect(manual_around(backward) or backward)
        copied = copy_module(module)  # a failed attempt leaves `tried` half rewritten
        try:
            stages = _fold_training(region, backward, tried)
        except UnresolvedError as unresolved:
            refusal = ToolError(
                f"fold-pipeline: a pipeline and its backward are not understood: {unresolved} "
                f"(P{unresolved.rule}); fold the forward program before it is differentiated",
                unresolved.op.location,
                (
                    note("the pipeline is here", loop.location),
                    note("its backward", backward.location),
                ),
            )
        else:
            if effect is not None:
                raise effect
            return tried, stages
        tried = copied
        loop = _loops(tried)[number]
        region = _region(loop, tried)
        assert region is not None
    try:
        stages = fold(region, tried)
    except SameStageError as error:
        if refusal is None or not (error.partial or between):
            return tried, 0
        raise refusal from None
    except UnresolvedError as unresolved:
        raise refusal or unresolved.error() from None
    if refusal is not None and stages > 1:
        raise refusal
    if stages > 1 and effect is not None:
        raise effect
    return tried, stages


def _fold_training(forward: LoopRegion, loop: ir.Operation, module: ir.Module) -> int:
    """Folds a pipeline and the loop that is its backward; returns the number of stages. Raises
    UnresolvedError."""
    settle_integers(forward, manual_around(loop) or loop)
    # A stage may use a weight several times; its gradients are then one term a tick.
    add_terms_first(loop)
    backward = _region(loop, module)
    if backward is None:
        raise UnresolvedError("the backward moves no value along the axis of the stages", loop, 6)
    if multiply_instead_of_adding_alike(backward, entering_alike(forward, backward)):
        backward = _region(loop, module)
        assert backward is not None
    return fold_training(forward, backward, module)


def _effect(anchor: ir.Operation) -> ToolError | None:
    """Returns the refusal of an op with a side effect in a loop; None if there is none."""
    effects, op = Effects({}), anchor
    if not effects.has_effect(op):
        return None
    while len(op.regions):
        blocks = [block for region in op.regions for block in region.blocks]
        op = next(inner for block in blocks for inner in effects.in_block(block))
    return ToolError(
        f"fold-pipeline: {op.name} in a pipeline has a side effect, and also runs in ticks whose "
        "results are unused (P1)",
        op.location,
    )


def _region(loop: ir.Operation, module: ir.Module) -> LoopRegion | None:
    """Returns a loop as the region of a pipeline; None if it cannot be one. Raises ToolError if its
    number of trips is unknown."""
    manual = manual_around(loop)
    if manual is not None:
        # jax writes these wherever a mesh axis is automatic.
        erase_open_constraints(manual)
    facts = ModuleFacts.from_module(module)
    ranks = Ranks.single(facts) if manual is None else axis_of(loop, manual, facts)
    if ranks is None:
        return None
    # Otherwise the loop over layers would hold the weights of all chunks.
    hoist_slices(loop)
    take_from_outside(loop)
    region = region_of(loop, ranks, DeviceValues(module, facts))
    if isinstance(region, LoopRegion):
        return region
    if manual is None:
        return None
    raise ToolError(
        f"fold-pipeline: the number of iterations of the loop is unknown: {region} (P2)",
        loop.location,
    )
