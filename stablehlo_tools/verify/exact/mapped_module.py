"""A module while it is mapped into a field: its ops with their old types, and helper functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import label
from stablehlo_tools.dialect.names import CALL
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import FUNCTION
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.field_builder import FieldBuilder
from stablehlo_tools.verify.exact.host_functions import HostFunction

_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


@dataclass(frozen=True)
class MappedOp:
    """An op with its types before the mapping.

    `inline`: it is in a region of scalars, in which XLA allows no calls. `plain`: it is in a region
    that sums, or that compares integers that sort like the residues."""

    op: ir.Operation
    name: str
    operand_types: list[ir.Type]
    result_types: list[ir.Type]
    inline: bool
    plain: bool

    def refusal(self, why: str = "") -> UnmappedError:
        """Returns the error for an op that has no form in the field."""
        return UnmappedError(f"{label(self.op)}{f': {why}' if why else ''}", self.op.location)

    def replace(self, value: ir.Value) -> None:
        """Replaces the op's only result by a value, which gets its sharding; erases the op."""
        maker = producer(value)
        for name in _SHARDINGS:
            if name in self.op.attributes and maker is not None and len(maker.results) == 1:
                maker.attributes[name] = self.op.attributes[name]
        self.op.results[0].replace_all_uses_with(value)
        self.op.erase()


class MappedModule:
    """A module while it is mapped, and the functions added to it."""

    def __init__(self, module: ir.Module, field: Field, host_functions: list[HostFunction]) -> None:
        self.module = module
        self.field = field
        self.host_functions = host_functions
        self._helpers: set[str] = set()

    def helper(
        self,
        each: MappedOp,
        builder: FieldBuilder,
        name: str,
        function: Callable[..., ir.Value],
        *values: ir.Value,
    ) -> ir.Value:
        """Returns the result of `function(builder, *values)`, written once per shape and called.

        In a region of scalars, it is written in place."""
        if each.inline:
            return function(builder, *values)
        kind = "complex" if any(map(builder.is_complex, values)) else "real"
        shape = "x".join(map(str, shape_of(values[0])))
        symbol = f"field_{re.sub(r'\W', '_', name)}_{kind}_{len(values)}_{shape}"
        types = [value.type for value in values]
        if symbol not in self._helpers:
            self._helpers.add(symbol)
            attributes: dict[str, ir.Attribute] = {
                "sym_name": ir.StringAttr.get(symbol),
                "sym_visibility": ir.StringAttr.get("private"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, types[:1])),
            }
            point = ir.InsertionPoint(self.module.body)
            written = ir.Operation.create(FUNCTION, regions=1, attributes=attributes, ip=point)
            block = written.regions[0].blocks.append(*types)
            inner = FieldBuilder(self.field, ir.InsertionPoint(block), builder.location)
            result = function(inner, *block.arguments)
            ir.Operation.create("func.return", operands=[result], ip=inner.point)
        return ir.Operation.create(
            CALL,
            results=types[:1],
            operands=list(values),
            attributes={"callee": ir.FlatSymbolRefAttr.get(symbol)},
            ip=builder.point,
        ).results[0]


def is_inexact(type_: ir.Type) -> bool:
    """Returns True if a type is that of a tensor of floats, complex numbers or quantized
    numbers."""
    if isinstance(type_, ir.TupleType):
        return any(is_inexact(type_.get_type(i)) for i in range(type_.num_types))
    if not isinstance(type_, ir.RankedTensorType):
        return False
    element = type_.element_type
    is_float = isinstance(element, ir.FloatType | ir.ComplexType)
    return is_float or str(element).startswith("!quant.")


def field_type(type_: ir.Type) -> ir.Type:
    """Returns the type of the residues of a tensor; any other type unchanged.

    Raises UnmappedError for a dynamic shape.
    """
    if isinstance(type_, ir.FunctionType):
        inputs, results = (list(map(field_type, s)) for s in (type_.inputs, type_.results))
        return ir.FunctionType.get(inputs, results)
    if isinstance(type_, ir.TupleType):
        parts = [field_type(type_.get_type(i)) for i in range(type_.num_types)]
        return ir.TupleType.get_tuple(parts)
    if not is_inexact(type_):
        return type_
    assert isinstance(type_, ir.RankedTensorType)
    if not type_.has_static_shape:
        raise UnmappedError(f"{type_} has a dynamic shape")
    element: ir.Type = ir.IntegerType.get_signless(64)
    if isinstance(type_.element_type, ir.ComplexType):
        # XLA has no complex integers; a double holds residues and their products exactly.
        element = ir.ComplexType.get(ir.F64Type.get())
    return ir.RankedTensorType.get(type_.shape, element, type_.encoding)
