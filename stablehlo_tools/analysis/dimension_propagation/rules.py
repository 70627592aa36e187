"""How each op runs on parts of the batch, as far as that is known.

A rule holds where, for operands that lie in parts, the op on part k gives part k of the result, or
where the results of the parts combine to the result. Everything else has no step: custom calls,
random numbers, ops with side effects, and every op that is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stablehlo_tools.analysis.dimension_propagation import (
    collective_rules,
    contraction_rules,
    indexed_rules,
    shape_rules,
)
from stablehlo_tools.analysis.dimension_propagation.layout import Asked, Layout, Shape, Step
from stablehlo_tools.bindings import ir

Rule = Callable[[Asked], Step | None]

CONTRACTIONS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
COLLECTIVES: dict[str, Rule] = {
    "stablehlo.all_gather": collective_rules.all_gather,
    "stablehlo.all_reduce": collective_rules.unmoved,
    "stablehlo.all_to_all": collective_rules.all_to_all,
    "stablehlo.collective_broadcast": collective_rules.unmoved,
    "stablehlo.collective_permute": collective_rules.unmoved,
    "stablehlo.reduce_scatter": collective_rules.reduce_scatter,
}
BARRIER = "stablehlo.optimization_barrier"

_RULES: dict[str, Rule] = {
    **dict.fromkeys(shape_rules.ELEMENTWISE, shape_rules.elementwise),
    **COLLECTIVES,
    BARRIER: shape_rules.barrier,
    "stablehlo.batch_norm_inference": contraction_rules.batch_norm_inference,
    "stablehlo.bitcast_convert": shape_rules.bitcast,
    "stablehlo.broadcast_in_dim": shape_rules.broadcast,
    "stablehlo.cholesky": shape_rules.cholesky,
    "stablehlo.concatenate": shape_rules.concatenate,
    "stablehlo.convolution": contraction_rules.convolution,
    "stablehlo.dot_general": contraction_rules.dot_general,
    "stablehlo.dynamic_slice": indexed_rules.dynamic_slice,
    "stablehlo.dynamic_update_slice": indexed_rules.dynamic_update_slice,
    "stablehlo.fft": shape_rules.fft,
    "stablehlo.gather": indexed_rules.gather,
    "stablehlo.pad": shape_rules.pad,
    "stablehlo.reduce": contraction_rules.reduce,
    "stablehlo.reduce_window": contraction_rules.reduce_window,
    "stablehlo.reshape": shape_rules.reshape,
    "stablehlo.reverse": shape_rules.reverse,
    "stablehlo.scatter": indexed_rules.scatter,
    "stablehlo.select_and_scatter": contraction_rules.select_and_scatter,
    "stablehlo.slice": shape_rules.piece,
    "stablehlo.sort": shape_rules.sort,
    "stablehlo.transpose": shape_rules.transpose,
    "stablehlo.triangular_solve": shape_rules.triangular_solve,
    "chlo.top_k": shape_rules.top_k,
    "sdy.sharding_constraint": shape_rules.elementwise,
}


def step_of(
    op: ir.Operation,
    layouts: tuple[Layout | None, ...],
    parts: int,
    *,
    regroups: bool = False,
) -> Step | None:
    """How an op runs on operands of which some lie in parts; None where it needs them whole."""
    rule = _RULES.get(op.name)
    operands = shapes_of(op.operands)
    results = shapes_of(op.results)
    if rule is None or operands is None or results is None:
        return None
    step = rule(Asked(op, operands, results, layouts, parts, regroups))
    if step is None:
        return None
    taken = (*zip(step.operands, operands, strict=True), *zip(step.results, results, strict=True))
    fits = all(layout is None or layout.fits(shape, parts) for layout, shape in taken)
    return step if fits else None


def shapes_of(values: Iterable[ir.Value]) -> tuple[Shape, ...] | None:
    """The shapes of tensors of plain elements; None where one is something else, or not static."""
    shapes: list[Shape] = []
    for value in values:
        kind = value.type
        if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
            return None
        if kind.encoding is not None or not isinstance(kind.element_type, _PLAIN):
            return None
        shapes.append(tuple(kind.shape))
    return tuple(shapes)


_PLAIN = (ir.FloatType, ir.IntegerType, ir.ComplexType)
