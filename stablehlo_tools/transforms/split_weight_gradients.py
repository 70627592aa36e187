"""Divides backward loops over layers: first the chain of cotangents, then gradients of weights.

A gradient of weights is needed by nothing until the optimizer runs; the cotangent of a layer's
input is what the stage before waits for. Zero-bubble schedules run the second as soon as they can,
and the first where nothing else is to be done. For that they must not be in one loop.

    %dx, %dw = stablehlo.while(%d = %dy)                       // d' = d·wᵀ, dw[i] = x[i]ᵀ·d
  ==>
    %dx, %stored = stablehlo.while(%d = %dy)                   // d' = d·wᵀ, stored[i] = d
    %dw = stablehlo.while(%rows = %stored)                     // dw[i] = x[i]ᵀ·stored[i]

The first loop stores rows of what the second needs of it, the fewest bytes that do: what follows
from counters, weights and residuals at little cost is computed again, and so are cheap ops where
that stores less. The second goes over the same layers in the same order, right behind the first,
with the attributes of the loop. Sums over layers that nothing in the loop reads, as gradients of
weights that all layers share, move with the rest.

Preconditions:
  P1  There is a backward loop over layers: it reads rows that another loop, with activations that
      its iterations hand on, has written, and has such a chain itself.

Guarantees: all values are bitwise as before, where the backend computes an op alike wherever it
stands. The signature as it was.

A loop is divided where a contraction, a scatter, an inner loop or a collective has results that
only leave the loop, and no other loop over layers with a chain takes what it writes: that would be
a residual. Loops in a layer, and other loops, stay as they are; the program does, with a warning,
where none is left to divide. Calls are inlined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.division import (
    Division,
    awaited_carries,
    backward_loops,
    divide,
    layer_chains,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.split_weight_gradients.two_loops import write_division


@dataclass(frozen=True)
class SplitWeightGradientsPass(Pass):
    """The gradients of weights of a backward loop over layers in a loop of their own behind it.

    `explain`: say of each loop what moves, and how many bytes are stored for it.
    """

    name: ClassVar[str] = "split-weight-gradients"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        inline_all_calls(module)
        main = entry_function(module)
        block = main.regions[0].blocks[0]
        effects = Effects(functions_by_name(module))
        chains = layer_chains(block, effects)
        loops = backward_loops(chains, block, effects)
        if not loops:
            raise ToolError(
                "split-weight-gradients: there is no backward loop over layers: no loop reads rows "
                "that another one with activations has written (P1)",
                main.location,
            )
        # A value for a later loop waits only if it waits there too.
        divisions: list[Division] = []
        for loop in reversed(loops):
            division = divide(loop, awaited_carries(loop, chains, divisions))
            if division is not None:
                divisions.append(division)
        planned = divisions[::-1]
        if not planned:
            diagnostics.warn(
                "split-weight-gradients: all work of the backward loops is part of their chains, "
                "so nothing is divided",
                main.location,
            )
            return
        if self.explain:
            diagnostics.collected += [_account(division) for division in planned]
        with ir.Location.unknown(module.context):
            for division in planned:
                write_division(division)
        erase_unused(block)


def _account(division: Division) -> Diagnostic:
    loop = division.loop
    return note(
        f"split-weight-gradients: {len(division.moved)} results of a loop over {loop.trips} layers "
        f"are computed behind it, from {len(division.stored)} values or {division.stored_bytes} "
        "bytes that each iteration stores",
        loop.op.location,
    )
