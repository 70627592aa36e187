"""Turns a training step on a whole batch into a loop over microbatches that adds gradients up.

Values of samples then need memory for one microbatch only. Pipeline parallelism needs microbatches,
too.

    %h = stablehlo.dot_general %x, %w                        // 8 samples
    %g = stablehlo.dot_general %x, %dh, contracting [0] x [0]
    %new = optimizer(%w, %g)
  ==>
    %total = stablehlo.while(%i = 0, %sum = 0) {             // 4 microbatches
      %xi = stablehlo.dynamic_slice %x, %i …                 // 2 samples
      %h = stablehlo.dot_general %xi, %w
      %g = stablehlo.dot_general %xi, %dh, contracting [0] x [0]
      … %sum + %g …
    }
    %new = optimizer(%w, %total)

One loop holds all ops that run on samples, including whole loops over layers. Sums, maxima, minima
and counts over the batch become those over microbatches. An op that is linear in such a sum runs
after the loop, on the total; or on each term, if the loop then accumulates fewer bytes. Casts of
weights stay before the loop. The optimizer, norms of gradients and collectives on gradients run
once, after it.

Sample k is in microbatch k modulo `microbatches`, so each device cuts its own part of a batch that
is divided over a mesh axis. If the loop needs values of the whole batch, such as a number of
tokens, they are computed before it. They must follow without contractions from the batch, integers,
and floats of at most one dimension.

Preconditions:
  P1  There are at least two microbatches; `dimension` is given only with `arguments`.
  P2  The program has no tokens: thread-tokens comes last.
  P3  An argument that feeds most of the contractions with weights has a dimension that
      `microbatches` divide; after `partition`, on each device. `arguments` and `dimension` may name
      it.
  P4  No contraction of samples, and no opaque op on samples, depends on the whole batch. A
      batch-norm, a softmax over the batch, and an auxiliary loss that is not a sum over samples are
      refused by name.
  P5  No op that would run on each microbatch, or change its place, has an effect.
  P6  If gradients of convolutions run on microbatches with fewer samples than devices, partition
      runs later in the pipeline: XLA's own partitioner computes them wrongly.

Guarantees: the signature stays. The same ops compute samples, fewer at a time: bitwise as before if
the backend computes a row of a dot the same way for any number of rows. Sums over the batch are
sums over microbatches, in at least float32; integers are exact. Random numbers are drawn as before.

A second run cuts microbatches again. If a manual computation is the whole program, the loop is
written in its body. Calls are inlined.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import Spread, try_seeds
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.sharding_import import import_shardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.cleanup import erase_unused, fold_reshapes, link_loops
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.grouped_products import hide_products
from stablehlo_tools.ir.inline import copy_from_sources, inline_all_calls
from stablehlo_tools.ir.platform_index import own_argument
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage, When
from stablehlo_tools.transforms.parts.accumulate_gradients.accumulation_loop import (
    Meshes,
    devices_along,
    needed_later,
    uneven_arguments,
    write_loop,
)
from stablehlo_tools.transforms.parts.accumulate_gradients.batch_arguments import (
    find_division,
    given_division,
)
from stablehlo_tools.transforms.parts.accumulate_gradients.microbatch_division import (
    MicrobatchDivision,
    divide,
    division_note,
    free_whole_values,
)
from stablehlo_tools.transforms.parts.partition.plain_forms import batch_rows
from stablehlo_tools.transforms.parts.per_microbatch import drop_marks, estimate_sums
from stablehlo_tools.transforms.parts.routing import mark_routing, write_routing


@dataclass(frozen=True)
class AccumulateGradientsPass(Pass):
    """A plain training step becomes a loop over microbatches with accumulators.

    `microbatches`: the number of parts of the batch (default: 2). `arguments`: the numbers of the
    arguments that carry the batch, counted from 0 as in `main` (default: found by a search).
    `dimension`: the batch dimension of `arguments`. `per_microbatch`: if samples need a sum over
    the batch, such as an auxiliary loss, each microbatch computes it for itself, and what follows
    is averaged. `explain`: a note on the arguments that carry the batch, the ops that run on each
    microbatch, and the accumulated values.
    """

    name: ClassVar[str] = "accumulate-gradients"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.MICROBATCHES,
        ("microbatches=2", "microbatches=4", "microbatches=8"),
        When.TOO_LARGE,
    )
    microbatches: int = 2
    arguments: tuple[int, ...] = ()
    dimension: int = 0
    per_microbatch: bool = False
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        self.accumulate(module, diagnostics)

    def accumulate(
        self, module: ir.Module, diagnostics: Diagnostics, *, even: bool = False
    ) -> None:
        """Rewrites the module in place. With `even`, refuses microbatches with fewer samples than
        devices that share them (P3)."""
        self._check(module)
        copy = copy_module(module)
        # Shardings of older jax and of GSPMD have another form, which the analysis does not read.
        import_shardings(copy)
        hide_products(copy)
        inline_all_calls(copy)
        copy_from_sources(copy)
        # An export for several platforms has branches for each, which are mostly equal.
        fold_equal_branches(copy)
        # Then a backward loop reads the forward's stacks directly, not through reshapes.
        link_loops(copy)
        fold_reshapes(copy)
        batch_rows(copy)
        with ir.Location.unknown(copy.context):
            mark_routing(Function(entry_function(copy)).body)
        erase_unused(copy.body)
        block = Function(entry_function(copy)).body
        meshes = ModuleFacts.from_module(copy).meshes
        try:
            division = self._division(copy, meshes if even else None)
        except ToolError:
            if not self.per_microbatch:
                raise
            # Only statistics that the division needs for the whole batch are estimated.
            main = entry_function(copy)
            named = [own_argument(main, n, "accumulate-gradients: ", "P3") for n in self.arguments]
            diagnostics.collected += estimate_sums(
                block,
                self.microbatches,
                (named, self.dimension),
                asks="accumulate-gradients",
                stacks=False,
            )
            division = self._division(copy, meshes if even else None)
        effects = Effects(functions_by_name(copy))
        # The loop needs results of later ops, which move before it (`needed_later`).
        for node in (*division.gone, *division.inside, *needed_later(division)):
            if effects.has_effect(node.op):
                raise ToolError(
                    f"accumulate-gradients: {node.name} or an op in it has an effect, which would "
                    "happen on each microbatch, or earlier than now (P5)",
                    node.op.location,
                )
        if self.explain:
            diagnostics.collected.append(division_note(division))
        diagnostics.collected += uneven_arguments(division, meshes)
        with ir.Location.unknown(module.context):
            write_loop(division, meshes)
            drop_marks(block)
            write_routing(copy)
        erase_unused(copy.body)
        take_over(module, copy)

    def _check(self, module: ir.Module) -> None:
        wrong, instead = "", None
        given = f"microbatches={self.microbatches}"
        if self.microbatches < 2:
            wrong, instead = f"{given}: there must be at least two", (given, "microbatches=2")
        elif self.dimension and not self.arguments:
            wrong = (
                f"dimension={self.dimension} needs `arguments`, the numbers of the arguments that "
                "carry the batch"
            )
        if wrong:
            raise ToolError(
                f"accumulate-gradients: {wrong} (P1)", module.operation.location, instead=instead
            )
        refuse_tokens(module, "accumulate-gradients", "P2")

    def _division(self, module: ir.Module, meshes: Meshes | None) -> MicrobatchDivision:
        """Returns the division into microbatches; with `meshes`, each device must have the same
        number of samples. Raises ToolError."""
        main = entry_function(module)
        # The block that holds the step: that of `main`, or of a manual computation that is all of
        # it. `entries` are the values of its arguments outside.
        block: ir.Block = Function(main).body
        entries: Sequence[ir.Value] = list(block.arguments)
        first, *others = [view.operation for view in block.operations]
        if first.name == MANUAL_COMPUTATION and len(others) == 1:
            block, entries = ManualComputation(first).body, list(first.operands)
        graph = Graph.from_block(block)
        # The positions at which the block receives the named arguments of `main`.
        places: list[int] = []
        for number in self.arguments:
            named = own_argument(main, number, "accumulate-gradients: ", "P3")
            places += [place for place, entry in enumerate(entries) if entry == named]
        spread: Spread | None = None
        if meshes is not None:
            spread = functools.partial(devices_along, block, meshes)
        if places:
            division = given_division(
                graph, places, self.dimension, self.microbatches, main.location
            )
        else:
            division = find_division(graph, self.microbatches, main.location, spread)
        # Rematerialisation puts weights and samples into one barrier, which binds the two together.
        if not free_whole_values(division):
            return division
        # The rewritten barriers invalidate the division: divide again by the same batch.
        again = try_seeds(
            Graph.from_block(block), division.trial.seeds, self.microbatches, regroups=True
        )
        return divide(again)
