"""Turns a loop over the layers of a model into a pipeline over a mesh axis.

The model is a `lax.scan` over stacked weights, without code for stages or microbatches; options
choose the schedule of the exported program. Each rank of the axis gets chunks of consecutive
layers, the batch is cut into microbatches, and activations are sent from rank to rank.

    %y = stablehlo.while(%weights, %x) {                     // 8 layers, on all devices
      %w = stablehlo.dynamic_slice %weights, %layer …
      … layer(%h, %w) …
    }
  ==>
    %y = sdy.manual_computation(%table, %weights, %x) … manual_axes={"stage"} {
      stablehlo.while(%received) {                           // ticks: microbatches + ranks - 1
        %cell = stablehlo.dynamic_slice %table, %tick …      // what this rank does now
        %in = stablehlo.select %cell.received, %received, %microbatch_of_x
        %out = stablehlo.while(%in) { … layer … }            // 2 layers, on each of 4 ranks
        %sent = "stablehlo.collective_permute"(%out)
      }
    }

`gpipe` and `circular` make a pipeline of each loop: first the forward, then the backward. `1f1b`
and `eager-1f1b` make one of both loops, with the head and loss between them. A microbatch's
backward begins as soon as its forward ends, so residuals are kept only for the microbatches in
flight.

Sample k of every `microbatches` goes into microbatch k, so each device cuts its own part of a batch
that is divided over another axis. Values without a batch are sent along whole. Other mesh axes are
left to a partitioner.

Preconditions:
  P1  A mesh of the program has `axis`, of at least two ranks; the program runs as one replica.
  P2  The program has a loop that reads one row of stacked weights, or a fixed number of rows, an
      iteration, in order or in reverse. It has static shapes, no side effects, and at least one
      iteration for each chunk. In a manual computation over other axes than that of the stages,
      one program can compute the values of all its devices: an all_reduce joins the terms of a sum
      before any op that is not linear, and no value depends on the device. No tokens: thread-tokens
      comes last.
  P3  An argument has a dimension that `microbatches` divide, and all such loops carry it from one
      iteration to the next; `arguments` and `dimension` may name it.
  P4  No layer mixes samples: batch-norm, tokens that compete for an expert's room across the batch,
      or an auxiliary loss that is not a sum over samples are refused by name.
  P5  `repeats` is 1 for gpipe, `head` is auto except for 1f1b and eager-1f1b, and no option is out
      of its range.
  P6  The carries of an iteration are integers, booleans or real floats.
  P7  For 1f1b and eager-1f1b: each forward loop has a backward loop that reads its residuals in
      reverse order. The loss that the backward loops need is a sum over samples. A count of tokens
      may divide it. No loop needs another loop's results for all samples at once. With
      head=divided: all products of the head are cut along one dimension of the last layer's output,
      and the loss is a sum over that, too.
  P8  For layout=pipeline: all chunks have equally many layers. Ops on stacks of weights outside of
      the loops treat each layer in the same way, or sum over all; no slices of single layers, no
      stacks made of them.

Guarantees: the signature stays, except the order of layers and the shardings with layout=pipeline.
The same ops compute samples, fewer at a time: bitwise as before if the backend computes a row of a
dot the same way for any number of rows. Sums over the batch, including gradients of weights, are
sums over microbatches, in at least float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.collectives import meshes_of
from stablehlo_tools.analysis.sharding_import import import_shardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.names import COLLECTIVE_PERMUTE
from stablehlo_tools.ir.cleanup import (
    erase_unused,
    fold_broadcasts,
    fold_reshapes,
    link_loops,
    share_common,
)
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.grouped_products import hide_products
from stablehlo_tools.ir.inline import copy_from_sources, inline_all_calls
from stablehlo_tools.ir.platform_index import own_argument
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, ops_named
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage, When
from stablehlo_tools.schedules.catalogue import entries
from stablehlo_tools.transforms.parts.expand_pipeline.emit import PlanWriter
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    TRAINING,
    ExpansionOptions,
    ExpansionPlan,
    exchange_notes,
    explain_pipeline,
    plan_expansion,
)
from stablehlo_tools.transforms.parts.expand_pipeline.stack_orders import StackOrders, orders_of
from stablehlo_tools.transforms.parts.expand_pipeline.stage_axis import drop_stage_axis
from stablehlo_tools.transforms.parts.free_axes import free_axes_of_layers
from stablehlo_tools.transforms.parts.partition.plain_forms import batch_rows
from stablehlo_tools.transforms.parts.per_microbatch import drop_marks, estimate_sums
from stablehlo_tools.transforms.parts.routing import mark_routing, write_routing


def free_layers(module: ir.Module, stages: str, asks: str, rule: str) -> None:
    """Inlines calls, leaves the axes of loops over layers to the partitioner, and the axis of the
    stages out of manual computations in layers, in place.

    `stages` is the axis of the pipeline. Raises a located ToolError of the pass `asks`, with its
    `rule`, if a shard_map around the layers cannot be dissolved.
    """
    import_shardings(module)
    inline_all_calls(module)
    copy_from_sources(module)
    free_axes_of_layers(module, stages, asks, rule)
    drop_stage_axis(module, stages, asks, rule)


@dataclass(frozen=True)
class ExpandPipelinePass(Pass):
    """A loop over layers becomes a pipeline over a mesh axis: GPipe, interleaved or 1F1B.

    `axis`: the mesh axis whose ranks get the layers. `microbatches`: the number of parts of the
    batch (default: one for each rank). `repeats`: the number of chunks of layers on each rank.
    `skip`: a rank without work in a tick runs no layers; auto does so only for 1f1b and eager-1f1b,
    if no layer has a collective_permute. `arguments`: the numbers of the arguments that carry the
    batch, counted from 0 as in `main` (default: found by a search). `dimension`: the batch
    dimension of `arguments`. `layout`: the order of stacks of layers in arguments and results, that
    of the layers or that of the ranks. `head`: for 1f1b and eager-1f1b, each rank runs a part of
    the head, or the last rank all of it; auto divides it if that is worth the transfers.
    `per_microbatch`: if samples need a sum over the batch, such as an auxiliary loss, each
    microbatch computes it for itself, and the results are averaged. `explain`: notes on the layers
    of each rank, the ticks and the memory.
    """

    name: ClassVar[str] = "expand-pipeline"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.PIPELINE,
        (
            "axis={axis} schedule=eager-1f1b",
            "axis={axis} schedule=1f1b",
            "axis={axis} schedule=circular repeats=2",
            "axis={axis} schedule=gpipe",
        ),
        When.ASKED,
    )
    axis: str = "stage"
    microbatches: int = 0
    repeats: int = 1
    schedule: Literal["gpipe", "circular", "1f1b", "eager-1f1b"] = "gpipe"
    skip: Literal["auto", "true", "false"] = "auto"
    arguments: tuple[int, ...] = ()
    dimension: int = 0
    layout: Literal["layers", "pipeline"] = "layers"
    head: Literal["auto", "divided", "last"] = "auto"
    per_microbatch: bool = False
    explain: bool = False

    @classmethod
    def done_elsewhere(cls, options: Mapping[str, str], option: str) -> tuple[str, str] | None:
        """Returns a message and a command for schedules that need a program for each rank, which
        expand-mpmd writes; None for other options."""
        named = {each.name for each in entries() if each.training and not each.sliced}
        value = options[option]
        if option != "schedule" or value not in named:
            return None
        axis, count = options.get("axis", cls.axis), options.get("microbatches", "8")
        words = f"--schedule {value} --pipeline-axis {axis} --microbatches {count}"
        said = f"expand-mpmd runs {value}, with a program for each rank"
        return said, f"stablehlo-tools expand-mpmd INPUT -o ranks {words}"

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        copy = self._prepare_copy(module)
        with ir.Location.unknown(module.context):
            plan = self._plan(copy, diagnostics)
            diagnostics.collected += plan.warnings
            if self.explain:
                diagnostics.collected += map(explain_pipeline, plan.pipelines)
            # With layout=layers stacks keep their order, and the program exchanges chunks.
            orders = orders_of(plan) if self.layout == "pipeline" else ()
            writer = PlanWriter(copy, plan, orders)
            writer.run()
            if self.explain:
                diagnostics.collected += exchange_notes(writer.exchanges)
            drop_marks(Function(entry_function(copy)).body)
            write_routing(copy)
        erase_unused(copy.body)
        share_common(copy)
        take_over(module, copy)

    def stack_orders(self, module: ir.Module) -> StackOrders:
        """Returns the order in which layout=pipeline puts the layers of a module, which is not
        changed. Raises ToolError if the pass would."""
        copy = self._prepare_copy(module)
        with ir.Location.unknown(module.context):
            plan = self._plan(copy, Diagnostics())
            return StackOrders(plan.axis, orders_of(plan))

    def _prepare_copy(self, module: ir.Module) -> ir.Module:
        """Returns a copy in the form that the plan needs. Raises ToolError."""
        self._check(module)
        copy = copy_module(module)
        hide_products(copy)
        with ir.Location.unknown(module.context):
            free_layers(copy, self.axis, "expand-pipeline", "P2")
        # Then a loop reads the stacks of another one directly, not through reshapes.
        link_loops(copy)
        fold_reshapes(copy)
        fold_broadcasts(copy)
        batch_rows(copy)
        with ir.Location.unknown(copy.context):
            mark_routing(Function(entry_function(copy)).body)
        erase_unused(copy.body)
        return copy

    def _plan(self, module: ir.Module, diagnostics: Diagnostics) -> ExpansionPlan:
        """Returns the plan; if the option says so, with statistics of each microbatch where it
        needs those of the batch. Raises ToolError."""
        options = self._options(module)
        try:
            return plan_expansion(module, options)
        except ToolError:
            if not self.per_microbatch:
                raise
        main = entry_function(module)
        sizes = (dict(mesh.axes).get(self.axis, 1) for mesh in meshes_of(module).values())
        named = [own_argument(main, n, "expand-pipeline: ", "P3") for n in self.arguments]
        diagnostics.collected += estimate_sums(
            Function(main).body,
            self.microbatches or max(sizes, default=1),
            (named, self.dimension),
            asks="expand-pipeline",
            stacks=True,
        )
        return plan_expansion(module, options)

    def _options(self, module: ir.Module) -> ExpansionOptions:
        skip = self.skip == "true"
        if self.skip == "auto" and self.schedule in TRAINING:
            # All devices run a permute together, so a rank cannot skip a layer that has one. With
            # other schedules, a rank that skips its layers would only wait for the others.
            skip = not ops_named(module.operation, {COLLECTIVE_PERMUTE})
        return ExpansionOptions(
            self.axis,
            self.microbatches,
            self.repeats,
            self.schedule,
            skip,
            self.arguments,
            self.dimension,
            self.head,
        )

    def _check(self, module: ir.Module) -> None:
        wrong: str | None = None
        if self.microbatches < 0:
            wrong = f"microbatches={self.microbatches}: there must be at least one"
        elif self.repeats < 1:
            wrong = f"repeats={self.repeats}: each rank holds at least one chunk of layers"
        elif self.schedule == "gpipe" and self.repeats > 1:
            wrong = (
                f"repeats={self.repeats} with schedule=gpipe, which has one chunk on each rank: "
                "use schedule=circular"
            )
        elif self.head != "auto" and self.schedule not in TRAINING:
            wrong = (
                f"head={self.head} with schedule={self.schedule}, which runs the head after the "
                "pipeline: use schedule=1f1b or schedule=eager-1f1b"
            )
        elif self.dimension and not self.arguments:
            wrong = (
                f"dimension={self.dimension} needs `arguments`, the numbers of the arguments that "
                "carry the batch"
            )
        if wrong is not None:
            raise ToolError(f"expand-pipeline: {wrong} (P5)", module.operation.location)
        refuse_tokens(module, "expand-pipeline", "P2")
