"""Lists the attributes that hold sizes along each dimension of an op's first operand.

If that dimension becomes longer or shorter and the op still treats its positions the same, these
numbers scale with it. Strides and interior padding do not, as they count between neighbouring
elements.
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
    """Returns the attributes whose entry `dim` scales with that size of the first operand.

    Empty for a batching dimension of a gather, which always takes one element at a time.
    """
    if op.name == "stablehlo.gather" and dim in gather_numbers(op).operand_batching:
        return ()
    return _EXTENTS.get(op.name, ())
