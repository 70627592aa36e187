"""Which elements of a result are computed from which elements of an operand."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.elements.boxes import Shape, shape_of, whole_box
from stablehlo_tools.analysis.elements.links import Link, Piece, identity
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SELECT
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with, ops_with_any

# Of complex numbers, these leave the two parts apart.
_PARTWISE = ops_with_any(Trait.LINEAR_IN_ALL) & ELEMENTWISE - ops_with(Trait.COMPLEX_PART) | {
    SELECT,
    "stablehlo.negate",
}


def link_of(op: ir.Operation, position: int) -> Link | None:
    """The link of an operand, where each element of it influences the elements that it links to."""
    if len(op.results) != 1:
        return None
    shape, result = shape_of(op.operands[position].type), shape_of(op.results[0].type)
    if shape is None or result is None or 0 in shape:
        return None
    if op.name == "stablehlo.reduce":
        return _reduced(op, shape, result) if position == 0 else None
    if op.name == "stablehlo.dot_general":
        return _contracted(op, position, shape, result)
    if op.name not in _ELEMENTWISE or shape != result:
        return None
    is_complex = isinstance(ir.ShapedType(op.results[0].type).element_type, ir.ComplexType)
    return None if is_complex and op.name not in _PARTWISE else identity(shape)


def _reduced(op: ir.Operation, shape: Shape, result: Shape) -> Link | None:
    gone = list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    if len(op.operands) != 2 or len(shape) - len(gone) != len(result):
        return None
    kept = [d for d in range(len(shape)) if d not in gone]
    along = tuple((d, r) for r, d in enumerate(kept))
    return Piece(whole_box(shape), whole_box(result), along)


def _contracted(op: ir.Operation, position: int, shape: Shape, result: Shape) -> Link | None:
    numbers = bindings.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batches = (list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions))
    sums = (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions))
    ranks = [ir.RankedTensorType(value.type).rank for value in op.operands]
    if len(shape) != ranks[position]:  # complex
        return None
    free = [
        [d for d in range(rank) if d not in batch and d not in contracted]
        for rank, batch, contracted in zip(ranks, batches, sums, strict=True)
    ]
    first = len(batches[0]) + (len(free[0]) if position else 0)
    along = [(d, r) for r, d in enumerate(batches[position])]
    along += [(d, first + i) for i, d in enumerate(free[position])]
    return Piece(whole_box(shape), whole_box(result), tuple(along))


def _names(dialect: str, text: str) -> frozenset[str]:
    return frozenset(f"{dialect}.{name}" for name in text.split())


_ELEMENTWISE = _names(
    "stablehlo",
    "abs add and atan2 bitcast_convert cbrt ceil clamp compare convert cosine "
    "count_leading_zeros divide exponential exponential_minus_one floor is_finite log log_plus_one "
    "logistic maximum minimum multiply negate not or popcnt power reduce_precision remainder "
    "round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic "
    "shift_right_logical sign sine sqrt subtract tan tanh xor",
) | _names(
    "chlo",
    "acos acosh asin asinh atan atanh cosh digamma erf erf_inv erfc lgamma sinh square tan",
)
