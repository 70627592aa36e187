"""Dots, convolutions and reductions: along the batch they give partial results."""

from __future__ import annotations

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.dimension_propagation.layout import Asked, Layout, Step
from stablehlo_tools.analysis.dimension_propagation.shape_rules import along
from stablehlo_tools.analysis.reducers import is_identity_of, reducer_kind
from stablehlo_tools.bindings import ir


def dot_general(asked: Asked) -> Step | None:
    """A batching dimension stays, a contracted one leaves a sum, a free one is the result's."""
    dims = bindings.DotDimensionNumbers(asked.op.attributes["dot_dimension_numbers"])
    batching = (list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions))
    contracting = (list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions))
    side = 0 if asked.layouts[0] is not None else 1
    given, other = asked.layouts[side], asked.layouts[1 - side]
    assert given is not None
    for paired, summed in ((batching, False), (contracting, True)):
        if given.dim not in paired[side]:
            continue
        place = paired[side].index(given.dim)
        partner = given.at(paired[1 - side][place])
        if other not in (None, partner):
            return None
        taken = (given, partner) if side == 0 else (partner, given)
        return Step(taken, (None,), "add") if summed else Step(taken, (Layout(place, given.outer),))
    if other is not None:
        return None
    free = [
        [d for d in range(len(shape)) if d not in batching[i] and d not in contracting[i]]
        for i, shape in enumerate(asked.operands)
    ]
    before = len(batching[0]) + (len(free[0]) if side else 0)
    return Step(asked.layouts, (given.at(before + free[side].index(given.dim)),))


def convolution(asked: Asked) -> Step | None:
    """The batch of the images; or, in the gradient of a kernel, the features that are summed."""
    op = asked.op
    dims = bindings.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    image, kernel = asked.layouts
    by_batch = asked.integer("batch_group_count", 1) != 1
    grouped = asked.integer("feature_group_count", 1) != 1
    if by_batch and (grouped or None in asked.layouts):
        return None
    if image is not None and kernel is None and image.dim == dims.input_batch_dimension:
        return Step((image, None), (image.at(dims.output_batch_dimension),))
    if grouped:
        return None
    if image is None and kernel is not None and kernel.dim == dims.kernel_output_feature_dimension:
        return Step((None, kernel), (kernel.at(dims.output_feature_dimension),))
    given = asked.layouts[0] or asked.layouts[1]
    assert given is not None
    pair = (
        given.at(dims.input_feature_dimension),
        given.at(dims.kernel_input_feature_dimension),
    )
    if all(layout in (None, taken) for layout, taken in zip(asked.layouts, pair, strict=True)):
        return Step(pair, (None,), "add")
    return None


def reduce(asked: Asked) -> Step | None:
    """Along other dimensions; or along the batch, from an initial value that may count twice."""
    inputs = len(asked.operands) // 2
    given = asked.given
    if given is None or any(layout is not None for layout in asked.layouts[inputs:]):
        return None
    taken = (given,) * inputs + (None,) * inputs
    dimensions = asked.integers("dimensions")
    if given.dim not in dimensions:
        dim = given.dim - sum(reduced < given.dim for reduced in dimensions)
        return Step(taken, (given.at(dim),) * inputs)
    kind = reducer_kind(asked.op.regions[0].blocks[0])
    if inputs > 1 or kind is None or not is_identity_of(kind, asked.op.operands[1]):
        return None
    return Step(taken, (None,), kind)


def reduce_window(asked: Asked) -> Step | None:
    """Windows of one element along the batch."""
    inputs = len(asked.operands) // 2
    given = asked.given
    if given is None or any(layout is not None for layout in asked.layouts[inputs:]):
        return None
    if not _one_wide(asked, given, ("window_strides", "base_dilations", "window_dilations")):
        return None
    return Step((given,) * inputs + (None,) * inputs, (given,) * inputs)


def select_and_scatter(asked: Asked) -> Step | None:
    """The gradient of such a window."""
    given = asked.given
    if given is None or asked.layouts[2] is not None:
        return None
    if not _one_wide(asked, given, ("window_strides",)):
        return None
    return Step((given, given, None), (given,))


def batch_norm_inference(asked: Asked) -> Step | None:
    """With statistics that are given, each element for itself."""
    given = asked.layouts[0]
    if given is None or any(layout is not None for layout in asked.layouts[1:]):
        return None
    if given.dim == asked.integer("feature_index"):
        return None
    return Step((given, None, None, None, None), (given,))


def _one_wide(asked: Asked, given: Layout, spread: tuple[str, ...]) -> bool:
    op = asked.op
    if not along(op, "window_dimensions", given, 1):
        return False
    if not all(along(op, name, given, 1) for name in spread):
        return False
    return "padding" not in op.attributes or not np.array(_numbers(op, "padding"))[given.dim].any()


def _numbers(op: ir.Operation, name: str) -> ir.DenseIntElementsAttr:
    return ir.DenseIntElementsAttr(op.attributes[name])
