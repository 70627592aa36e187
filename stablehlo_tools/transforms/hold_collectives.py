"""Keeps the sums of a loop in their iteration, and separate, where XLA:GPU moves and joins them.

If a loop only stores the result of a reduce_scatter, XLA:GPU runs it in the next iteration, where
it delays the first gathers. XLA:GPU also joins sums, which then wait for the last operand. Held,
each sum runs beside the kernels that compute the next operand.

    %a = "stablehlo.reduce_scatter"(%x)               // in the body of a loop
    %b = "stablehlo.reduce_scatter"(%y)
    ==>
    %a = "stablehlo.reduce_scatter"(%x)
    %a1 = stablehlo.optimization_barrier %a           // users of %a use this
    %y1, %a2 = stablehlo.optimization_barrier %y, %a
    %b = "stablehlo.reduce_scatter"(%y1)
    %b1 = stablehlo.optimization_barrier %b

Sums are reduce_scatters and all_reduces; a manual computation in a loop's body is part of it. This
pays if an iteration has compute beside the sums. `optimize` tries it.

Preconditions:
  P1  There are sums in loops, or all collectives are explicit: a plain sharded jit export is
      partitioned first.
  P2  Every communicating op is of a dialect that is understood.
  P3  No op has a token yet: thread-tokens comes after this pass.

Guarantees: the signature and the order of all ops stay. Values are bitwise the same, because
barriers compute nothing. A second run changes nothing.

Left unchanged: sums in branches, in the condition of a loop, in an async_start, or with results
that only barriers use; all sums outside of loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.partitioner_work import refuse_unpartitioned
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.dialect.names import BARRIER, MANUAL_COMPUTATION, WHILE
from stablehlo_tools.ir.builder import barrier
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.views import While
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage

_SUMS = frozenset({"reduce_scatter", "all_reduce"})


@dataclass(frozen=True)
class HoldCollectivesPass(Pass):
    """Reduce_scatters and all_reduces of a loop stay in their iteration, one after the other."""

    name: ClassVar[str] = "hold-collectives"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.HOLD)

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        free = [
            c.op
            for c in find_collectives(module)
            if not c.is_async
            and c.kind in _SUMS
            and _is_in_loop(c.op)
            # A barrier of an earlier run, or of the user, holds the results of the others already.
            and {use.owner.name for result in c.op.results for use in result.uses} != {BARRIER}
        ]
        # Without sums in loops, the program may be one that a compiler has yet to partition.
        if not free:
            refuse_unpartitioned(module, self.name, "P1")
            return
        refuse_tokens(module, self.name, "P3")
        for _, together in groupby(free, key=lambda op: key_of(op.block.owner.operation)):
            sums = list(together)
            # XLA:GPU's combiners join sums that do not wait for one another.
            for before, after in pairwise(sums):
                waiting = [after.operands[0], before.results[0]]
                delayed = barrier(waiting, ir.InsertionPoint(after), after.location)
                after.operands[0] = delayed.results[0]
            for op in sums:
                # The barrier hides the users of the results from the compiler.
                users = [use.owner.operation for result in op.results for use in result.uses]
                waiting = [user for user in users if user.name == BARRIER]
                held = barrier(op.results, ir.InsertionPoint.after(op), op.location)
                for result, kept in zip(op.results, held.results, strict=True):
                    result.replace_all_uses_except(kept, [held, *waiting])


def _is_in_loop(op: ir.Operation) -> bool:
    """Returns True if an op is in the body of a loop, and runs in each iteration."""
    block = op.block
    while (owner := block.owner.operation).name == MANUAL_COMPUTATION:
        block = owner.block
    return owner.name == WHILE and block == While(owner).body
