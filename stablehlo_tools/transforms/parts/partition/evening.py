"""Takes axes away from dimensions that they do not divide evenly.

Shardy lets a dimension of 31 be divided by 2, and leaves the padding to a later partitioner. Here
each device must hold an equal part, so the last axes of such a dimension are dropped.
"""

from __future__ import annotations

from stablehlo_tools.analysis.tensor_shardings import (
    SHARDING,
    Axes,
    Dims,
    ValueShardings,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.partition.resharding import ALL_REDUCE, RESHARD

# Ops that Shardy inserts, and where they say how their result is divided.
_STATING = {RESHARD: "sharding", ALL_REDUCE: "out_sharding"}


def make_even(module: ir.Module, shardings: ValueShardings) -> None:
    """Changes the shardings that ops state for results, in place, not those of signatures."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _STATING:
            dims = shardings.of(op.results[0])
            even = _even(op.results[0], dims, shardings)
            if even != dims:
                op.attributes[_STATING[op.name]] = shardings.attribute(even, op.context)
        elif SHARDING in op.attributes and op.name != MANUAL_COMPUTATION:
            now = [shardings.of(result) for result in op.results]
            even_each = [_even(v, d, shardings) for v, d in zip(op.results, now, strict=True)]
            if even_each != now:
                op.attributes[SHARDING] = shardings.per_value(even_each, op.context)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _even(value: ir.Value, dims: Dims, shardings: ValueShardings) -> Dims:
    if not rank_of(value):
        return dims
    shape = ir.RankedTensorType(value.type).shape
    return tuple(_dividing(n, axes, shardings) for n, axes in zip(shape, dims, strict=True))


def _dividing(size: int, axes: Axes, shardings: ValueShardings) -> Axes:
    while axes and size % shardings.axes.size(axes):
        axes = axes[:-1]
    return axes
