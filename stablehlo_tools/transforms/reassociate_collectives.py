"""Sums of reductions over devices become the reduction of a sum: one collective for several.

What microbatches, tied weights and branches of a model add up after each has been reduced is added
on each device first, and reduced once.

    %a = "stablehlo.all_reduce"(%x)                            // a sum over devices
    %b = "stablehlo.all_reduce"(%y)
    %c = stablehlo.add %a, %b
  ==>
    %xy = stablehlo.add %x, %y
    %c = "stablehlo.all_reduce"(%xy)

So with products, maxima, minima, `and`, `or` and `xor`, each of its own kind, in chains and trees,
and with reduce_scatter. Between a collective and the sum may stand, alike in both terms or not,
slices, reshapes, transposes, broadcasts, pads with what the reduction ignores, negations and
converts to wider types, which then come before the collective; and, the same in both, a
dynamic_slice or a scale (the division of a mean), which stay behind it.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Replica groups name processes and mesh axes that the module has, none of them twice.
  P3  No op has a token: collectives are made fewer before they are ordered.

Guarantees: the signature as it was; no more bytes are moved than before, by fewer collectives
unless a term is added to itself; a second run changes nothing. Values of integers and booleans, and
of maxima and minima, are as before. Sums of floats are taken in another order, the wider type's
where a convert came before: of n numbers in all, over devices and terms, the result lies within
2 (n - 1) u (|x1| + … + |xn|) of what it was, u the unit roundoff of the type that was summed in
(2^-24 for f32), and of a mean within two more roundings. A product of n floats differs by a factor
within 1 + 2 (n - 1) u. Both as long as nothing on the way overflows, one way or the other.

Left as they are: terms that differ in kind, process groups, the dimension they scatter along, or
what steers how XLA runs them (a `collective_group_key`; a `_scheduling_group_id` is dropped); a
term that something else uses too, which would have to be reduced a second time; a sum of narrow
integers that is widened, which wraps around; terms in different blocks; and collectives of several
operands.
`explain` says which rule it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collective_likeness import Groups
from stablehlo_tools.analysis.collectives import (
    ModuleFacts,
    classify_communication,
    find_collectives,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, to_place
from stablehlo_tools.dialect.reducers import REDUCERS
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.reassociate_collectives.terms import (
    Classify,
    term_of,
    why_not_merged,
    write_merged,
)

_NAMES = frozenset(f"stablehlo.{kind}" for kind in REDUCERS)


@dataclass(frozen=True)
class ReassociateCollectivesPass(Pass):
    """Sums of reductions over devices become the reduction of a sum.

    `explain`: a note for each sum of two reductions, merged or not.
    """

    name: ClassVar[str] = "reassociate-collectives"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and takes it over where anything has changed."""
        if not find_collectives(module):
            return
        refuse_tokens(module, self.name, "P3")
        draft = copy_module(module)
        inline_all_calls(draft)
        classify = classify_communication(module.context)
        groups = Groups(ModuleFacts.of(draft))
        changed = False
        for combine in _combining(draft):
            place = to_place(combine.location)
            reason = _merge(combine, classify, groups)
            if reason is None:
                continue
            changed = changed or reason == ""
            if self.explain:
                said = f"stay apart: {reason}" if reason else "became one"
                message = f"two reductions over devices that are combined {said}"
                diagnostics.collected.append(Diagnostic(Severity.NOTE, message, place))
        if changed:
            take_over(module, draft)


def _combining(module: ir.Module) -> list[ir.Operation]:
    """The ops of a module that combine two values as a reduction would, in program order."""
    combining: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _NAMES and isinstance(op.results[0].type, ir.RankedTensorType):
            combining.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return combining


def _merge(combine: ir.Operation, classify: Classify, groups: Groups) -> str | None:
    """Merges the two terms of an op; why not, "" where it did, None where they are none."""
    kind = combine.name.removeprefix("stablehlo.")
    terms = [term_of(value, combine, kind, classify, groups) for value in combine.operands]
    one, other = terms
    if one is None or other is None:
        return None
    reason = why_not_merged(one, other)
    if reason is None:
        write_merged(combine, one, other)
    return reason or ""
