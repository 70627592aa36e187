"""Goes through the loops of a module, inner ones first, and moves their collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Severity, to_place
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.transforms.parts.pipeline_collectives.holding import hold_loop
from stablehlo_tools.transforms.parts.pipeline_collectives.marks import (
    SUNK,
    TO_HOLD,
    TO_PIPELINE,
    mark,
    next_loop,
    unmarked,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.one_loop import OneLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.merging import merge_sunk
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import loops_of
from stablehlo_tools.transforms.parts.pipeline_collectives.wanted import Options


@dataclass
class LoopPipelining:
    """Rewrites the loops of a module that has no calls."""

    module: ir.Module
    options: Options
    changed: bool = False
    notes: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def run(self) -> None:
        """Rewrites what there is to rewrite."""
        facts = ModuleFacts.of(self.module)
        effects = Effects(functions_by_name(self.module))
        loops = loops_of(self.module)
        communicating = [loop for loop in loops if LoopBody(loop, effects).communicates(loop)]
        for loop in communicating:
            mark(loop, TO_PIPELINE)
        if not communicating:
            self.notes.append(_nothing_to_pipeline(self.module, len(loops)))
        while next_loop(self.module) is not None:
            one = OneLoop(self.module, self.options, facts)
            one.run()
            self.changed = self.changed or one.changed
            self.notes += one.notes
        self._merge()
        for loop in reversed(unmarked(self.module, TO_HOLD)):
            hold_loop(self.module, loop, self.options.hardware)

    def _merge(self) -> None:
        """Merges the collectives that were sunk, once no loop around them is rewritten any more."""
        sunk: dict[ir.Block, list[ir.Operation]] = {}
        for op in unmarked(self.module, SUNK):
            sunk.setdefault(op.block, []).append(op)
        for ops in sunk.values():
            merge_sunk(self.module, ops)


def _nothing_to_pipeline(module: ir.Module, loops: int) -> Diagnostic:
    """Why a program without a loop that communicates stays as it is, and what to do with it."""
    collectives = find_collectives(module)
    if not collectives:
        message = "there is nothing to pipeline: the program has no collective"
        return Diagnostic(Severity.NOTE, message, to_place(module.operation.location))
    has = (
        f"none of the program's {loops} loops has a collective"
        if loops
        else ("the program has no loop, as where its layers are unrolled")
    )
    return Diagnostic(
        Severity.NOTE,
        f"there is no loop to pipeline: {has}, and its {len(collectives)} communicating ops run "
        "once each, the first of them here. Run alike layers in a loop (jax.lax.scan over stacked "
        "weights) to have collectives move between iterations; a program without loops is for "
        "bucket-collectives and schedule-overlap",
        to_place(collectives[0].op.location),
    )
