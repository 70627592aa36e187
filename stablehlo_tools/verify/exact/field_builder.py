"""Writes arithmetic modulo a prime as StableHLO.

Real residues are i64. A complex residue is a complex<f64> whose parts are centred residues, so that
products are exact: they have fewer than 53 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import DOT_GENERAL, WHILE
from stablehlo_tools.ir.builder import Builder, barrier, element_of, shape_of
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.exact.field import (
    FINAL_MULTIPLIER,
    INTEGERS,
    MULTIPLIER,
    RESIDUE_BITS,
    Field,
    Hash,
)

CENTRED_BITS = 23  # bits of the absolute value of a centred residue
_FEW_BITS = 12  # bits of the lower half of a factor
_MOST_TERMS = 2**18  # products of 24 x 12 bits whose sum is exact in a double
_SMALL_PRODUCT = 2**16  # multiplications that XLA:CPU does in integers without a library
_INTEGER_TERMS = 2**15  # products of 48 bits whose sum is exact in an int64


class FieldBuilder(Builder):
    """Creates ops on residues at an insertion point."""

    def __init__(self, field: Field, point: ir.InsertionPoint, location: ir.Location) -> None:
        super().__init__(point, location)
        self.field = field
        self.i64 = ir.IntegerType.get_signless(64, self.context)
        self.boolean = ir.IntegerType.get_signless(1, self.context)
        self.f64 = ir.F64Type.get(self.context)

    def is_complex(self, value: ir.Value) -> bool:
        """Returns True if a value holds complex residues."""
        return isinstance(element_of(value), ir.ComplexType)

    def number(self, residue: int, like: ir.Value) -> ir.Value:
        """A constant residue in the shape of a real one."""
        # Factors of hashes are unsigned; i64 attributes are signed.
        wrapped = (residue + 2**63) % 2**64 - 2**63
        return self.splat(wrapped, shape_of(like), self.i64)

    def with_number(self, name: str, value: ir.Value, number: int) -> ir.Value:
        """Creates a binary op on a value and one integer."""
        return self.same(name, value, self.number(number, value))

    # Complex residues as pairs of real ones.

    def parts(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the real and the imaginary part of complex residues, as i64."""
        floats = self.tensor(shape_of(value), self.f64)
        real, imaginary = (self.op(part, [value], floats) for part in ("real", "imag"))
        return self.convert(real, self.i64), self.convert(imaginary, self.i64)

    def complex(self, real: ir.Value, imaginary: ir.Value) -> ir.Value:
        """Returns complex residues with these parts."""
        operands = [self.convert(part, self.f64) for part in (real, imaginary)]
        element = ir.ComplexType.get(self.f64)
        return self.op("complex", operands, self.tensor(shape_of(real), element))

    def by_part(self, function: Callable[[ir.Value], ir.Value], value: ir.Value) -> ir.Value:
        """Applies a function of real residues, to each part of complex ones."""
        if not self.is_complex(value):
            return function(value)
        real, imaginary = self.parts(value)
        return self.complex(function(real), function(imaginary))

    # Field arithmetic.

    def centre_residues(self, value: ir.Value) -> ir.Value:
        """Returns the centred residues of numbers with an absolute value below 2**62."""
        return self.by_part(self._centre_part, value)

    def _centre_part(self, value: ir.Value) -> ir.Value:
        positive = self.with_number("add", value, self.field.shift)
        residue = self.with_number("remainder", positive, self.field.prime)
        return self.with_number("subtract", residue, self.field.half)

    def add(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """Returns the sum of residues."""
        return self.centre_residues(self.same("add", one, other))

    def times(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """Returns the product of residues."""
        return self.centre_residues(self.same("multiply", one, other))

    def times_number(self, value: ir.Value, number: int) -> ir.Value:
        """Returns the product of residues and one number."""
        return self.by_part(
            lambda v: self._centre_part(self.with_number("multiply", v, number)), value
        )

    def to_ordered(self, value: ir.Value) -> ir.Value:
        """Returns integers that sort like the residues, as `Field.to_ordered` does."""
        size = self.same("abs", value)
        image = self.with_number("multiply", value, self.field.scale)
        limit = self.with_number("add", size, self.field.beyond)
        limited = self.op("clamp", [self.same("negate", limit), image, limit], value.type)
        is_integer = self.compare("LT", size, self.number(INTEGERS, size))
        place = self.op("select", [is_integer, limited, self._centre_part(image)], value.type)
        return self.same("add", self.with_number("multiply", place, 2**RESIDUE_BITS), value)

    def from_ordered(self, value: ir.Value) -> ir.Value:
        """Inverts `ordered`: returns the residues."""
        return self._lowest(value, RESIDUE_BITS)

    def power(self, value: ir.Value, exponent: int) -> ir.Value:
        """Returns a residue to a power of at least 1, by repeated squaring."""
        result = value
        for bit in bin(exponent)[3:]:
            result = self.times(result, result)
            if bit == "1":
                result = self.times(result, value)
        return result

    def power_by_loop(self, value: ir.Value, exponent: int) -> ir.Value:
        """Returns the power by a loop over the exponent's bits, which compiles much faster.

        The barrier hides the trip count from XLA, which would otherwise unroll the loop."""
        steps = self.splat(exponent.bit_length() - 1, [], self.i64)
        [step] = barrier([steps], self.point, self.location).results
        types = [step.type, value.type]
        loop = self.create(WHILE, [step, self.number(1, value)], types, regions=2)
        places = [self.location] * 2
        condition, body = (r.blocks.append(*types, arg_locs=places) for r in loop.regions)
        inner = FieldBuilder(self.field, ir.InsertionPoint(condition), self.location)
        zero = inner.splat(0, [], self.i64)
        inner.end_region([inner.compare("GE", condition.arguments[0], zero)])
        inner = FieldBuilder(self.field, ir.InsertionPoint(body), self.location)
        place, power = body.arguments
        square = inner.times(power, power)
        bits = inner.same("shift_right_logical", inner.splat(exponent, [], self.i64), place)
        is_set = inner.convert(inner.with_number("and", bits, 1), inner.boolean)
        power = inner.op("select", [is_set, inner.times(square, value), square], value.type)
        inner.end_region([inner.with_number("subtract", place, 1), power])
        return loop.results[1]

    def inverse(self, value: ir.Value) -> ir.Value:
        """Returns 1 / x, and 0 for 0, as x**(prime - 2); for complex numbers conj(z) / |z|**2."""
        if not self.is_complex(value):
            write = self.power_by_loop if shape_of(value) else self.power
            return write(value, self.field.prime - 2)
        real, imaginary = self.parts(value)
        scale = self.inverse(self.norm(value))
        negated = self.same("negate", imaginary)
        return self.complex(self.times(real, scale), self.times(negated, scale))

    def norm(self, value: ir.Value) -> ir.Value:
        """Returns |z|**2 of complex residues."""
        real, imaginary = self.parts(value)
        squares = (self.same("multiply", part, part) for part in (real, imaginary))
        return self.centre_residues(self.same("add", *squares))

    def hash_residues(self, name: str, at_zero: float | None, *values: ir.Value) -> ir.Value:
        """Returns an uninterpreted elementwise function of residues, `at_zero` if all are 0.

        For complex residues, each part of the result is a function of all parts."""
        if any(map(self.is_complex, values)):
            parts = [part for value in values for part in self.parts(value)]
            return self.complex(
                self.hash_residues(f"{name} real", at_zero, *parts),
                self.hash_residues(f"{name} imaginary", None if at_zero is None else 0, *parts),
            )
        function = Hash(name)
        state = self.number(function.salt, values[0])
        for value in values:
            state = self.with_number("multiply", self.same("xor", state, value), MULTIPLIER)
            shifted = self.with_number("shift_right_logical", state, 29)
            state = self.same("xor", state, shifted)
        state = self.with_number("multiply", state, FINAL_MULTIPLIER)
        state = self.with_number("shift_right_logical", state, 3)
        state = self.with_number("remainder", state, self.field.prime)
        shift = -self.field.half
        if at_zero is None:
            return self.with_number("add", state, shift)
        shift += self.field.residue(at_zero) - function.hash_numbers(self.field, [0] * len(values))
        return self._centre_part(self.with_number("add", state, shift))

    # Contractions.

    def product(self, op: ir.Operation, one: ir.Value, other: ir.Value, terms: int) -> ir.Value:
        """Returns the dot of residues, with the attributes of `op`.

        It is computed in integers if it is small, else as two products of doubles, of 24 times 12
        bits. Raises ToolError if the sum of `terms` products is not exact in a double.
        """
        attributes = {
            name: op.attributes[name]
            for name in op.attributes
            # These allow fewer bits than the residues have.
            if name not in ("precision_config", "algorithm")
        }
        name, shape = op.name.removeprefix("stablehlo."), shape_of(op.results[0])
        is_complex = self.is_complex(one)
        if not is_complex and math.prod(shape) * terms < _SMALL_PRODUCT and terms <= _INTEGER_TERMS:
            product = self.op(name, [one, other], self.tensor(shape, self.i64), **attributes)
            return self.centre_residues(product)
        if terms > _MOST_TERMS:
            raise ToolError(f"a sum of {terms:,} products", op.location)
        element = ir.ComplexType.get(self.f64) if is_complex else self.f64
        low = self.by_part(lambda v: self._lowest(v, _FEW_BITS), other)
        high = self.by_part(
            lambda v: self.with_number(
                "shift_right_arithmetic",
                self.same("subtract", v, self._lowest(v, _FEW_BITS)),
                _FEW_BITS,
            ),
            other,
        )
        products: list[ir.Value] = []
        for factor in (high, low):
            operands = [one, factor]
            if not is_complex:
                operands = [self.convert(value, self.f64) for value in operands]
            product = self.op(name, operands, self.tensor(shape, element), **attributes)
            products.append(product if is_complex else self.convert(product, self.i64))
        scaled = self.times_number(self.centre_residues(products[0]), 2**_FEW_BITS)
        return self.add(scaled, products[1])

    def _lowest(self, value: ir.Value, bits: int) -> ir.Value:
        """Returns the lowest bits of integers, sign-extended."""
        half = 2 ** (bits - 1)
        masked = self.with_number("and", self.with_number("add", value, half), 2 * half - 1)
        return self.with_number("subtract", masked, half)

    def contract(self, value: ir.Value, dim: int, matrix: tuple[Array, Array]) -> ir.Value:
        """Contracts one dimension of complex residues with a complex matrix [old, new]."""
        rank, size = len(shape_of(value)), matrix[0].shape[1]
        table = self.complex(*map(self.constant, matrix))
        text = (
            f"#stablehlo.dot<lhs_contracting_dimensions = [{dim}], "
            "rhs_contracting_dimensions = [0]>"
        )
        kept = [d for d in range(rank) if d != dim]
        shape = [shape_of(value)[d] for d in kept] + [size]
        types = [self.tensor(shape, ir.ComplexType.get(self.f64))]
        attributes = {"dot_dimension_numbers": ir.Attribute.parse(text, self.context)}
        op = self.create(DOT_GENERAL, [value, table], types, attributes)
        product = self.product(op, value, table, matrix[0].shape[0])
        op.erase()
        order = [*range(dim), rank - 1, *range(dim, rank - 1)]
        return self.transpose(product, order)
