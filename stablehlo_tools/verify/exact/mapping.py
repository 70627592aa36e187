"""Rewrites a program so that it computes with residues modulo a prime instead of floats.

    %y = stablehlo.add %x, %x : tensor<4xf32>     ==>  %s = stablehlo.add %x, %x : tensor<4xi64>
                                                       %y = s modulo p, centred
    %z = stablehlo.tanh %y : tensor<4xf32>        ==>  %z = call @field_tanh(%y), a mixing hash

| floats | residues |
|---|---|
| constants | the fractions m * 2**e that they are; infinities are the ends of the range |
| add, subtract, multiply, negate, dots, convolutions | in the field |
| x / y | x * y**(p-2), so that x / 0 is 0 |
| sums by reduce, scatter, windows, all_reduce, reduce_scatter | plain sums, then modulo p |
| maximum, minimum, clamp, compare, sort, sign, abs | by the order of residues |
| FFT | the sums that it is, with a root of unity |
| exponential, tanh, rsqrt, floor, ... | uninterpreted: a mixing hash with the right value at 0 |
| conversions between floats, reduce_precision, quantization | identity: nothing is rounded |
| integer to float; float to integer | the integer modulo p; the residue |
| bitcasts of floats | the residue times a constant, with the same bits as an integer |
| custom calls, factorizations | uninterpreted functions of all operands, or of each matrix |
| integers, random bits, control flow, collectives, tokens, shardings | unchanged |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    BROADCAST,
    CALL,
    COMPARE,
    COMPOSITE,
    CONVERT,
    CUSTOM_CALL,
    FFT,
    MANUAL_COMPUTATION,
    RESHAPE,
    WHILE,
)
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import CONSTANTS, is_splat, producer
from stablehlo_tools.ir.walk import FUNCTION, callee_name, ops_named
from stablehlo_tools.verify.exact.constants import UnmappedError, elements_of
from stablehlo_tools.verify.exact.field import Field, choose_field
from stablehlo_tools.verify.exact.field_builder import FieldBuilder
from stablehlo_tools.verify.exact.field_rules import SUMMING, is_extremum, is_sort, is_sum, rule_of
from stablehlo_tools.verify.exact.host_functions import HostFunction
from stablehlo_tools.verify.exact.mapped_module import (
    MappedModule,
    MappedOp,
    field_type,
    is_inexact,
)

_COMPARING = (COMPARE, "stablehlo.maximum", "stablehlo.minimum", "stablehlo.clamp", CALL)
_LARGEST_COMPARED = 2.0**40
_SPREADING = (BROADCAST, RESHAPE, CONVERT)
_CARRYING = (MANUAL_COMPUTATION, WHILE)  # an argument of their region starts as the operand
_SCALAR_REGIONS = SUMMING | {"stablehlo.sort", "stablehlo.map"}


def field_of(modules: Iterable[ir.Module]) -> Field:
    """Chooses the field for some programs, by their compared constants and sizes of FFTs.

    Raises UnmappedError if no prime below 2**24 has roots of unity for all sizes."""
    constants: set[float] = set()
    sizes: set[int] = set()
    for module in modules:
        for op in ops_named(module.operation, (FFT,)):
            sizes.update(integers(op, "fft_length"))
        for op in ops_named(module.operation, _COMPARING):
            for value in op.operands:
                number = _real_number(value)
                if np.isfinite(number) and abs(number) < _LARGEST_COMPARED:
                    constants.add(number)
    chosen = choose_field(constants, sizes)
    if chosen is None:
        raise UnmappedError(f"Fourier transforms of the sizes {sorted(sizes)}")
    return chosen


def _real_number(value: ir.Value) -> float:
    """Returns the number in all elements of a float or quantized value; NaN if not constant.

    A carry of a loop counts with its value before the loop, because it decides whether an iteration
    runs: `residual > 1e-6`, if `residual` starts at 1."""
    while (op := producer(value)) is None or op.name in _SPREADING:
        if op is None:
            holder = ir.BlockArgument(value).owner.owner.operation
            if holder.name not in _CARRYING:
                return math.nan
            value = holder.operands[ir.BlockArgument(value).arg_number]
        else:
            value = op.operands[0]
    if op.name not in CONSTANTS or not is_inexact(op.results[0].type):
        return math.nan
    is_complex = isinstance(element_of(op.results[0]), ir.ComplexType)
    return math.nan if is_complex or not is_splat(op) else float(elements_of(op).reshape(-1)[0])


def map_into_field(module: ir.Module, field: Field, functions: list[HostFunction]) -> None:
    """Rewrites a module in place, and adds its host functions to `functions`.

    Raises UnmappedError, located at the op, if an op has no form in the field.
    """
    mapped = MappedModule(module, field, functions)
    with module.context, ir.Location.unknown():
        # The rules need the types from before the retyping.
        ops = list(_record(module.operation, inline=False, plain=False))
        for each in ops:
            _retype(each)
        for each in ops:
            with each.op.location:
                _rewrite(mapped, each)
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise UnmappedError(f"the program in the field does not verify: {error}") from None


def _record(root: ir.Operation, *, inline: bool, plain: bool) -> Iterator[MappedOp]:
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                op = view.operation
                operands, results = ([v.type for v in side] for side in (op.operands, op.results))
                yield MappedOp(op, op.name, operands, results, inline, plain)
                if op.name == COMPOSITE:  # it is erased with its regions
                    continue
                within = inline or op.name in _SCALAR_REGIONS
                is_plain = is_sum(op) or is_extremum(op) or is_sort(op)
                yield from _record(op, inline=within, plain=is_plain)


def _retype(each: MappedOp) -> None:
    values: list[ir.Value] = list(each.op.results)
    for region in each.op.regions:
        for block in region.blocks:
            values.extend(block.arguments)
    try:
        for value in values:
            type_ = field_type(value.type)
            if type_ != value.type:
                value.set_type(type_)
        if each.name == FUNCTION:
            type_ = field_type(ir.TypeAttr(each.op.attributes["function_type"]).value)
            each.op.attributes["function_type"] = ir.TypeAttr.get(type_)
    except UnmappedError as error:
        raise each.refusal(error.diagnostic.message) from None


def _rewrite(mapped: MappedModule, each: MappedOp) -> None:
    if each.name == COMPOSITE:  # a compiler may replace it by another form than its decomposition
        call = ir.Operation.create(
            CALL,
            results=[result.type for result in each.op.results],
            operands=list(each.op.operands),
            attributes={"callee": ir.FlatSymbolRefAttr.get(callee_name(each.op))},
            ip=ir.InsertionPoint(each.op),
        )
        replace(each.op, call.results)
        return
    is_mapped = any(map(is_inexact, [*each.operand_types, *each.result_types]))
    if not is_mapped and each.name != CUSTOM_CALL:  # XLA:CPU has no kernels of other platforms
        return
    rule = rule_of(each.name)
    if rule is None:
        raise each.refusal()
    rule(mapped, each, FieldBuilder(mapped.field, ir.InsertionPoint(each.op), each.op.location))
