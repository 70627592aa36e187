"""Slices that a loop in a stage takes at places which the tick decides: outside of that loop.

A stage that picks its chunk of the weights and its layer by one dynamic_slice in the loop over the
layers would hold the weights of all chunks; in two slices, the first belongs to the tick.
"""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.constants import CONSTANTS
from stablehlo_tools.ir.values import producer

_SLICE = "stablehlo.dynamic_slice"


def hoist_slices(loop: ir.Operation) -> None:
    """Divides the slices of loops in a loop's body."""
    for view in list(loop.regions[1].blocks[0].operations):
        if view.operation.name == WHILE:
            for op in list(_slices(view.operation)):
                _divide(op, view.operation)


def _slices(loop: ir.Operation) -> Iterator[ir.Operation]:
    for view in loop.regions[1].blocks[0].operations:
        if view.operation.name == _SLICE:
            yield view.operation


def _divide(op: ir.Operation, inner: ir.Operation) -> None:
    """Takes out of a loop what of a slice is known outside of it."""
    whole, *starts = op.operands
    early = [d for d, start in enumerate(starts) if _is_outside(start, inner)]
    moving = [d for d in early if not _is_constant(starts[d])]
    if not _is_outside(whole, inner) or not moving or len(early) == len(starts):
        return
    shape, sizes = shape_of(whole), shape_of(op.results[0])
    outer = Builder(ir.InsertionPoint(inner), op.location)
    zero = outer.splat(0, [], ir.RankedTensorType(starts[moving[0]].type).element_type)
    first = outer.dynamic_slice(
        whole,
        [starts[d] if d in moving else zero for d in range(len(starts))],
        [sizes[d] if d in moving else shape[d] for d in range(len(starts))],
    )
    op.operands[0] = first
    for dim in moving:
        op.operands[1 + dim] = zero


def _is_constant(value: ir.Value) -> bool:
    maker = producer(value)
    return maker is not None and maker.name in CONSTANTS


def _is_outside(value: ir.Value, loop: ir.Operation) -> bool:
    """Whether a value is made in front of a loop, or is an argument of a block around it."""
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    around = loop.block
    while True:
        if block == around:
            return True
        parent = around.owner.operation
        if parent.name in ("func.func", "builtin.module"):
            return False
        around = parent.block
