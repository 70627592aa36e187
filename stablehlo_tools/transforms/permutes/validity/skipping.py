"""Lets the permutes of a module's loops skip the transfers that nothing depends on."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.demand import permute_demand
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.ir.copying import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.transforms.permutes.validity.planning import (
    ALL_NEEDED,
    ValidityPlan,
    describe,
    plan,
)
from stablehlo_tools.transforms.permutes.validity.writing import write


def skip_unneeded(module: ir.Module) -> list[Diagnostic]:
    """Rewrites the module, calls inlined, if there is something to skip; a note for each permute
    of a loop."""
    draft = copy_module(module)
    inline_all_calls(draft)
    plans = [(d, plan(d)) for d in permute_demand(draft, ModuleFacts.of(draft))]
    notes = [
        note(f"collective_permute: {_told(found)}", demand.op.location) for demand, found in plans
    ]
    written = [found for _, found in plans if isinstance(found, ValidityPlan)]
    for found in written:
        write(found)
    if written:
        take_over(module, draft)
    return notes


def _told(found: ValidityPlan | str) -> str:
    if isinstance(found, ValidityPlan):
        return describe(found)
    return found if found == ALL_NEEDED else f"no transfer is skipped: {found}"
