"""Attributes that say how far an op reaches along each dimension of its first operand.

Where the operand becomes longer or shorter along a dimension, and the op is to treat it alike all
along, these numbers grow or shrink with it. Strides and interior padding do not: they count between
neighbouring elements.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers

_EXTENTS = {
    "stablehlo.dynamic_slice": ("slice_sizes",),
    "stablehlo.gather": ("slice_sizes",),
    "stablehlo.pad": ("edge_padding_low", "edge_padding_high"),
    "stablehlo.slice": ("start_indices", "limit_indices"),
}


def extents_along(op: ir.Operation, dim: int) -> tuple[str, ...]:
    """The attributes of an op whose entry `dim` goes with the size of its first operand.

    A gather takes one element at a time of a batching dimension, however long that is.
    """
    if op.name == "stablehlo.gather" and dim in gather_numbers(op).operand_batching:
        return ()
    return _EXTENTS.get(op.name, ())
