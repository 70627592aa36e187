"""Turns the float pseudo-tokens of PyTorch/XLA into one `!stablehlo.token` chain.

torch-xla orders collectives by a number that is always zero: it is added to each input, and
multiplied by the first element of each result. So one NaN there reaches every later collective.

    %0 = stablehlo.broadcast_in_dim %zero, dims = []
    %1 = stablehlo.add %x, %0
    %g = "stablehlo.all_gather"(%1)
    %2 = stablehlo.slice %g [0:1]
    %3 = stablehlo.reshape %2
    %4 = stablehlo.multiply %zero, %3
    %r:2 = "stablehlo.all_reduce"(%y, %4)
  ==>
    %t0 = stablehlo.after_all
    %x1, %t1 = stablehlo.optimization_barrier %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = stablehlo.optimization_barrier %g0, %t1
    %y1, %t3 = stablehlo.optimization_barrier %y, %t2
    %r0 = "stablehlo.all_reduce"(%y1)
    %r, %t4 = stablehlo.optimization_barrier %r0, %t3

The root of a chain is a scalar float argument of `main` or a constant zero. A chain is recognized
by its structure, never by names.

Preconditions:
  P1  An argument that starts a chain is zero: the module has a name of torch-xla's, every
      collective takes the token and no other op does; or assume-zero-argument says so.
  P2  assume-zero-argument is a scalar float argument of the one entry function, and a collective
      takes a token from it.
  P3  Collectives on a chain can be threaded, as thread-tokens states, no token chain is there yet,
      and an all_reduce that loses a result has no attribute that lists the shapes of all.
  P4  With fork=preserve, the collectives of the chains are in one block.
  P5  A collective that only its token keeps alive passes it directly to another, and not through a
      loop, the result of a branch, or a call.
  P6  With drop-token-argument, the argument has no other use, and the module states no list of its
      arguments elsewhere.

Guarantees: the same values for finite data; the order of the text. A second run changes nothing.
`strip-tokens` removes the new chain.

Not handled: sums that feed an all_reduce; a chain after the barriers of thread-tokens (run
strip-tokens first); carries of loops, branches and calls, which stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.token_chain import is_link
from stablehlo_tools.ir.walk import ops_where
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.import_pseudo_tokens.chain_removal import (
    accepted_chains,
    plan_import,
)
from stablehlo_tools.transforms.parts.import_pseudo_tokens.chain_rewriting import (
    drop_token_arguments,
    partial_order,
    take_out,
    thread_partial_order,
)
from stablehlo_tools.transforms.parts.import_pseudo_tokens.exploration import TokenProgram
from stablehlo_tools.transforms.thread_tokens import thread_collectives


@dataclass(frozen=True)
class ImportPseudoTokensPass(Pass):
    """One token chain through the collectives that PyTorch/XLA's pseudo-tokens ordered.

    `fork`: `strengthen` makes one chain in program order; `preserve` keeps the partial order of
    coalesced collectives. `drop-token-argument` removes the argument that held the zero.
    `assume-zero-argument`: this argument of `main`, counted from 0, is zero at every call.
    """

    name: ClassVar[str] = "import-pseudo-tokens"
    fork: Literal["strengthen", "preserve"] = "strengthen"
    drop_token_argument: bool = False
    assume_zero_argument: int | None = None

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the chains of the module in place; without one, changes nothing."""
        program = TokenProgram.from_module(module)
        chains = accepted_chains(module, program, self.assume_zero_argument, diagnostics)
        if not chains:
            return
        # A module without pseudo-tokens may have a chain, and stays.
        threaded = ops_where(module.operation, is_link)
        if threaded:
            raise ToolError(
                "the module has a token chain beside its pseudo-tokens: run strip-tokens first, "
                "and thread-tokens after this pass (P3)",
                threaded[0].location,
            )
        plan = plan_import(module, program, chains)
        # The order is read from the chains, so before they are removed.
        order = partial_order(plan) if self.fork == "preserve" else None
        for kept in plan.kept:
            diagnostics.warn(
                f"{kept.maker.collective.name}: only its pseudo-token keeps it alive, because "
                "its results are unused; that token stays, as an input of the next "
                f"{kept.reader.collective.name}",
                kept.maker.collective.location,
            )
        members = take_out(plan)
        if order is not None:
            thread_partial_order(members, order)
        else:
            # `thread-tokens` can order the other collectives afterwards.
            chained = {member.results[0] for member in members}
            thread_collectives(module, lambda c: not chained.isdisjoint(c.op.results))
        if self.drop_token_argument:
            drop_token_arguments(module, chains)
