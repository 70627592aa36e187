"""Threads one `!stablehlo.token` chain through every communicating op, in program order.

StableHLO collectives take no token, so compilers choose the order of independent ones. Separately
compiled programs can then wait for each other forever. Here the token enters beside the operands
and leaves beside the results, through a barrier on each side:

    %g = "stablehlo.all_gather"(%x)
    %s = "stablehlo.reduce_scatter"(%y)
  ==>
    %t0 = stablehlo.after_all
    %x1, %t1 = stablehlo.optimization_barrier %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = stablehlo.optimization_barrier %g0, %t1
    %y1, %t3 = stablehlo.optimization_barrier %y, %t2
    %s0 = "stablehlo.reduce_scatter"(%y1)
    %s, %t4 = stablehlo.optimization_barrier %s0, %t3

The chain runs through `while`, `if`, `case`, calls, composites, `sdy.manual_computation` and async
pairs. An op with a token of its own (send, recv, infeed, outfeed, an ordered custom_call) keeps it:
the chain joins it by `after_all` and continues from the op's token result. A recv and the send next
to it are one step if they start from one token, on one channel and with the same acyclic pairs.

Preconditions:
  P1  Every op is of a dialect that is understood; mhlo and sdy collectives are lowered first.
  P2  Communication is in functions of one block and in structured control flow.
  P3  A function that communicates is not recursive; a public one is not called in the module.
  P4  A communicating op has an operand a token can enter beside, and a result it leaves beside.
  P5  An asynchronous start and its done share a block. (If something communicates between them, the
      done is moved up to before that, with a warning.)
  P6  No op that must carry the token has an `mhlo.sharding` (GSPMD) list of its values.
  P7  `minimal` is an option of the barrier form.
  P8  A manual computation that communicates takes an operand; if no token may enter it, one of its
      operands and one of its results are used.
  P9  A composite's collective has a reduction that uses no outer value and, if jax refines shapes,
      static ones.

Guarantees: values are bitwise as before; public functions keep their signatures; a second run
changes nothing; `strip-tokens` is the exact inverse. No custom call is added. The token orders, it
does not keep alive: a warning names each collective with unused results, because compilers delete
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.liveness import dead_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError, warning
from stablehlo_tools.dialect.custom_calls import label
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import MESH, ops_named
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.thread_tokens.chain_plan import plan_chain
from stablehlo_tools.transforms.parts.thread_tokens.threading import Decompositions, Threader
from stablehlo_tools.transforms.strip_tokens import strip_module


@dataclass(frozen=True)
class ThreadTokensPass(Pass):
    """One token chain through every communicating op, in program order.

    `form`: `barrier` ties each op by optimization_barrier; `composite` wraps each collective in a
    `stablehlo.composite "stablehlo_tools.<kind>"` that takes and returns the token, with the
    barrier form as its decomposition. `scope`: `all` is one chain; `group` keeps a chain for each
    set of collectives whose participants never meet the others'. `minimal` leaves out the links
    that dataflow implies.
    """

    name: ClassVar[str] = "thread-tokens"
    form: Literal["barrier", "composite"] = "barrier"
    scope: Literal["all", "group"] = "all"
    minimal: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Threads the module in place, replacing a chain that is already there."""
        if self.minimal and self.form == "composite":
            raise ToolError(
                "thread-tokens: minimal leaves links out, and a composite always has its token: "
                "use form=barrier (P7)",
                module.operation.location,
            )
        # Threading twice is threading once. Tokens and barriers of the user stay.
        strip_module(module)
        functions = plan_chain(module, by_group=self.scope == "group", minimal=self.minimal)
        for collective in dead_collectives(module):
            diagnostics.warn(
                f"{collective.inner.name}: its results are unused, so compilers delete it, even in "
                "a chain; a device that skips it can leave the others waiting",
                collective.op.location,
            )
        _warn_of_unpartitioned(module, bool(functions), diagnostics)
        # Tokens cannot order two asynchronous collectives that are in flight together.
        pending = [step for function in functions for step in function.steps]
        while pending:
            step = pending.pop(0)
            pending[:0] = [inner for region in step.regions for inner in region]
            if step.done is not None and step.done_moves_before is not None:
                diagnostics.warn(
                    f"{label(step.done)} now comes before the {label(step.done_moves_before)} "
                    "that followed its start: a token leaves an asynchronous collective only "
                    "beside its result, so the two are in flight one after the other",
                    step.done.location,
                )
        threader = Threader(Decompositions(module) if self.form == "composite" else None)
        for function in functions:
            threader.function(function)


def thread_collectives(module: ir.Module, counts: Callable[[Collective], bool]) -> None:
    """Threads one chain through the collectives that `counts` accepts, for passes that order only
    some.

    Raises a located ToolError if a precondition fails.
    """
    for function in plan_chain(module, by_group=False, minimal=False, counts=counts):
        Threader().function(function)


def _warn_of_unpartitioned(module: ir.Module, communicates: bool, diagnostics: Diagnostics) -> None:
    """Warns about a sharded module without collectives: a compiler adds them when it partitions
    it."""
    if communicates:
        return
    meshes = [op for op in module.body.operations if op.operation.name == MESH]
    # With a manual computation, from shard_map, the user has partitioned the module in part.
    if meshes and not ops_named(module.operation, {MANUAL_COMPUTATION}):
        told = warning(
            "the module is sharded but has no collective to order, because the compiler's "
            "partitioner adds them: -p partition,thread-tokens orders them",
            meshes[0].location,
        )
        diagnostics.collected.append(replace(told, in_vain_before="partition"))
