"""Puts the ops of a block behind what they read."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import values_used_outside


def restore_order(block: ir.Block) -> None:
    """Moves each op that stands in front of what it reads behind that; the others keep their order.

    No op may depend on itself.
    """
    ops = [view.operation for view in block.operations]
    maker: dict[ir.Value, ir.Operation] = {result: op for op in ops for result in op.results}
    order: list[ir.Operation] = []
    done: set[ir.Value | ir.Operation] = set()
    for op in ops:
        pending = [(op, False)]
        while pending:
            at, is_ready = pending.pop()
            if is_ready:
                order.append(at)
            elif key_of(at) not in done:
                done.add(key_of(at))
                pending.append((at, True))
                needed = [maker[value] for value in values_used_outside(at) if value in maker]
                pending += [(each, False) for each in reversed(needed)]
    for op in order[:-1]:
        op.move_before(order[-1])
