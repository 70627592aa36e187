"""Goes through the loops of a module, inner ones first, and moves their collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.transforms.pipelining.holding import hold_loop
from stablehlo_tools.transforms.pipelining.marks import (
    SUNK,
    TO_HOLD,
    TO_PIPELINE,
    mark,
    next_loop,
    unmarked,
)
from stablehlo_tools.transforms.pipelining.one_loop import OneLoop
from stablehlo_tools.transforms.pipelining.sinking.merging import merge_sunk
from stablehlo_tools.transforms.pipelining.survey import loops_of
from stablehlo_tools.transforms.pipelining.wanted import Wanted


@dataclass
class LoopPipelining:
    """Rewrites the loops of a module that has no calls."""

    module: ir.Module
    wanted: Wanted
    changed: bool = False
    notes: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def run(self) -> None:
        """Rewrites what there is to rewrite."""
        facts = ModuleFacts.of(self.module)
        effects = Effects(functions_by_name(self.module))
        for loop in loops_of(self.module):
            if LoopBody(loop, effects).communicates(loop):
                mark(loop, TO_PIPELINE)
        while next_loop(self.module) is not None:
            one = OneLoop(self.module, self.wanted, facts)
            one.run()
            self.changed = self.changed or one.changed
            self.notes += one.notes
        self._merge()
        for loop in reversed(unmarked(self.module, TO_HOLD)):
            hold_loop(self.module, loop, self.wanted.hardware)

    def _merge(self) -> None:
        """Merges the collectives that were sunk, once no loop around them is rewritten any more."""
        sunk: dict[ir.Block, list[ir.Operation]] = {}
        for op in unmarked(self.module, SUNK):
            sunk.setdefault(op.block, []).append(op)
        for ops in sunk.values():
            merge_sunk(self.module, ops)
