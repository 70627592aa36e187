"""Replaces an all_reduce by a reduce_scatter if each device uses only its own part of the sum.

Partitioners leave this pattern when a sum is wanted in shards. It sends twice the bytes and holds
the whole sum. A part is recognized by its value, computed for every device from `partition_id`,
`replica_id` and constants.

    %r = "stablehlo.all_reduce"(%x)                      // of tensor<32x64xf32>, 4 devices
    %d = stablehlo.partition_id
    %s = stablehlo.dynamic_slice [0, 8, 16, 24], %d
    %y = stablehlo.dynamic_slice %r, %s, 0               // to tensor<8x64xf32>
    ==>
    %y = "stablehlo.reduce_scatter"(%x) {scatter_dimension = 0}

If the sum also runs over other devices, an all_reduce of the part follows. If several dimensions
are cut, several reduce_scatters follow. Reshapes, transposes, broadcasts and exact elementwise ops
between the two run on the part, or before the sum if they mix its chunks. Consecutive all_reduces
count as one. Calls are inlined if that helps. Other collectives become smaller, too:

- if each device uses only its own part of an all_gather, the gather is removed; a larger part that
  includes its own is gathered over smaller groups; the part of another device becomes a
  collective_permute;
- if one device of each group uses all of a padded all_gather, and the others none of it, the gather
  becomes collective_permutes to that device (for groups of at most eight);
- an all_to_all that undoes another is removed;
- an all_gather, all_to_all or collective_permute of a constant with equal elements becomes a
  constant;
- an all_gather that repeats an earlier one is removed, unless an option forbids it.

Unused ops are removed: the slice and its offset's computation.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Replica groups of collectives that could be rewritten name processes and mesh axes that the
      module has, none of them twice.
  P3  `memory-limit` needs `share-gathers`, and is not negative.

Guarantees: the signature and the order of the remaining collectives stay; a second run changes
nothing. Values are bitwise as before, except float sums and products, whose order may change.

Left unchanged: a slice in another block than its collective; an all_reduce whose result has other
uses; sums of complex numbers, which XLA:TPU cannot scatter; groups that differ in size or leave a
device out; parts that are not equal chunks, or that some devices use more often than others; static
slices and masks; offsets that depend on data or a loop's counter; a barrier or token in between;
groups that the collective's channel and mode cannot express, or of several replicas and several
partitions.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.dialect.names import ALL_REDUCE, CALL, DYNAMIC_SLICE
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import inline_call
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import callee_name, functions_by_name, ops_named
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.create_reduce_scatter.chunked import plan_chunked
from stablehlo_tools.transforms.parts.create_reduce_scatter.exchanges import (
    plan_constant,
    plan_inverse,
    plan_padded,
    share_gathers,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import find_slices
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    GroupForms,
    Rewrite,
    drop_unused_results,
    erase_unused,
    purity,
)

_SUM = "all_reduce"
_CHUNKED = frozenset({_SUM, "all_gather"})
_COPYING = frozenset({"all_gather", "all_to_all", "collective_permute"})


@dataclass(frozen=True)
class CreateReduceScatterPass(Pass):
    """All_reduces and all_gathers become smaller if each device uses only a part of the result.

    `share-gathers`: an all_gather that repeats an earlier one uses its result, which lives longer.
    `share-gathers=false` gathers again at each use, as FSDP does for its weights; in code under
    `jax.checkpoint`, a barrier keeps the two separate anyway. `memory-limit`: the bytes per device
    that all shared gathers together may keep longer (default: 0, no limit). With a limit, shared
    gathers are marked, so that a second run counts them. `explain`: a note for each all_reduce,
    with the collectives that replace it or the reason why it stays.
    """

    name: ClassVar[str] = "create-reduce-scatter"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.SMALLER, ("", "share-gathers=false")
    )
    share_gathers: bool = True
    memory_limit: int = 0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place, until no rewrite is left. Raises ToolError for invalid
        options (P3)."""
        if self.memory_limit and not self.share_gathers:
            raise ToolError(
                "create-reduce-scatter: memory-limit needs share-gathers, which is off: remove "
                "one of the two options (P3)",
                module.operation.location,
            )
        if self.memory_limit < 0:
            raise ToolError(
                "create-reduce-scatter: memory-limit is a number of bytes, not negative (P3)",
                module.operation.location,
            )
        notes: list[Diagnostic] = []
        made: set[ir.Value] = set()
        # A rewrite may enable others. Calls are inlined only if no other rewrite is left.
        while (found := _plan(module)).plans or (found.calls and _inline_useful_calls(module)):
            notes += [
                note(plan.text, op.location)
                for plan in found.plans
                for op in plan.replaced
                if op.name == ALL_REDUCE
            ]
            made = _apply(found.plans, module, made)
        if self.explain:
            left = [(result, text) for result, text in found.left.items() if result not in made]
            notes += [note(text, maker_of(result).location) for result, text in left]
            diagnostics.collected += notes
        if self.share_gathers:
            collectives = find_collectives(module)
            # The rewrites have removed or shrunk gathers, so sharing comes last.
            forms = GroupForms(ModuleFacts.from_module(module, collectives))
            share_gathers(collectives, forms, self.memory_limit)


@dataclass
class _IndependentRewrites:
    """The outcome of one search.

    `plans` are rewrites that do not touch each other's ops, in program order. `left` has the reason
    why a result stays. `calls` are calls that may slice a collective's result, each with the
    collective's number.
    """

    plans: list[Rewrite] = field(default_factory=list[Rewrite])
    left: dict[ir.Value, str] = field(default_factory=dict[ir.Value, str])
    calls: list[tuple[int, ir.Operation]] = field(default_factory=list[tuple[int, ir.Operation]])


def _plan(module: ir.Module) -> _IndependentRewrites:
    """Plans rewrites for all collectives, except asynchronous ones."""
    collectives, functions = find_collectives(module), functions_by_name(module)
    facts = ModuleFacts.from_module(module, collectives)
    forms, values, is_pure = GroupForms(facts), DeviceValues(module, facts), purity(functions)
    by_result: dict[ir.Value, Collective] = {
        result: c for c in collectives for result in c.op.results
    }
    findings = _IndependentRewrites()
    touched: set[ir.Value] = set()
    for number, collective in enumerate(collectives):
        if collective.is_async:
            if collective.kind == _SUM:
                findings.left[collective.op.results[0]] = "all_reduce stays: it is asynchronous"
            continue
        # Rewrites of the whole collective, the best first.
        whole: list[Rewrite | None] = []
        if collective.kind in _COPYING:
            whole.append(plan_constant(collective, forms))
        if collective.kind == "all_to_all":
            whole.append(plan_inverse(collective, by_result, forms))
        if collective.kind == "all_gather":
            whole.append(plan_padded(collective, forms, values))
        plans = [plan for plan in whole if plan is not None]
        for position, result in enumerate(collective.op.results):
            if collective.kind not in _CHUNKED:
                break
            slices = find_slices(result, values)
            plan = plan_chunked(collective, position, slices, by_result, forms)
            if isinstance(plan, Rewrite):
                plans.append(plan)
            elif collective.kind == _SUM:
                findings.left[result] = f"all_reduce stays: {plan}"
            findings.calls += [
                (number, user)
                for user in slices.others
                if user.name == CALL and is_pure(user)
                if ops_named(functions[callee_name(user)], {DYNAMIC_SLICE, CALL})
            ]
        for plan in plans:
            # The search runs again after these plans, so plans that overlap can wait.
            if touched.isdisjoint(plan.touched):
                findings.plans.append(plan)
                touched.update(plan.touched)
    return findings


def _inline_useful_calls(module: ir.Module) -> bool:
    """Inlines the calls between a collective and slices if that makes the collective smaller, as a
    copy of the module shows. Returns True if there were any."""
    draft = copy_module(module)
    _inline_calls(draft, range(len(find_collectives(draft))))
    replaced = {op.results[0] for plan in _plan(draft).plans for op in plan.replaced}
    useful = [n for n, c in enumerate(find_collectives(draft)) if c.op.results[0] in replaced]
    return _inline_calls(module, useful)


def _inline_calls(module: ir.Module, numbers: Container[int]) -> bool:
    """Inlines the calls that slice results of these collectives, and the calls in their callees.
    Returns True if there were any."""
    functions, names = functions_by_name(module), set[str]()
    while calls := {call.results[0]: call for n, call in _plan(module).calls if n in numbers}:
        for call in calls.values():
            names.add(callee_name(call))
            inline_call(call, functions[callee_name(call)])
    for name in names - {callee_name(call) for call in ops_named(module.operation, CALLS)}:
        if "sym_visibility" in functions[name].attributes:
            functions[name].erase()
    return bool(names)


def _apply(plans: Sequence[Rewrite], module: ir.Module, made: set[ir.Value]) -> set[ir.Value]:
    """Applies the plans, and erases the ops that become unused. Returns the results of all new
    collectives so far that remain."""
    with ir.Location.unknown(module.context):
        made = made.union(*(plan.apply() for plan in plans))
    collectives = {op.results[0]: op for plan in plans for op in plan.replaced}
    touched = [value for plan in plans for value in plan.touched]
    erased = erase_unused(touched, functions_by_name(module), set(collectives))
    for result, op in collectives.items():
        if result not in erased:
            drop_unused_results(op)
    return made - erased
