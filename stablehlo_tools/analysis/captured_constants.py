"""Finds constants that reducers capture, and reduces with idempotent initial values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, producer
from stablehlo_tools.ir.views import Combining


def starts_idempotent(reduce: ir.Operation) -> bool:
    """Returns True if a reduce may read its initial values more than once.

    Combined with themselves, they must stay the same. A reducer is associative and commutative, so
    parts that each start from them then combine to the whole result. The reference interpreter
    decides. False if they are not constants.
    """
    inputs = len(reduce.operands) // 2
    inits = [producer(value) for value in list(reduce.operands)[inputs:]]
    constants = [op for op in inits if op is not None and op.name in CONSTANTS]
    taken = captured_ops(Combining(reduce).combiner)
    if len(constants) < inputs or any(maker.name not in CONSTANTS for maker in taken):
        return False
    elements = [element_of(op.results[0]) for op in constants]
    if any(isinstance(element, ir.ComplexType) for element in elements):
        return False  # the bindings cannot return these
    with reduce.context, reduce.location:
        # A program that reduces the initial values once more, each with itself.
        module = ir.Module.create()
        scalars = [ir.RankedTensorType.get([], element) for element in elements]
        wide = list(map(_wide, elements))
        wide_scalars = [ir.RankedTensorType.get([], element) for element in wide]
        function_type = ir.FunctionType.get([], [*wide_scalars, *wide_scalars])
        names: dict[str, ir.Attribute] = {
            "sym_name": ir.StringAttr.get("main"),
            "function_type": ir.TypeAttr.get(function_type),
        }
        function = ir.Operation.create(
            "func.func", attributes=names, regions=1, ip=ir.InsertionPoint(module.body)
        )
        with ir.InsertionPoint(function.regions[0].blocks.append()) as here:
            build = Builder(here, reduce.location)
            starts = [
                copy_constant(op, scalar, here)
                for op, scalar in zip(constants, scalars, strict=True)
            ]
            rows = [build.reshape(start, [1]) for start in starts]
            again = reduce.clone()
            own_constants(Combining(again).combiner, taken)
            for number, value in enumerate((*rows, *starts)):
                again.operands[number] = value
            for result, scalar in zip(again.results, scalars, strict=True):
                result.set_type(scalar)
            again.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([0])
            given = zip((*starts, *again.results), (*wide, *wide), strict=True)
            returned = [build.convert(value, element) for value, element in given]
            build.create("func.return", returned, [])
    # As bytes: NaN equals itself, and -0.0 differs from 0.0.
    values = [np.asarray(value).tobytes() for value in bindings.eval_module(module, [])]
    return values[:inputs] == values[inputs:]


def _wide(element: ir.Type) -> ir.Type:
    """Returns a type that NumPy knows and that holds every value of an element type."""
    if isinstance(element, ir.FloatType):
        return ir.F64Type.get()
    if isinstance(element, ir.IntegerType) and 1 < element.width < 8:
        return ir.IntegerType.get_signless(64)
    return element


def captured_ops(block: ir.Block) -> list[ir.Operation]:
    """Returns the ops outside of a reducer whose results it uses, such as constants.

    MLIR moves constants out of reducers. An argument of another block counts as the op around it.
    """
    inside = {value for op in block.operations for value in op.operation.results}
    makers: dict[ir.Value, ir.Operation] = {}
    for op in block.operations:
        for value in op.operation.operands:
            if value in inside or value in list(block.arguments):
                continue
            maker = producer(value)
            makers[value] = block.owner.operation if maker is None else maker
    return list(makers.values())


def own_constants(block: ir.Block, makers: Sequence[ir.Operation]) -> None:
    """Gives a reducer copies of the constants that it captures."""
    for maker in makers:
        copy = copy_constant(maker, maker.results[0].type, ir.InsertionPoint.at_block_begin(block))
        for view in block.operations:
            operands = view.operation.operands
            for number, value in enumerate(operands):
                if value == maker.results[0]:
                    operands[number] = copy
