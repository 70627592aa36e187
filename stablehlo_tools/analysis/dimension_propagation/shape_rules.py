"""Ops that compute element by element, or move elements."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dimension_propagation.layout import (
    Asked,
    Layout,
    Shape,
    Step,
    reshaped,
)
from stablehlo_tools.bindings import ir

_STABLEHLO = (
    "abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide "
    "exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum "
    "minimum multiply negate not or popcnt power real reduce_precision remainder round_nearest_afz "
    "round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign "
    "sine sqrt subtract tan tanh xor"
)
_CHLO = (
    "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf "
    "is_neg_inf is_pos_inf lgamma next_after polygamma sinh square tan zeta"
)
ELEMENTWISE = frozenset(f"stablehlo.{name}" for name in _STABLEHLO.split()) | frozenset(
    f"chlo.{name}" for name in _CHLO.split()
)


def elementwise(asked: Asked) -> Step | None:
    """Operands of the result's shape, and scalars beside them."""
    given, (result,) = asked.given, asked.results
    if given is None:
        return None
    if any(shape not in (result, ()) for shape in asked.operands):
        return None
    taken = tuple(given if shape == result else None for shape in asked.operands)
    return Step(taken, (given,))


def bitcast(asked: Asked) -> Step | None:
    """Bits as another type, which may have another last dimension."""
    given, (before,), (after,) = asked.given, asked.operands, asked.results
    if given is None or (before != after and given.dim >= min(len(before), len(after))):
        return None
    return Step((given,), (given,))


def reshape(asked: Asked) -> Step | None:
    """The same elements in another shape."""
    given, (before,), (after,) = asked.given, asked.operands, asked.results
    if given is None or 0 in before:
        return None
    layout = reshaped(given, before, after, asked.parts)
    return Step((given,), (layout,)) if layout is not None else None


def transpose(asked: Asked) -> Step | None:
    """Dimensions in another order."""
    given = asked.given
    if given is None:
        return None
    return Step((given,), (given.at(asked.integers("permutation").index(given.dim)),))


def broadcast(asked: Asked) -> Step | None:
    """Dimensions of the operand among those of the result."""
    given = asked.given
    if given is None:
        return None
    dim = asked.integers("broadcast_dimensions")[given.dim]
    if asked.results[0][dim] != asked.operands[0][given.dim]:
        return None
    return Step((given,), (given.at(dim),))


def piece(asked: Asked) -> Step | None:
    """A slice that takes all of the batch, or as much of each part."""
    given, (before,), (after,) = asked.given, asked.operands, asked.results
    if given is None:
        return None
    if before[given.dim] == after[given.dim]:
        return Step((given,), (given,))
    starts, strides = asked.integers("start_indices"), asked.integers("strides")
    taken = regrouped(asked, given, before, (starts[given.dim], after[given.dim]))
    if taken is None or strides[given.dim] != 1:
        return None
    return Step((given,), (Layout(given.dim, taken[1]),))


def pad(asked: Asked) -> Step | None:
    """Padding of other dimensions, or as much for each part."""
    given = asked.given
    if given is None or asked.layouts[0] is None:
        return None
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, between = (asked.integers(name)[given.dim] for name in names)
    added = regrouped(asked, given, asked.operands[0], (low, high))
    if added is None or between or min(low, high) < 0:
        return None
    return Step((given, None), (Layout(given.dim, given.outer + sum(added)),))


def concatenate(asked: Asked) -> Step | None:
    """Operands side by side along another dimension, or along that of the batch with as much of
    each part."""
    dim, found = asked.integer("dimension"), [each for each in asked.layouts if each is not None]
    if found[0].dim != dim:
        given = asked.given
        return Step((given,) * len(asked.operands), (given,)) if given is not None else None
    sizes = [shape[dim] for shape in asked.operands]
    first = asked.operands[asked.layouts.index(found[0])]
    outers = regrouped(asked, found[0], first, sizes)
    if outers is None or 0 in outers:
        return None
    taken = tuple(Layout(dim, outer) for outer in outers)
    if any(each not in (None, own) for each, own in zip(asked.layouts, taken, strict=True)):
        return None
    return Step(taken, (Layout(dim, sum(outers)),))


def regrouped(asked: Asked, layout: Layout, shape: Shape, sizes: Sequence[int]) -> list[int] | None:
    """How many times each of some sizes holds all parts once, as they alternate in a dimension;
    None where one does not hold them whole, and where this is not asked for."""
    group = shape[layout.dim] // layout.outer
    found = [size // group for size in sizes]
    whole = all(size % group == 0 for size in sizes)
    plain = not any(sizes)
    return found if whole and (asked.regroups or plain) else None


def reverse(asked: Asked) -> Step | None:
    """Another dimension backwards."""
    given = asked.given
    if given is None or given.dim in asked.integers("dimensions"):
        return None
    return Step((given,), (given,))


def sort(asked: Asked) -> Step | None:
    """All operands along another dimension."""
    given = asked.given
    rank = len(asked.operands[0])
    if given is None or given.dim == asked.integer("dimension", -1) % rank:
        return None
    return Step((given,) * len(asked.operands), (given,) * len(asked.results))


def top_k(asked: Asked) -> Step | None:
    """Along the last dimension."""
    return _but_last(asked, 1)


def cholesky(asked: Asked) -> Step | None:
    """Of matrices in the last two dimensions."""
    return _but_last(asked, 2)


def triangular_solve(asked: Asked) -> Step | None:
    """Of two stacks of matrices."""
    return _but_last(asked, 2)


def fft(asked: Asked) -> Step | None:
    """Along the last dimensions."""
    return _but_last(asked, len(asked.integers("fft_length")))


def barrier(asked: Asked) -> Step | None:
    """Each operand for itself."""
    return Step(asked.layouts, asked.layouts)


def _but_last(asked: Asked, count: int) -> Step | None:
    given, ranks = asked.given, {len(shape) for shape in asked.operands}
    if given is None or len(ranks) != 1 or given.dim >= ranks.pop() - count:
        return None
    return Step((given,) * len(asked.operands), (given,) * len(asked.results))


def along(op: ir.Operation, name: str, layout: Layout, neutral: int) -> bool:
    """Whether a list of a window op, if it has it, is neutral along the batch."""
    if name not in op.attributes:
        return True
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))[layout.dim] == neutral
