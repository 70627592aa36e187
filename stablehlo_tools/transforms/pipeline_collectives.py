"""Lets collectives of a loop run in another iteration than the one that they are written in.

Compilers order what is independent within an iteration, but move nothing from one to another: the
first gather of each iteration of an FSDP layer scan waits for nothing and is waited for by all.

`prefetch` issues a collective, with all that it needs, an iteration ahead. Its result travels
through the carry; the first is issued before the loop, the last iteration runs behind it:

    while (%i, %x) {
      %s = stablehlo.dynamic_slice %weights, %i          // of what does not change in the loop
      %g = "stablehlo.all_gather"(%s)
      %y = stablehlo.dot_general %x, %g
    }
  ==>
    %g0 = "stablehlo.all_gather"(%weights[0])
    while (%i = 1, %x, %g = %g0) {
      %y = stablehlo.dot_general %x, %g                  // iteration %i - 1
      %s = stablehlo.dynamic_slice %weights, %i
      %next = "stablehlo.all_gather"(%s)                 // hidden by the dot
    }
    %z = stablehlo.dot_general %x, %g                    // the last iteration

`delay` lets a collective whose result only leaves the loop run during the next iteration: what it
sends travels through the carry instead, the last one runs behind the loop. `sink` lets it run once
behind the loop, where that gives the same: a sum of sums (`%sum + all_reduce(%gradient)`) is one
all_reduce of the sum, what is written to the rows of a buffer is one collective of all rows, and
of what is overwritten only the last counts. What sends the same in every iteration runs once before
the loop (`prefetch` and `auto`). `once` does what loops around it would repeat once for all of
them: weights of layers are gathered, all rows at once, before a loop over microbatches, and their
gradients reduced behind it; so are those of a branch in the loop, such as the head of a pipeline,
which is due in some of the ticks. `auto` takes what is predicted to be fastest within memory.

Preconditions:
  P1  Some collectives are explicit: a plain sharded jit export is partitioned first. Those that a
      partitioner has yet to add, along axes that are left free, stay out of sight.
  P2  Every communicating op is of a dialect that is understood.
  P3  No op has a token yet: thread-tokens comes after this pass.
  P4  `distance` is at least 1 and `memory-limit`, if given, positive.

Guarantees: the signature as it was. Each collective runs for the same iterations as before, none
out of range, none in vain; `once` runs it for all rows that a loop may take. `prefetch` and `delay`
keep values bitwise: every op is run on the same values. `sink` and `once` re-associate the sums of
floats that they take together.

A loop is left as it is, with a note of the reason under `explain`, where its trip count is not
known before the run (it has to be at least one more than the iterations in flight), and a
collective where what it sends follows from the iteration before, needs a dot or another costly op,
or its result is needed there. Calls are inlined where the pass writes anything. docs/loops.md has
what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.partitioner_work import refuse_unpartitioned
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import GIB, Diagnostics, ToolError, note
from stablehlo_tools.ir.cleanup import write_as_values
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.pipeline_collectives.pipelining import (
    PipeliningOptions,
    is_better,
    pipelined,
)


@dataclass(frozen=True)
class PipelineCollectivesPass(Pass):
    """Lets collectives of a loop run in another iteration than the one that they are written in.

    `direction`: `prefetch` (ahead), `delay` (late), `sink` (once, behind the loop), `once` (before
    or behind all loops that repeat it), or `auto`.
    `distance`: how many iterations ahead or late. `hardware`: the name or the file of the profile
    that `auto` predicts times for. `memory-limit`: the GiB that `auto` may need on a device;
    without it, what the device has. `explain`: a note for each collective of a loop, where it runs
    and why it stays; one, where no loop has any.
    """

    name: ClassVar[str] = "pipeline-collectives"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.LOOPS,
        ("", "direction=prefetch", "direction=sink", "direction=prefetch hold=false"),
    )
    direction: Literal["prefetch", "delay", "sink", "once", "auto"] = "auto"
    distance: int = 1
    hardware: str = "h100"
    memory_limit: float | None = None
    hold: bool = True
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and replaces the module by it if it changed.

        With `auto`, only if XLA is expected to run it faster.
        """
        hardware = load_hardware(self.hardware)
        location = module.operation.location
        if self.distance < 1:
            raise ToolError("pipeline-collectives: distance is at least 1 (P4)", location)
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ToolError(
                "pipeline-collectives: memory-limit is a positive number of GiB (P4)", location
            )
        if not find_collectives(module):
            refuse_unpartitioned(module, "pipeline-collectives", "P1")
        refuse_tokens(module, "pipeline-collectives", "P3")
        limit = None if self.memory_limit is None else self.memory_limit * GIB
        draft = copy_module(module)
        inline_all_calls(draft)
        fold_equal_branches(draft)
        write_as_values(draft)
        options = PipeliningOptions(self.direction, self.distance, hardware, limit, self.hold)
        work = pipelined(draft, options)
        asked = self.direction != "auto"
        left = work.changed and not asked and not is_better(work.module, module, hardware)
        if work.changed and not left:
            take_over(module, work.module)
        if self.explain:
            told = "the loops stay as they are: XLA is expected to be as fast by itself"
            diagnostics.collected += [note(told, module.operation.location)] if left else work.notes


def communicate_once(module: ir.Module, hardware: Hardware) -> bool:
    """Moves repeated collectives before or after all loops around them, in place.

    Messages are not merged and no fences are written. Returns False if no collective moved.
    """
    return pipelined(
        module, PipeliningOptions("once", 1, hardware, None, hold=False, merges=False)
    ).changed
