"""Moves collectives of a loop to another iteration than their own, or out of the loop.

Compilers order independent ops within an iteration, but move none to another iteration. In an FSDP
layer scan, the first gather of each iteration therefore runs beside no compute, and all other ops
wait for it. With `direction=prefetch`, it runs an iteration ahead, beside the compute before:

    while (%i, %x) {
      %s = stablehlo.dynamic_slice %weights, %i          // of a loop-invariant stack
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

Preconditions:
  P1  Some collectives are explicit: a plain sharded jit export is partitioned first. Those that a
      partitioner has yet to add, along axes that are left free, are not considered.
  P2  Every communicating op is of a dialect that is understood.
  P3  No op has a token yet: thread-tokens comes after this pass.
  P4  `distance` is at least 1 and `memory-limit`, if given, positive.

Guarantees: the signature stays. Each collective runs for the same iterations as before, without an
additional one and with none out of range; `once` runs it for all rows that a loop may take.
`prefetch` and `delay` keep values bitwise: every op runs on the same values. `sink` and `once`
re-associate the sums of floats that they merge. Calls are inlined if the pass writes anything.

A loop stays unchanged, with a note of the reason under `explain`, if its trip count is not known
before the run (it must be at least one more than the iterations in flight). A collective stays if
its operand follows from the iteration before, or needs a dot or another costly op, or if its result
is needed in its own iteration.
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
    pipeline_loops,
)


@dataclass(frozen=True)
class PipelineCollectivesPass(Pass):
    """Collectives of a loop run in another iteration than their own, or outside of the loop.

    `direction`: `prefetch` (ahead), `delay` (late), `sink` (once, after the loop), `once` (before
    or after all loops that repeat it), or `auto`. `distance`: the number of iterations ahead or
    late (default: 1). `hardware`: the name or the file of the profile that `auto` predicts times
    for. `memory-limit`: the GiB that `auto` may need on a device (default: most of the device's
    memory for `once`, else the program's own need and the values in flight). `hold`: fences hold
    XLA:GPU to the planned schedule of these loops; XLA:TPU gets none. `explain`: a note for each
    collective of a loop, with the place where it runs, or the reason why it stays; one, if no loop
    has any.
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
        # An export for several platforms has a branch for each, with equal collectives.
        fold_equal_branches(draft)
        # XLA's converter from HLO writes copies and bitcasts between a collective and its users.
        write_as_values(draft)
        options = PipeliningOptions(self.direction, self.distance, hardware, limit, self.hold)
        work = pipeline_loops(draft, options)
        asked = self.direction != "auto"
        # A direction that the user asked for is written whatever it costs.
        left = work.changed and not asked and not is_better(work.module, module, hardware)
        if work.changed and not left:
            take_over(module, work.module)
        if self.explain:
            told = "the loops stay unchanged: XLA is expected to be as fast by itself"
            diagnostics.collected += [note(told, module.operation.location)] if left else work.notes


def communicate_once(module: ir.Module, hardware: Hardware) -> bool:
    """Moves repeated collectives before or after all loops around them, in place.

    Messages are not merged and no fences are written. Returns False if no collective moved.
    """
    return pipeline_loops(
        module, PipeliningOptions("once", 1, hardware, None, hold=False, merges=False)
    ).changed
