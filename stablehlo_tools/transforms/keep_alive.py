"""Gives a collective whose results nobody uses a use that no compiler removes.

XLA deletes such a collective, in a token chain or not, while other devices still wait for it. Here
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
from stablehlo_tools.ir.walk import FUNCTION, terminator

_OPAQUE_KINDS = frozenset({"and", "compare", "select"})  # through which compilers do not see


def keep_alive(collective: Collective, live: Set[ir.Value]) -> None:
    """Makes a value that the collective's block returns depend on it, in place: one that is `live`.

    Raises a located ToolError where there is none: in a loop or branch, or beside tokens only.
    """
    op = collective.op
    owner = op.block.owner.operation
    # The op that has the collective's results: of an asynchronous one its done, if any.
    uses = [use for result in collective.op.results for use in result.uses]
    dones = [use.owner.operation for use in uses if is_async_done(use.owner.operation)]
    element = _first_tensor(dones[0] if collective.is_async and dones else collective.op)
    if owner.name not in (FUNCTION, MANUAL_COMPUTATION) or element is None:
        raise ToolError(
            f"{collective.inner.name}: nobody uses its results and nothing beside it can be made "
            "to: it stands in a loop or branch, or has no element",
            op.location,
        )
    end = terminator(op.block)
    # The smallest returned tensor that is used outside.
    sizes: dict[int, int] = {}
    for position, value in enumerate(end.operands):
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
            continue
        if owner.name == MANUAL_COMPUTATION and owner.results[position] not in live:
            continue
        size = tensor_bytes(ir.ShapedType(type_))
        if size:
            sizes[position] = size
    chosen = min(sizes, key=lambda position: sizes[position], default=None)
    if chosen is None:
        raise ToolError(
            f"{collective.inner.name}: nobody uses its results, and the block around it returns "
            "no tensor that could depend on it",
            op.location,
        )
    with ir.InsertionPoint(end), op.location:
        end.operands[chosen] = _guarded(end.operands[chosen], _always_true(element))


def _first_tensor(op: ir.Operation) -> ir.Value | None:
    for result in op.results:
        type_ = result.type
        if not isinstance(type_, ir.RankedTensorType) or is_future(result):
            continue
        if type_.has_static_shape and 0 not in type_.shape:
            return result
    return None


def _always_true(value: ir.Value) -> ir.Value:
    """A predicate computed from the first element of a tensor."""
    type_ = ir.RankedTensorType(value.type)
    element = type_.element_type
    if type_.rank:
        ones = [1] * type_.rank
        value = _create(
            "slice",
            [value],
            ir.RankedTensorType.get(ones, element),
            start_indices=ir.DenseI64ArrayAttr.get([0] * type_.rank),
            limit_indices=ir.DenseI64ArrayAttr.get(ones),
            strides=ir.DenseI64ArrayAttr.get(ones),
        )
        value = _create("reshape", [value], ir.RankedTensorType.get([], element))
    if isinstance(element, ir.ComplexType):
        element = element.element_type
        value = _create("real", [value], ir.RankedTensorType.get([], element))
    is_boolean = isinstance(element, ir.IntegerType) and element.width == 1
    width = 8 if is_boolean else element_bits(element)
    bits = ir.RankedTensorType.get([], ir.IntegerType.get_unsigned(width))
    value = _create("convert" if is_boolean else "bitcast_convert", [value], bits)
    low = _create("and", [value, _integer(1, bits)], bits)
    boolean = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
    direction = ir.Attribute.parse("#stablehlo<comparison_direction LT>")
    return _create("compare", [low, _integer(2, bits)], boolean, comparison_direction=direction)


def _guarded(value: ir.Value, predicate: ir.Value) -> ir.Value:
    """The value where the predicate holds, as it always does."""
    type_ = ir.RankedTensorType(value.type)
    return _create("select", [predicate, value, _zero(type_)], type_)


def _zero(type_: ir.RankedTensorType) -> ir.Value:
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        part = _zero(ir.RankedTensorType.get(type_.shape, element.element_type))
        return _create("complex", [part, part], type_)
    text = "0.0"
    if isinstance(element, ir.IntegerType):
        text = "false" if element.width == 1 else "0"
    return _constant(text, type_)


def _integer(value: int, type_: ir.RankedTensorType) -> ir.Value:
    return _constant(str(value), type_)


def _constant(text: str, type_: ir.RankedTensorType) -> ir.Value:
    attribute = ir.Attribute.parse(f"dense<{text}> : {type_}")
    return ir.Operation.create(
        "stablehlo.constant", results=[type_], attributes={"value": attribute}
    ).results[0]


def _create(
    kind: str, operands: list[ir.Value], result: ir.Type, **attributes: ir.Attribute
) -> ir.Value:
    if kind in _OPAQUE_KINDS:
        attributes[OPAQUE] = ir.UnitAttr.get()
    return ir.Operation.create(
        f"stablehlo.{kind}", results=[result], operands=operands, attributes=attributes
    ).results[0]
