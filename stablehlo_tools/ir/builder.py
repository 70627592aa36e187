"""Writing small ops in front of another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.bindings import ir

_WITH_REDUCER = frozenset({"all_reduce", "reduce", "reduce_scatter"})


class Builder:
    """Creates ops at a place, all with one location."""

    def __init__(self, point: ir.InsertionPoint, location: ir.Location) -> None:
        self._point = point
        self.location = location
        self.context = location.context

    def op(
        self,
        name: str,
        operands: Sequence[ir.Value],
        kind: ir.Type,
        **attributes: ir.Attribute,
    ) -> ir.Value:
        """An op of StableHLO with one result; that of a reducer has an empty region."""
        return ir.Operation.create(
            f"stablehlo.{name}",
            results=[kind],
            operands=list(operands),
            attributes=attributes,
            regions=int(name in _WITH_REDUCER),
            loc=self.location,
            ip=self._point,
        ).results[0]

    def tensor(self, shape: Sequence[int], element: ir.Type) -> ir.Type:
        """The type of a tensor."""
        return ir.RankedTensorType.get(list(shape), element, loc=self.location)

    def splat(self, number: float, shape: Sequence[int], element: ir.Type) -> ir.Value:
        """A constant tensor of one number."""
        value: ir.Attribute
        if isinstance(element, ir.FloatType):
            value = ir.FloatAttr.get(element, number, loc=self.location)
        else:
            value = ir.IntegerAttr.get(element, int(number))
        kind = self.tensor(shape, element)
        return self.op("constant", [], kind, value=ir.DenseElementsAttr.get_splat(kind, value))

    def table(self, numbers: Sequence[int]) -> ir.Value:
        """A constant vector of i32."""
        with self.context:
            value = ir.DenseElementsAttr.get(np.asarray(numbers, dtype=np.int32))
        return self.op("constant", [], value.type, value=value)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """The same elements in another shape."""
        return self.op("reshape", [value], self.tensor(shape, element_of(value)))

    def broadcast(self, value: ir.Value, shape: Sequence[int], dims: Sequence[int]) -> ir.Value:
        """The value with its dimensions at `dims` of the shape."""
        return self.op(
            "broadcast_in_dim",
            [value],
            self.tensor(shape, element_of(value)),
            broadcast_dimensions=self.integers(dims),
        )

    def compare(self, direction: str, one: ir.Value, other: ir.Value) -> ir.Value:
        """Elementwise comparison of integers."""
        text = f"#stablehlo<comparison_direction {direction}>"
        return self.op(
            "compare",
            [one, other],
            self.tensor(shape_of(one), ir.IntegerType.get_signless(1, self.context)),
            comparison_direction=ir.Attribute.parse(text, self.context),
        )

    def dynamic_slice(
        self, value: ir.Value, starts: Sequence[ir.Value], sizes: Sequence[int]
    ) -> ir.Value:
        """A slice of given sizes."""
        return self.op(
            "dynamic_slice",
            [value, *starts],
            self.tensor(sizes, element_of(value)),
            slice_sizes=self.integers(sizes),
        )

    def same(self, name: str, *operands: ir.Value, **attributes: ir.Attribute) -> ir.Value:
        """An op whose result has the type of its last operand."""
        return self.op(name, operands, operands[-1].type, **attributes)

    def integers(self, numbers: Sequence[int]) -> ir.Attribute:
        """An array of 64-bit integers, as dimension lists are written."""
        return ir.DenseI64ArrayAttr.get(list(numbers), self.context)

    def integer(self, number: int) -> ir.Attribute:
        """A 64-bit integer."""
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, self.context), number)


def shape_of(value: ir.Value) -> list[int]:
    """The dimensions of a tensor."""
    return ir.RankedTensorType(value.type).shape


def element_of(value: ir.Value) -> ir.Type:
    """The element type of a tensor."""
    return ir.RankedTensorType(value.type).element_type
