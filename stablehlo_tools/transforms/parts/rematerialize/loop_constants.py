"""Moves large invariants that are cheap to compute, like masks, from before a loop into it.

JAX hoists ops that do not depend on the iteration out of a loop over layers. A causal mask is as
large as all scores of attention. It is live during both loops, and read in every iteration.

    %mask = stablehlo.broadcast_in_dim %causal       // 4096 x 4096 -> 32 x 4096 x 4096
    while (%i, %x, %m = %mask) { … %m … }
  ==>
    while (%i, %x) {
      %m = stablehlo.broadcast_in_dim %causal        // becomes part of the kernel that reads it
    }
"""

from __future__ import annotations

from math import prod

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BROADCAST, SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.cleanup import drop_unused_carries
from stablehlo_tools.ir.values import CONSTANTS, is_splat, producer
from stablehlo_tools.ir.walk import ops_named, terminator
from stablehlo_tools.ir.while_loop import WhileLoop

_IOTA = "stablehlo.iota"
_TIMES = 4  # least ratio of a broadcast's elements to its operand's
_LEAST = 1 << 16  # elements of the smallest value that is moved


def sink_broadcasts(module: ir.Module) -> None:
    """Recomputes large broadcasts, splats and iotas inside the loops that carry them.

    Handles of loops are invalid afterwards.
    """
    for loop in ops_named(module.operation, {WHILE}):
        body = WhileLoop(loop)
        end = terminator(body.block)
        for carry in sorted(body.invariant):
            value, argument = loop.operands[carry], body.arguments[carry]
            if _is_made_of_little(value):
                first = body.block.operations[0].operation
                inside = _copy_constant(value, ir.InsertionPoint(first))
                argument.replace_all_uses_except(inside, [end])
    drop_unused_carries(module.body)


def _is_made_of_little(value: ir.Value) -> bool:
    op = producer(value)
    if op is not None and op.name == SHARDING_CONSTRAINT:
        return _is_made_of_little(op.operands[0])
    type_ = value.type
    if op is None or not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return False
    if prod(type_.shape) < _LEAST:
        return False
    if op.name in CONSTANTS:
        return is_splat(op)
    if op.name == BROADCAST:
        return _TIMES * prod(shape_of(op.operands[0])) <= prod(shape_of(value))
    return op.name == _IOTA


def _copy_constant(value: ir.Value, point: ir.InsertionPoint) -> ir.Value:
    op = producer(value)
    assert op is not None, "it is made of little"
    copy = op.clone(ip=point)
    if op.name == SHARDING_CONSTRAINT:
        copy.operands[0] = _copy_constant(op.operands[0], ir.InsertionPoint(copy))
    return copy.results[0]
