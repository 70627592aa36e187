"""Cuts loops over layers into consecutive loops over ranges of them.

A stage of a pipeline has some of the layers; for that they must stand apart from the others. This
pass writes a loop for each range, and keeps whatever is stacked by layer in pieces: weights, what
the forward keeps for the backward, gradients and what accumulates them, the state of an optimizer.

    %y, %kept = stablehlo.while(%h = %x, %stack = %w)          // 8 layers: h' = f(h, w[i])
    %next = stablehlo.subtract %w, %gradient                   // of tensor<8x64x64xf32>
  ==>                                                          // counts=3,5
    %w0 = stablehlo.slice %w [0:3, 0:64, 0:64]
    %w1 = stablehlo.slice %w [3:8, 0:64, 0:64]
    %y0, %kept0 = stablehlo.while(%h = %x, %stack = %w0)       // stablehlo_tools.range = 0
    %y, %kept1 = stablehlo.while(%h = %y0, %stack = %w1)       // stablehlo_tools.range = 1
    %next0 = stablehlo.subtract %w0, %gradient0
    %next1 = stablehlo.subtract %w1, %gradient1
    %next = stablehlo.concatenate %next0, %next1, dim = 0

Ranges are in the order of the rows: a loop that goes through its stacks in reverse, as backwards
do, has the loop over the last range first. A loop goes over `trips` layers, and its stacks hold one
row for each, or as many as an iteration takes. Counters start where the loop over all layers would
have them. Loops around, as over microbatches, carry the pieces. Where something takes rows of
several layers at once the pieces are put together, and where it sums over all layers the sums of
the pieces are added.

Preconditions:
  P1  `counts` are at least 1 and add up to the trips of a loop over layers that has not been cut.
  P2  `loop`, if it is given, is the number of such a loop, from 0, in the order of the text.
  P3  A loop to be cut stands in `main`, in one of its manual computations, or in a `while`, `if` or
      `case` of these.

Guarantees: the signature as it was. All values are bitwise as before where the backend computes a
row alike however many there are, but for sums over layers: they are sums of the ranges' sums.

All loops over that many layers are cut alike: the backward belongs to the forward. With `loop`, the
loop and those that share stacks with it. A program with several stacks of different height needs a
run for each. A loop whose layers share all their weights is cut where it writes rows that another
one takes. Calls are inlined, and what nothing uses is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.cut_loops import Chosen, choose
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.split_layers.ranges import RangeEmission


@dataclass(frozen=True)
class SplitLayersPass(Pass):
    """Loops over layers as loops over ranges of them, with all that is stacked by layer in pieces.

    `counts`: how many layers each range has, in the order of the rows. `loop`: cut only the stack
    that this loop goes over, by its number among the loops over layers that have not been cut; -1
    for all of that many layers. `explain`: say which loops are cut.
    """

    name: ClassVar[str] = "split-layers"
    counts: tuple[int, ...]
    loop: int = -1
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        if min(self.counts, default=0) < 1:
            raise ToolError(
                f"split-layers: every range has at least one layer, not {self._shown} (P1)",
                module.operation.location,
            )
        inline_all_calls(module)
        main = entry_function(module)
        effects = Effects(functions_by_name(module))
        chosen = choose(main, effects, sum(self.counts), self._shown, self.loop)
        if self.explain:
            diagnostics.collected += [self._account(each) for each in chosen]
        channels = Channels(module)
        with ir.Location.unknown(module.context):
            for each in chosen:
                RangeEmission(each.dims, each.loops, self.counts, channels).run()
        erase_unused(main.regions[0].blocks[0])

    @property
    def _shown(self) -> str:
        return ", ".join(map(str, self.counts))

    def _account(self, chosen: Chosen) -> Diagnostic:
        return note(
            f"split-layers: {len(chosen.cut)} loops over {sum(self.counts)} layers become "
            f"{len(self.counts)} each, over {self._shown}; {len(chosen.dims.op_tilings)} ops on "
            "stacks run on pieces",
            chosen.cut[0].op.location,
        )
