"""Gives a collective with unused results a use that no compiler removes.

XLA deletes such a collective, in a token chain or not, while other devices still wait for it. So
the smallest value that the block returns is made to depend on it, and keeps its bits:

    %g = "stablehlo.all_gather"(%x)
    return %y
  ==>
    %g = "stablehlo.all_gather"(%x)
    %e = … the first element of %g as an unsigned integer
    %b = stablehlo.and %e, 1              // this and the next two are marked keeps_alive
    %p = stablehlo.compare LT, %b, 2      // always true, which simplifiers do not see
    %z = stablehlo.select %p, %y, 0
    return %z
"""

from __future__ import annotations

from collections.abc import Set

from stablehlo_tools.analysis.collectives import Collective, element_bits, tensor_bytes
from stablehlo_tools.analysis.liveness import OPAQUE
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import is_async_done, is_future
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import FUNCTION, terminator


def keep_alive(collective: Collective, live: Set[ir.Value]) -> None:
    """Makes a returned `live` value of the collective's block depend on the collective, in place.

    Raises a located ToolError if there is none: in a loop or branch, or if only tokens are
    returned.
    """
    op = collective.op
    owner = op.block.owner.operation
    # The results of an asynchronous collective are those of its done, if any.
    uses = [use for result in op.results for use in result.uses]
    dones = [use.owner.operation for use in uses if is_async_done(use.owner.operation)]
    results = (dones[0] if collective.is_async and dones else op).results
    tensors = (v for v in results if not is_future(v) and isinstance(v.type, ir.RankedTensorType))
    # A symbolic or empty tensor may have no first element.
    element = next((v for v in tensors if v.type.has_static_shape and 0 not in v.type.shape), None)
    if owner.name not in (FUNCTION, MANUAL_COMPUTATION) or element is None:
        raise ToolError(
            f"{collective.inner.name}: its results are unused, and no returned value can be made "
            "to use them: it is in a loop or branch, or has no element",
            op.location,
        )
    end = terminator(op.block)
    # Chooses the smallest returned tensor that is used outside, as the select copies all of it.
    sizes: dict[int, int] = {}
    for position, value in enumerate(end.operands):
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
            continue
        if owner.name == MANUAL_COMPUTATION and owner.results[position] not in live:
            continue
        if size := tensor_bytes(ir.ShapedType(type_)):
            sizes[position] = size
    chosen = min(sizes, key=lambda position: sizes[position], default=None)
    if chosen is None:
        raise ToolError(
            f"{collective.inner.name}: its results are unused, and the block around it returns "
            "no tensor that could depend on it",
            op.location,
        )
    build = Builder(ir.InsertionPoint(end), op.location)
    value = end.operands[chosen]
    # The predicate is always true, so the select keeps the value.
    is_true, kind = _write_true(build, element), element_of(value)
    if isinstance(kind, ir.ComplexType):
        part = build.splat(0, shape_of(value), kind.element_type)
        zero = build.op("complex", [part, part], value.type)
    else:
        zero = build.splat_like(0, value)
    end.operands[chosen] = _opaque(build.op("select", [is_true, value, zero], value.type))


def _write_true(build: Builder, value: ir.Value) -> ir.Value:
    """Writes a predicate that is always true, computed from the first element of a tensor."""
    element, rank = element_of(value), len(shape_of(value))
    if rank:
        value = build.reshape(build.slice(value, [0] * rank, [1] * rank), [])
    if isinstance(element, ir.ComplexType):
        element = element.element_type
        value = build.op("real", [value], build.tensor([], element))
    # As an unsigned integer, because comparisons with a NaN are false.
    is_boolean = isinstance(element, ir.IntegerType) and element.width == 1
    width = 8 if is_boolean else element_bits(element)
    bits = build.tensor([], ir.IntegerType.get_unsigned(width, build.context))
    value = build.op("convert" if is_boolean else "bitcast_convert", [value], bits)
    low = _opaque(build.op("and", [value, build.splat_like(1, value)], bits))
    return _opaque(build.compare("LT", low, build.splat_like(2, value)))


def _opaque(value: ir.Value) -> ir.Value:
    """Marks the producer of a value as an op that compilers do not simplify."""
    maker_of(value).attributes[OPAQUE] = ir.UnitAttr.get(value.context)
    return value
