"""The degree of a program's values, as polynomials of its inputs, its hashes and its reciprocals.

Two different polynomials of degree d agree on a random input with a probability of at most d / p.
Hashes and reciprocals count as new random variables. So d is the largest degree of any output and
of any operand of a hash or a reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stablehlo_tools.analysis.loops import constant_integer, count_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CASE, DIVIDE, IF, MULTIPLY, WHILE
from stablehlo_tools.dialect.traits import (
    CARRIERS,
    COMPUTATIONS,
    TERMINATORS,
    Trait,
    full_names,
    ops_with_any,
)
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float, splat_of
from stablehlo_tools.ir.views import Case, Function, While, WithBody
from stablehlo_tools.ir.walk import entry_function, ops_where

_PRODUCTS = ops_with_any(Trait.CONTRACTION) | {MULTIPLY}
_HASHED = ops_with_any(Trait.TRANSCENDENTAL | Trait.INTEGRAL | Trait.OPAQUE | Trait.LIBRARY)
_BY_ORDER = full_names("abs clamp maximum minimum select_and_scatter sign sort")
_MOST_ITERATIONS = 1_000  # of a loop, read to find its degree


def degree_of(module: ir.Module, prime: int) -> int | None:
    """Returns the largest degree of a program's outputs, hashes and divisors.

    None if it is not below the prime, or if the program is piecewise by the order of numbers: two
    different programs may have equal pieces."""
    copy = copy_module(module)
    inline_all_calls(copy, products=True)
    if any(map(_is_piecewise, ops_where(copy.operation, lambda op: True))):
        return None
    block = Function(entry_function(copy)).body
    finder = _DegreeFinder(prime)
    outputs = finder.enter(block, [int(is_float(argument.type)) for argument in block.arguments])
    largest = max([finder.largest, *outputs])
    return largest if largest < prime else None


class _DegreeFinder:
    def __init__(self, prime: int) -> None:
        self.prime = prime
        self.largest = 0  # degree of a hash's operand or of a divisor
        self.known: dict[ir.Value, int] = {}

    def enter(self, block: ir.Block, given: Sequence[int]) -> list[int]:
        """Returns the degrees of a block's results, given those of its arguments."""
        self.known.update(zip(block.arguments, given, strict=True))
        for view in block.operations:
            op = view.operation
            operands = [self.known.get(value, 0) for value in op.operands]
            if op.name in TERMINATORS:
                return operands
            for result, degree in zip(op.results, self.results(op, operands), strict=True):
                # Larger degrees prove nothing either, and products in loops make huge numbers.
                self.known[result] = min(degree, self.prime)
        return []

    def results(self, op: ir.Operation, operands: list[int]) -> Sequence[int]:
        if op.name == WHILE:
            return self.loop(op, operands)
        if op.name in (IF, CASE):
            branches = [self.enter(branch, []) for branch in Case(op).branches]
            return [max(degrees) for degrees in zip(*branches, strict=True)]
        if op.name in COMPUTATIONS:
            return self.enter(WithBody(op).body, operands)
        degree = self.degree_of_op(op, operands)
        return [degree if is_float(result.type) else 0 for result in op.results]

    def degree_of_op(self, op: ir.Operation, operands: Sequence[int]) -> int:
        """Returns the degree of an op's results, given those of its operands."""
        largest = max(operands, default=0)
        if op.name in _PRODUCTS:
            return sum(operands)
        if op.name == DIVIDE:
            # A constant divisor is a constant factor.
            if splat_of(op.operands[1]) is not None:
                return operands[0]
            self.largest = max(self.largest, operands[1])
            return operands[0] + 1
        if op.name not in _HASHED:
            return largest
        self.largest = max(self.largest, largest)
        return 1

    def loop(self, op: ir.Operation, carried: list[int]) -> list[int]:
        """Returns the degrees of a loop's results, given those of its carries.

        Reads the body once per trip, or until no degree grows or one reaches the prime."""

        def known_integer(value: ir.Value) -> Sequence[int] | None:
            number = constant_integer(value)
            return None if number is None else (number,)

        found = count_trips(op, known_integer)
        count = math.inf if isinstance(found, str) else max(found.trips)
        read = 0
        while read < count:
            self.enter(While(op).condition, carried)
            ends = self.enter(While(op).body, carried)
            grown = [max(pair) for pair in zip(carried, ends, strict=True)]
            read += 1
            if grown == carried:
                break
            if read == _MOST_ITERATIONS or max(grown) >= self.prime:
                self.largest = self.prime
                return grown
            carried = grown
        return carried


def _is_piecewise(op: ir.Operation) -> bool:
    """Returns True if the results of an op, or of its users, depend on the order of floats."""
    if not any(is_float(value.type) for value in op.operands):
        return False
    if op.name in _BY_ORDER:
        return True
    if op.regions or op.name in TERMINATORS | CARRIERS:
        return False
    return any(
        isinstance(result.type, ir.RankedTensorType)
        and isinstance(result.type.element_type, ir.IntegerType)
        for result in op.results
    )
