"""Takes out the token chain that `thread-tokens` put in.

    %t0 = stablehlo.after_all {stablehlo_tools.token_link}
    %x1, %t1 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = stablehlo.optimization_barrier {stablehlo_tools.token_link} %g0, %t1
  ==>
    %g = "stablehlo.all_gather"(%x)

Links, carries, arguments and decompositions are found by the marks that `thread-tokens` leaves, so
tokens and barriers of the user's own stay.

Preconditions:
  P1  Nothing but the chain uses its tokens, and every marked op still has its token last.

Guarantees: the exact inverse of `thread-tokens` in either form; unchanged where there is no chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.thread_tokens.stripping import strip_module


@dataclass(frozen=True)
class StripTokensPass(Pass):
    """The exact inverse of `thread-tokens`."""

    name: ClassVar[str] = "strip-tokens"

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Strips the module in place."""
        strip_module(module)
