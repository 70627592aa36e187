"""Folds a pipeline that a program already is to a plain loop over its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.ir.copying import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.passes import Pass
from stablehlo_tools.transforms.tokens.refusing import refuse_tokens
from stablehlo_tools.transforms.unpipelining.chains import SameStage
from stablehlo_tools.transforms.unpipelining.hoisting import hoist_slices
from stablehlo_tools.transforms.unpipelining.items import Unresolved
from stablehlo_tools.transforms.unpipelining.loop_region import LoopRegion, Ranks
from stablehlo_tools.transforms.unpipelining.recognition import (
    axis_of,
    loops_of,
    manual_around,
    permutes_of,
    region_of,
    rotations_of,
)
from stablehlo_tools.transforms.unpipelining.replacing import fold
from stablehlo_tools.transforms.unpipelining.tidying import erase_open_constraints


@dataclass(frozen=True)
class FoldPipelinePass(Pass):
    """Pipelines become the plain loops over layers that they compute.

    `explain`: say which loops are pipelines, over how many stages.
    """

    name: ClassVar[str] = "fold-pipeline"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        refuse_tokens(module, "fold-pipeline", "P1")
        current = copy_module(module)
        inline_all_calls(current)
        number, folded = 0, list[Diagnostic]()
        while True:
            tried = copy_module(current)
            loops = list(loops_of(entry_function(tried).regions[0].blocks[0]))
            if number == len(loops):
                break
            with ir.Location.unknown(module.context):
                stages = _try(loops[number], tried)
            if stages < 2:
                number += 1
                continue
            folded.append(note(f"fold-pipeline: a pipeline of {stages} stages", loops[number].location))
            current = tried
        if not folded:
            diagnostics.warn(
                "fold-pipeline: no loop hands values from stage to stage, so nothing is folded",
                entry_function(module).location,
            )
            return
        if self.explain:
            diagnostics.collected += folded
        take_over(module, current)


def _try(loop: ir.Operation, module: ir.Module) -> int:
    """Folds a loop, if it is a pipeline; returns its stages, 0 for other loops. Raises ToolError."""
    region = _region(loop, module)
    if region is None:
        return 0
    try:
        return fold(region, module)
    except SameStage:
        return 0
    except Unresolved as unresolved:
        if region.manual is None and not rotations_of(loop):
            return 0
        raise unresolved.error() from None


def _region(loop: ir.Operation, module: ir.Module) -> LoopRegion | None:
    """A loop that may be a pipeline. Raises ToolError where it is not known how often it runs."""
    manual = manual_around(loop)
    if manual is not None:
        erase_open_constraints(manual)
    values = DeviceValues(module, ModuleFacts.of(module))
    if manual is None:
        if not rotations_of(loop):
            return None
        ranks = Ranks.single(values.facts)
    else:
        ranks = axis_of(loop, manual, values) if permutes_of(loop) else None
    if ranks is None:
        return None
    hoist_slices(loop)
    values = DeviceValues(module, values.facts)
    found = region_of(loop, ranks, values)
    if isinstance(found, LoopRegion):
        return found
    raise ToolError(f"fold-pipeline: how often the loop runs is not known: {found} (P2)", loop.location)
