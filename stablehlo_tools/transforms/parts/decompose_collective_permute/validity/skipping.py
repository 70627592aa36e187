"""Lets the permutes of a module's loops skip the transfers that nothing depends on."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts, tensor_bytes
from stablehlo_tools.analysis.demand import PermuteDemand, permute_demand
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.ir.copying import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.transforms.parts.decompose_collective_permute.validity.planning import (
    ALL_NEEDED,
    ValidityPlan,
    describe,
    plan,
)
from stablehlo_tools.transforms.parts.decompose_collective_permute.validity.writing import write


def skip_unneeded(module: ir.Module, least_bytes: int, name: str) -> list[Diagnostic]:
    """Rewrites the module, calls inlined, if there is something to skip; a note for each permute
    of a loop.

    Permutes of fewer than `least_bytes` bytes stay. Raises a located ToolError in the name of a
    pass for a module that has tokens, if something is to be rewritten.
    """
    draft = copy_module(module)
    inline_all_calls(draft)
    demands = permute_demand(draft, ModuleFacts.of(draft))
    plans = [(d, _small(d, least_bytes) or plan(d)) for d in demands]
    notes = [
        note(f"collective_permute: {_told(found)}", demand.op.location) for demand, found in plans
    ]
    written = [found for _, found in plans if isinstance(found, ValidityPlan)]
    for found in written:
        write(found)
    if written:
        refuse_tokens(module, name, "P3")
        take_over(module, draft)
    return notes


def _small(demand: PermuteDemand, least_bytes: int) -> str:
    size = tensor_bytes(ir.ShapedType(demand.op.operands[0].type))
    if size is None or size >= least_bytes:
        return ""
    return f"its {size} bytes are less than min-bytes"


def _told(found: ValidityPlan | str) -> str:
    if isinstance(found, ValidityPlan):
        return describe(found)
    return found if found == ALL_NEEDED else f"no transfer is skipped: {found}"
