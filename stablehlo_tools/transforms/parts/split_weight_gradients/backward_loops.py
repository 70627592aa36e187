"""Which loops over layers are backwards: they read rows that another such loop has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops import LayerLoop, layer_loops
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import Counted, counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.transforms.parts.split_layers.linked_loops import (
    loops_ahead,
    loops_behind,
    loops_in,
)
from stablehlo_tools.transforms.parts.split_layers.marks import range_of
from stablehlo_tools.transforms.parts.split_weight_gradients.division import (
    Backward,
    Division,
    has_chain,
    is_write,
)


def layer_chains(block: ir.Block, effects: Effects) -> list[Backward]:
    """The loops over layers of a block and of blocks in it whose iterations need what those before
    have computed, in the order of the text."""
    known = {key_of(loop.op): loop for loop in layer_loops(block, effects)}
    ops = [
        op
        for op in loops_in(block.owner.operation)
        if key_of(op) in known or range_of(op) is not None
    ]
    candidates = [_backward(op, known.get(key_of(op)), effects) for op in ops]
    return [loop for loop in candidates if loop is not None and has_chain(loop.body)]


def backward_loops(chains: Sequence[Backward], block: ir.Block, effects: Effects) -> list[Backward]:
    """Those that read rows which another loop with a chain has written; but none in such a loop, or
    in one that writes the rows: they belong to the layer."""
    bodies = {key_of(loop.op): loop.body for loop in chains}
    for op in loops_in(block.owner.operation):
        if key_of(op) not in bodies:
            body = LoopBody(op, effects)
            if has_chain(body):
                bodies[key_of(op)] = body
    writers = [_writers_of_rows(loop, bodies) for loop in chains]
    readers = [loop for loop, ops in zip(chains, writers, strict=True) if ops]
    around = [*(loop.op for loop in readers), *(op for ops in writers for op in ops)]
    return [loop for loop in readers if not any(is_inside(loop.op, other) for other in around)]


def awaited_carries(
    loop: Backward, chains: Sequence[Backward], divisions: Sequence[Division]
) -> list[int]:
    """The carries of a loop whose results another one takes in its chain."""
    keys = {key_of(each.op) for each in chains}
    late = {(key_of(each.loop.op), carry) for each in divisions for carry in each.moved}
    awaited: list[int] = []
    for carry, result in enumerate(loop.op.results):
        taken = [(key_of(op), place) for op, place in loops_behind(result)]
        if any(each[0] in keys and each not in late for each in taken):
            awaited.append(carry)
    return awaited


def _backward(op: ir.Operation, loop: LayerLoop | None, effects: Effects) -> Backward | None:
    count = counted(op, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1 or not count.trips[0]:
        return None
    assert isinstance(count, Counted)
    return Backward(LoopBody(op, effects), count, loop is not None and loop.reverse)


def _writers_of_rows(
    loop: Backward, bodies: Mapping[ir.Value | ir.Operation, LoopBody]
) -> list[ir.Operation]:
    """The loops with a chain that have written rows of stacks which a loop takes."""
    operands = [loop.op.operands[carry] for carry in sorted(loop.body.invariant)]
    return [
        op
        for op, carry in loops_ahead(operands)
        if key_of(op) in bodies and is_write(bodies[key_of(op)], carry)
    ]
