"""Writing small ops in front of another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, MANUAL_COMPUTATION, SHARDING_CONSTRAINT

ANY_CHANNEL, DEVICE_TO_DEVICE = 0, 1  # types of channels
_WITH_REDUCER = frozenset({"all_reduce", "reduce", "reduce_scatter"})


def barrier(
    values: Sequence[ir.Value], point: ir.InsertionPoint, location: ir.Location
) -> ir.Operation:
    """An optimization barrier, which has a result for each value: it is there once all are."""
    return Builder(point, location).create(BARRIER, values, [value.type for value in values])


class Builder:
    """Creates ops at an insertion point, all with one location."""

    def __init__(self, point: ir.InsertionPoint, location: ir.Location) -> None:
        self.point = point
        self.location = location
        self.context = location.context

    def op(
        self,
        name: str,
        operands: Sequence[ir.Value],
        type_: ir.Type,
        **attributes: ir.Attribute,
    ) -> ir.Value:
        """An op of StableHLO with one result; that of a reducer has an empty region."""
        regions = int(name in _WITH_REDUCER)
        return self.create(f"stablehlo.{name}", operands, [type_], attributes, regions).results[0]

    def create(
        self,
        name: str,
        operands: Sequence[ir.Value],
        types: Iterable[ir.Type],
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> ir.Operation:
        """An op of any dialect, with empty regions."""
        return ir.Operation.create(
            name,
            results=list(types),
            operands=list(operands),
            attributes=dict(attributes or {}),
            regions=regions,
            loc=self.location,
            ip=self.point,
        )

    def tensor(self, shape: Sequence[int], element: ir.Type) -> ir.Type:
        """The type of a tensor."""
        return ir.RankedTensorType.get(list(shape), element, loc=self.location)

    def splat(self, number: complex, shape: Sequence[int], element: ir.Type) -> ir.Value:
        """A constant tensor of one number."""
        value: ir.Attribute
        type_ = self.tensor(shape, element)
        if isinstance(element, ir.ComplexType):  # of which the bindings have no attributes
            parts = f"({number.real:.17e},{number.imag:.17e})"
            text = f"stablehlo.constant dense<{parts}> : {type_}"
            with self.location:
                constant = ir.Operation.parse(text, context=self.context).operation
            self.point.insert(constant)
            return constant.results[0]
        if isinstance(element, ir.FloatType):
            value = ir.FloatAttr.get(element, number.real, loc=self.location)
        else:
            whole = int(number.real)  # the bindings count in 64 bits with a sign
            value = ir.IntegerAttr.get(element, whole - (1 << 64) if whole >= 1 << 63 else whole)
        return self.op("constant", [], type_, value=ir.DenseElementsAttr.get_splat(type_, value))

    def splat_like(self, number: complex, value: ir.Value) -> ir.Value:
        """A constant tensor of one number, of another tensor's type."""
        return self.splat(number, shape_of(value), element_of(value))

    def i32(self, number: int) -> ir.Value:
        """A constant scalar i32."""
        return self.splat(number, [], ir.IntegerType.get_signless(32, self.context))

    def constant(self, elements: np.ndarray) -> ir.Value:
        """A constant tensor with an array's elements and element type."""
        with self.context:
            value = ir.DenseElementsAttr.get(elements)
        return self.op("constant", [], value.type, value=value)

    def table(self, numbers: Sequence[int]) -> ir.Value:
        """A constant vector of i32."""
        return self.constant(np.asarray(numbers, dtype=np.int32))

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

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        """Dimension i of the result is dimension `permutation[i]` of the value."""
        shape = shape_of(value)
        type_ = self.tensor([shape[dim] for dim in permutation], element_of(value))
        return self.op("transpose", [value], type_, permutation=self.integers(permutation))

    def convert(self, value: ir.Value, element: ir.Type) -> ir.Value:
        """The value with another element type; itself where it has that already."""
        if element_of(value) == element:
            return value
        return self.op("convert", [value], self.tensor(shape_of(value), element))

    def concatenate(self, values: Sequence[ir.Value], dim: int) -> ir.Value:
        """The values side by side along a dimension."""
        shape = shape_of(values[0])
        shape[dim] = sum(shape_of(value)[dim] for value in values)
        type_ = self.tensor(shape, element_of(values[0]))
        return self.op("concatenate", values, type_, dimension=self.integer(dim))

    def slice(self, value: ir.Value, starts: Sequence[int], limits: Sequence[int]) -> ir.Value:
        """The elements from `starts` up to `limits`, each one."""
        sizes = [limit - start for start, limit in zip(starts, limits, strict=True)]
        return self.op(
            "slice",
            [value],
            self.tensor(sizes, element_of(value)),
            start_indices=self.integers(starts),
            limit_indices=self.integers(limits),
            strides=self.integers([1] * len(sizes)),
        )

    def pad(
        self,
        value: ir.Value,
        filling: ir.Value,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int],
    ) -> ir.Value:
        """The value with a scalar around it and between its elements, so many for each dimension;
        itself where there are none."""
        edges = (low, high, interior)
        if not any(map(any, edges)):
            return value
        sizes = [
            n + before + behind + max(n - 1, 0) * between
            for n, before, behind, between in zip(shape_of(value), *edges, strict=True)
        ]
        return self.op(
            "pad",
            [value, filling],
            self.tensor(sizes, element_of(value)),
            edge_padding_low=self.integers(low),
            edge_padding_high=self.integers(high),
            interior_padding=self.integers(interior),
        )

    def slice_along(self, value: ir.Value, dim: int, start: int, limit: int) -> ir.Value:
        """The elements from `start` up to `limit` of one dimension, all of the others."""
        limits = shape_of(value)
        starts = [0] * len(limits)
        starts[dim], limits[dim] = start, limit
        return self.slice(value, starts, limits)

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

    def update(self, value: ir.Value, part: ir.Value, starts: Sequence[ir.Value]) -> ir.Value:
        """A tensor with a part of it overwritten from `starts` on."""
        return self.op("dynamic_update_slice", [value, part, *starts], value.type)

    def reduce(
        self, value: ir.Value, initial: ir.Value, dims: Sequence[int], reducer: str
    ) -> ir.Value:
        """The value with some dimensions combined by an op."""
        shape = [size for dim, size in enumerate(shape_of(value)) if dim not in dims]
        types = [self.tensor(shape, element_of(value))]
        attributes = {"dimensions": self.integers(dims)}
        op = self.create("stablehlo.reduce", [value, initial], types, attributes, regions=1)
        write_reducer(reducer, element_of(value), op.regions[0], self.location)
        return op.results[0]

    def permute(
        self,
        value: ir.Value,
        pairs: Iterable[Sequence[int]],
        channel: int,
        channel_type: int = DEVICE_TO_DEVICE,
    ) -> ir.Value:
        """The value of each pair's first device on its second; zeros on devices without one."""
        attributes = transfer_attributes(channel, pairs, self.context, channel_type)
        return self.op("collective_permute", [value], value.type, **attributes)

    def all_reduce(
        self,
        value: ir.Value,
        groups: Iterable[Sequence[int]],
        channel: int,
        reducer: str | None = "add",
        channel_type: int = DEVICE_TO_DEVICE,
    ) -> ir.Value:
        """The values of each group's devices combined by an op; an empty region without one."""
        attributes = {
            "replica_groups": device_table(groups, self.context),
            "channel_handle": bindings.ChannelHandle.get(channel, channel_type, self.context),
            "use_global_device_ids": ir.UnitAttr.get(self.context),
        }
        op = self.create("stablehlo.all_reduce", [value], [value.type], attributes, regions=1)
        if reducer is not None:
            write_reducer(reducer, element_of(value), op.regions[0], self.location)
        return op.results[0]

    def manual_computation(
        self,
        operands: Sequence[ir.Value],
        types: Iterable[ir.Type],
        shardings: tuple[Sequence[ir.Attribute], Sequence[ir.Attribute]],
        axes: Iterable[str],
    ) -> ir.Operation:
        """A computation divided by hand over axes; its operands and results have the shardings."""
        entering, leaving = (
            bindings.TensorShardingPerValueAttr.get(list(each), self.context) for each in shardings
        )
        named = ", ".join(f'"{axis}"' for axis in axes)
        attributes = {
            "in_shardings": entering,
            "out_shardings": leaving,
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>", self.context),
        }
        return self.create(MANUAL_COMPUTATION, operands, types, attributes, regions=1)

    def end_region(self, values: Sequence[ir.Value]) -> None:
        """The terminator of a region of a StableHLO op, which returns the values."""
        ir.Operation.create(
            "stablehlo.return", operands=list(values), loc=self.location, ip=self.point
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


def transfer_attributes(
    channel: int,
    pairs: Iterable[Sequence[int]],
    context: ir.Context,
    channel_type: int = DEVICE_TO_DEVICE,
) -> dict[str, ir.Attribute]:
    """The channel of a permute, send or recv, and the pairs of devices that use it."""
    return {
        "channel_handle": bindings.ChannelHandle.get(channel, channel_type, context),
        "source_target_pairs": device_table(pairs, context),
    }


def device_table(rows: Iterable[Sequence[int]], context: ir.Context) -> ir.Attribute:
    """Rows of device ids, as replica groups or pairs are written; -1 fills short rows."""
    rows = list(rows)
    width = max(map(len, rows), default=0)
    table = [[*row, *[-1] * (width - len(row))] for row in rows]
    with context:
        return ir.DenseElementsAttr.get(np.array(table, np.int64).reshape(len(rows), width))


def shape_of(value: ir.Value) -> list[int]:
    """The dimensions of a tensor."""
    return ir.RankedTensorType(value.type).shape


def element_of(value: ir.Value) -> ir.Type:
    """The element type of a tensor."""
    return ir.RankedTensorType(value.type).element_type


def write_reducer(op_name: str, element: ir.Type, region: ir.Region, location: ir.Location) -> None:
    """A region that combines two elements by one op; `or` for a sum of booleans."""
    if op_name == "add" and isinstance(element, ir.IntegerType) and element.width == 1:
        op_name = "or"
    scalar = ir.RankedTensorType.get([], element, loc=location)
    block = region.blocks.append(scalar, scalar, arg_locs=[location, location])
    with ir.InsertionPoint(block):
        combined = ir.Operation.create(
            f"stablehlo.{op_name}", results=[scalar], operands=list(block.arguments), loc=location
        )
        ir.Operation.create("stablehlo.return", operands=list(combined.results), loc=location)


def constrained(
    value: ir.Value,
    sharding: ir.Attribute,
    point: ir.InsertionPoint,
    place: ir.Location | None = None,
    op_name: str = SHARDING_CONSTRAINT,
) -> ir.Value:
    """A value with a sharding constraint on it, or resharded by another op."""
    build = Builder(point, place or value.location)
    return build.create(op_name, [value], [value.type], {"sharding": sharding}).results[0]
