"""The float64 version of an exported program: what the values would be without rounding.

Every float32, bfloat16 and float16 in the module becomes float64. Constants keep the numbers that
the program has, rounded as they are written there, and are widened where they are used; so are
the floats that are made from bits, as random numbers are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.export import Exported

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import ops_where

_NARROW = (ir.F32Type, ir.BF16Type, ir.F16Type)
_BITS = "stablehlo.bitcast_convert"


def widened(exported: Exported) -> Exported:
    """The program in float64, to be called under `jax.enable_x64` with `wide` arguments."""
    program = artifact.from_exported(exported)
    widen(program.module)
    return replace(
        program.to_exported(),
        in_avals=tuple(_wide_aval(aval) for aval in exported.in_avals),
        out_avals=tuple(_wide_aval(aval) for aval in exported.out_avals),
    )


def wide(array: Any) -> np.ndarray[Any, Any]:
    """An array with its floats in float64."""
    array = np.asarray(array)
    return array.astype(np.float64) if is_float(array.dtype) else array


def is_float(dtype: Any) -> bool:
    """Whether a dtype is one of floats, bfloat16 and the like included."""
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def widen(module: ir.Module) -> None:
    """Changes every float of a module to float64, in place."""
    ops = ops_where(module.operation, lambda _: True)
    with module.context, ir.Location.unknown():
        for op in ops:
            _widen_op(op)
    module.operation.verify()


def _widen_op(op: ir.Operation) -> None:
    for region in op.regions:
        for block in region.blocks:
            for argument in block.arguments:
                argument.set_type(_wide_type(argument.type))
    if "function_type" in op.attributes:
        function = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
        inputs, results = map(_wide_type, function.inputs), map(_wide_type, function.results)
        op.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(list(inputs), list(results))
        )
    if "algorithm" in op.attributes:  # of a dot: the types that it multiplies and sums in
        del op.attributes["algorithm"]
    if op.name == "stablehlo.constant":
        _widen_after(op)
    elif op.name == _BITS:
        _narrow_operand(op)
        _widen_after(op)
    elif op.name == "stablehlo.reduce_precision":
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    else:
        for result in op.results:
            result.set_type(_wide_type(result.type))


def _widen_after(op: ir.Operation) -> None:
    """Leaves an op as it is; those that use its result get it widened."""
    result = op.results[0]
    kind = _wide_type(result.type)
    if kind == result.type:
        return
    after = ir.InsertionPoint.after(op)
    converted = _convert(result, kind, after)
    result.replace_all_uses_except(converted, maker_of(converted))


def _narrow_operand(op: ir.Operation) -> None:
    """Gives an op that looks at a float's bits those of float32; the operand is wide by now."""
    value, element = op.operands[0], ir.RankedTensorType(op.results[0].type).element_type
    kind = ir.RankedTensorType(value.type)
    if isinstance(kind.element_type, ir.F64Type):
        assert isinstance(element, ir.IntegerType), "only the bits of float32 are looked at"
        assert element.width == 32, "only the bits of float32 are looked at"
        narrow = ir.RankedTensorType.get(kind.shape, ir.F32Type.get())
        op.operands[0] = _convert(value, narrow, ir.InsertionPoint(op))


def _convert(value: ir.Value, kind: ir.Type, point: ir.InsertionPoint) -> ir.Value:
    return ir.Operation.create(
        "stablehlo.convert", results=[kind], operands=[value], ip=point
    ).results[0]


def _wide_type(kind: ir.Type) -> ir.Type:
    if not isinstance(kind, ir.RankedTensorType):
        return kind
    if not isinstance(kind.element_type, _NARROW):
        return kind
    return ir.RankedTensorType.get(kind.shape, ir.F64Type.get(), kind.encoding)


def _wide_aval(aval: Any) -> Any:
    return aval.update(dtype=np.dtype(np.float64)) if is_float(aval.dtype) else aval
