"""What the region of a reduce, a scatter or an all_reduce computes from two elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.reducers import (
    REDUCERS,
    complex_identity,
    float_identity,
    integer_identity,
)
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, producer, splat_of


def reducer_kind(block: ir.Block) -> str | None:
    """The one op of REDUCERS that combines a block's two arguments; None for any other region."""
    ops = [op.operation for op in block.operations]
    if len(ops) != 2 or len(block.arguments) != 2:
        return None
    combine, end = ops
    reducer = combine.name.removeprefix("stablehlo.")
    both = set(combine.operands) == set(block.arguments)
    if reducer not in REDUCERS or not both or list(end.operands) != list(combine.results):
        return None
    return reducer


def identity_of(reducer: str, element_type: ir.Type) -> float | int | None:
    """The element that leaves every other as it is under a reducer of REDUCERS.

    For a sum of floats -0.0, which unlike 0.0 keeps -0.0. None where there is none to write.
    """
    if isinstance(element_type, ir.FloatType):
        return float_identity(reducer)
    if not isinstance(element_type, ir.IntegerType):
        return None
    return integer_identity(reducer, element_type.width, signed=not element_type.is_unsigned)


def starts_idempotent(reduce: ir.Operation) -> bool:
    """Whether a reduce may take its initial values more than once: combined with themselves they
    stay what they are.

    Since a reducer is associative and commutative, parts that each start from them then combine to
    what the whole would. Asked of the reference interpreter; False where they are not constants.
    """
    inputs = len(reduce.operands) // 2
    inits = [producer(value) for value in list(reduce.operands)[inputs:]]
    constants = [op for op in inits if op is not None and op.name in CONSTANTS]
    taken = captured(reduce.regions[0].blocks[0])
    if len(constants) < inputs or any(maker.name not in CONSTANTS for maker in taken):
        return False
    elements = [element_of(op.results[0]) for op in constants]
    if any(isinstance(element, ir.ComplexType) for element in elements):
        return False  # which the bindings do not hand out
    with reduce.context, reduce.location:
        module = ir.Module.create()
        scalars = [ir.RankedTensorType.get([], element) for element in elements]
        vectors = [ir.RankedTensorType.get([1], element) for element in elements]
        wide = [ir.RankedTensorType.get([], _wide(element)) for element in elements]
        function_type = ir.FunctionType.get([], [*wide, *wide])
        names: dict[str, ir.Attribute] = {
            "sym_name": ir.StringAttr.get("main"),
            "function_type": ir.TypeAttr.get(function_type),
        }
        function = ir.Operation.create(
            "func.func", attributes=names, regions=1, ip=ir.InsertionPoint(module.body)
        )
        with ir.InsertionPoint(function.regions[0].blocks.append()):
            here = ir.InsertionPoint.current
            starts = [
                copy_constant(op, scalar, here)
                for op, scalar in zip(constants, scalars, strict=True)
            ]
            rows = [
                ir.Operation.create("stablehlo.reshape", results=[row], operands=[start]).results[0]
                for start, row in zip(starts, vectors, strict=True)
            ]
            again = reduce.clone()
            own_constants(again.regions[0].blocks[0], taken)
            for number, value in enumerate((*rows, *starts)):
                again.operands[number] = value
            for result, scalar in zip(again.results, scalars, strict=True):
                result.set_type(scalar)
            again.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([0])
            returned = [
                ir.Operation.create("stablehlo.convert", results=[to], operands=[value]).results[0]
                for value, to in zip((*starts, *again.results), (*wide, *wide), strict=True)
            ]
            ir.Operation.create("func.return", operands=returned)
    values = [np.asarray(value).tobytes() for value in bindings.eval_module(module, [])]
    return values[:inputs] == values[inputs:]


def _wide(element: ir.Type) -> ir.Type:
    """The type that every value of an element type has a place in, and NumPy knows."""
    if isinstance(element, ir.FloatType):
        return ir.F64Type.get()
    if isinstance(element, ir.IntegerType) and 1 < element.width < 8:
        return ir.IntegerType.get_signless(64)
    return element


def captured(block: ir.Block) -> list[ir.Operation]:
    """The ops outside of a reducer whose results it uses, as constants are that MLIR moves out.

    An argument of another block counts as the op around it.
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
    """Gives a reducer copies of the constants that it takes from outside."""
    for maker in makers:
        start = ir.InsertionPoint.at_block_begin(block)
        copy = copy_constant(maker, maker.results[0].type, start)
        for view in block.operations:
            operands = view.operation.operands
            for number, value in enumerate(operands):
                if value == maker.results[0]:
                    operands[number] = copy


def is_identity_of(reducer: str, value: ir.Value) -> bool:
    """Whether a value is a constant, or one broadcast, that a reducer never shows in its result.

    0.0 counts for a sum of floats: all that it can change is the sign of a zero, and a sum that
    starts from it has changed that already.
    """
    number = splat_of(value)
    if number is None:
        return False
    if isinstance(number, complex):
        return number == complex_identity(reducer)
    wanted = identity_of(reducer, element_of(value))
    return wanted is not None and number == wanted
