"""Replaces an all_reduce of which each device takes its own part by a reduce_scatter.

That is what partitioners leave where a sum is wanted in shards; it sends twice the bytes and holds
the whole. The part is recognised by its value: what follows from `partition_id`, `replica_id` and
constants is computed for every device.

    %r = "stablehlo.all_reduce"(%x)                      // of tensor<32x64xf32>, 4 devices
    %d = stablehlo.partition_id
    %s = stablehlo.dynamic_slice [0, 8, 16, 24], %d
    %y = stablehlo.dynamic_slice %r, %s, 0               // to tensor<8x64xf32>
  ==>
    %y = "stablehlo.reduce_scatter"(%x) {scatter_dimension = 0}

Where other devices are summed over too, an all_reduce of the part follows; where several
dimensions are cut, several reduce_scatters. Reshapes, transposes, broadcasts and exact elementwise
ops between the two are done on the part. Likewise

- an all_gather of which each device takes its own part goes; one of which it takes a larger part,
  its own among them, gathers in smaller groups; one of which it takes another's part becomes a
  collective_permute;
- an all_gather that is padded, and of which one device of each group then takes all and the others
  nothing, becomes collective_permutes to that device (of groups of at most eight);
- an all_to_all that undoes another goes, and layout ops between them stay;
- an all_gather, all_to_all or collective_permute of a constant that is the same for all elements
  becomes a constant;
- an all_gather that repeats an earlier one goes, unless an option says otherwise.

What becomes unused goes too: the slice and the computation of its offset.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Replica groups of what could be rewritten name processes and mesh axes that the module has,
      none of them twice.
  P3  `memory-limit` goes with `share-gathers`, and is not negative.

Guarantees: the signature as it was, and the order of the collectives that stay; a second run
changes nothing. Values bitwise as before, but for sums and products of floats: a reduce_scatter
may add in another order than the all_reduce did, and a device's part of a sum over two axes is
summed over one of them first.

Left as they are: a slice in another block than its collective; a result that is also used otherwise
(of an all_reduce); sums of complex numbers, which XLA:TPU cannot scatter; groups that are not
equally large or leave a device out; parts that are no equal chunks or are taken by some devices
more often than by others; static slices and masks; offsets that depend on data or on a loop's
counter; a barrier or token in between; groups that the collective's channel and mode cannot
express, or of several replicas and several partitions, whose order the specification and XLA do not
agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.road import Milestone, Stage
from stablehlo_tools.transforms.parts.create_reduce_scatter.chunked import Chunked, plan_chunked
from stablehlo_tools.transforms.parts.create_reduce_scatter.exchanges import (
    Constant,
    Inverse,
    Padded,
    plan_constant,
    plan_inverse,
    plan_padded,
    plan_sharing,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.rewriting import (
    GroupForms,
    drop_unused_results,
    erase_unused,
)

_CHUNKED = frozenset({"all_reduce", "all_gather"})
_COPYING = frozenset({"all_gather", "all_to_all", "collective_permute"})


@dataclass(frozen=True)
class CreateReduceScatterPass(Pass):
    """All_reduces and all_gathers of which each device takes a part become smaller.

    `share-gathers`: an all_gather that repeats an earlier one uses its result, which lives longer.
    `share-gathers=false` gathers again at each use, as FSDP wants it for its weights; where
    `jax.checkpoint` says so, a barrier keeps the two apart anyway. `memory-limit`: at most so many
    bytes a device are kept longer, of all gathers together; 0 for no limit. With a limit, gathers
    that are shared are marked, for a second run to count them.
    """

    name: ClassVar[str] = "create-reduce-scatter"
    milestone: ClassVar[Milestone | None] = Milestone(Stage.SMALLER, ("", "share-gathers=false"))
    share_gathers: bool = True
    memory_limit: int = 0

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place, until nothing is left to do."""
        self._check_options(module)
        while plans := _plan(module):
            _apply(plans, module)
        if self.share_gathers:
            collectives = find_collectives(module)
            forms = GroupForms(ModuleFacts.of(module, collectives))
            for shared in plan_sharing(collectives, forms, self.memory_limit):
                shared.apply()

    def _check_options(self, module: ir.Module) -> None:
        if self.memory_limit and not self.share_gathers:
            raise ToolError(
                "create-reduce-scatter: memory-limit limits what share-gathers keeps, and that is "
                "off (P3)",
                module.operation.location,
            )
        if self.memory_limit < 0:
            raise ToolError(
                "create-reduce-scatter: memory-limit is a number of bytes, not negative (P3)",
                module.operation.location,
            )


Plan = Chunked | Inverse | Constant | Padded


def _plan(module: ir.Module) -> list[Plan]:
    """Rewrites that do not touch each other's ops, in program order."""
    collectives = find_collectives(module)
    facts = ModuleFacts.of(module, collectives)
    forms, values = GroupForms(facts), DeviceValues(module, facts)
    by_result: dict[ir.Value, Collective] = {
        result: c for c in collectives for result in c.op.results
    }
    plans: list[Plan] = []
    touched: set[ir.Value] = set()
    for collective in collectives:
        if collective.is_async:
            continue
        for plan in _candidates(collective, forms, values, by_result):
            if touched.isdisjoint(plan.touched):
                plans.append(plan)
                touched.update(plan.touched)
    return plans


def _candidates(
    collective: Collective,
    forms: GroupForms,
    values: DeviceValues,
    by_result: dict[ir.Value, Collective],
) -> list[Plan]:
    """What could be done about a collective, the best first."""
    plans: list[Plan | None] = []
    if collective.kind in _COPYING:
        plans.append(plan_constant(collective, forms))
    if collective.kind == "all_to_all":
        plans.append(plan_inverse(collective, by_result, forms))
    if collective.kind == "all_gather":
        plans.append(plan_padded(collective, forms, values))
    if collective.kind in _CHUNKED:
        positions = range(len(collective.op.results))
        plans += [plan_chunked(collective, i, forms, values) for i in positions]
    return [plan for plan in plans if plan is not None]


def _apply(plans: Sequence[Plan], module: ir.Module) -> None:
    """Applies the plans, and erases what nobody uses after them."""
    with ir.Location.unknown(module.context):
        for plan in plans:
            plan.apply()
    collectives = {op.results[0]: op for plan in plans for op in plan.replaced}
    touched = [value for plan in plans for value in plan.touched]
    erased = erase_unused(touched, functions_by_name(module), set(collectives))
    for result, op in collectives.items():
        if result not in erased:
            drop_unused_results(op)
