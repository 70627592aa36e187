"""Merges collectives of one form into one if that saves more latency than overlap does.

The overlap scheduler plans the buckets. Run the pass before `schedule-overlap`.

    %a = "stablehlo.all_reduce"(%x)                            // tensor<4x2xf32>
    %b = "stablehlo.all_reduce"(%y)                            // tensor<4x3xf32>
    ==>
    %xy = stablehlo.concatenate %x, %y, dim = 1
    %ab = "stablehlo.all_reduce"(%xy)                          // tensor<4x5xf32>
    %a = stablehlo.slice %ab [0:4, 0:2]
    %b = stablehlo.slice %ab [0:4, 2:5]

Preconditions:
  P1  Every communicating op is of a dialect that is understood; lower mhlo and sdy collectives
      first.
  P2  Replica groups name processes and mesh axes that the module has, none of them twice.
  P3  `memory-limit` is not negative, and some order of the program needs no more.
  P4  Every tensor has a known size: symbolic sizes cannot be timed.

Guarantees: the signature stays. Other ops keep their order, except users of a collective that is
merged into a later one. Calls are inlined only where something is merged. Values are bitwise as
before, NaNs too, except sums and products of floats, whose order may change.

Left unchanged: collectives that differ in more than their shapes (for exchanges, also in element
types); collectives that depend on one another; collectives in an async_start or a token chain,
without elements along their dimension, or with a mesh axis left free around them; collectives whose
data takes longer to copy than their latency. All stay if XLA is expected to be faster with its own
combiners. `explain` names the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.tasks.graph import is_faster
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import GIB, Diagnostic, Diagnostics, Severity, ToolError, note
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.bucket_collectives.merge_plan import (
    apply_buckets,
    plan_buckets,
    us,
)


@dataclass(frozen=True)
class BucketCollectivesPass(Pass):
    """Collectives of one form become one if that saves more latency than overlap does.

    `hardware`: the name or the file of the profile to plan for. `memory-limit`: the GiB that the
    plan may need on a device (default: 1 GiB more than the program's own order needs). `against`:
    the program that must not be faster than the buckets: as XLA schedules it, with its own
    combiners (`xla`), or as written (`text`). `explain`: a note for each bucket, and for each
    collective that is in none.
    """

    name: ClassVar[str] = "bucket-collectives"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.MERGE, ("against=text",))
    hardware: str = "h100"
    memory_limit: float | None = None
    against: Literal["xla", "text"] = "xla"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Plans on a copy of the module, and merges in place."""
        if self.memory_limit is not None and not self.memory_limit >= 0:
            raise ToolError(
                "bucket-collectives: memory-limit is a number of GiB, not negative (P3)",
                module.operation.location,
            )
        limit = None if self.memory_limit is None else self.memory_limit * GIB
        hardware = load_hardware(self.hardware)
        buckets, left_out = plan_buckets(module, hardware, limit)
        left = False
        if buckets:
            draft = copy_module(module)
            apply_buckets(draft, buckets)
            # XLA merges collectives with combiners of its own.
            left = self.against == "xla" and is_faster(module, draft, hardware)
            if not left:
                take_over(module, draft)
        if not self.explain:
            return
        if left:
            text = (
                f"{len(buckets)} buckets are left to XLA, which is expected to be faster with its "
                "own combiners"
            )
            diagnostics.collected.append(note(text, module.operation.location))
            return
        # A note for each bucket, with its members below, and for each collective left out.
        diagnostics.collected += [
            Diagnostic(
                Severity.NOTE,
                f"{len(bucket.members)} {bucket.kind}s became one: saves "
                f"{us(bucket.saved_ns)} of latency and adds {us(bucket.copied_ns)} of copies",
                bucket.at[0],
                tuple(note("another of them is here", place) for place in bucket.at[1:]),
            )
            for bucket in buckets
        ]
        diagnostics.collected += left_out
