"""Builds small ops at an insertion point, mostly before another op."""

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
    """Creates an optimization barrier; its results are ready only after all values are."""
    return Builder(point, location).create(BARRIER, values, [value.type for value in values])


class Builder:
    """Creates ops at an insertion point, all with one location."""

    def __init__(self, point: ir.InsertionPoint, location: ir.Location) -> None:
        self.point = point
        self.location = location
        self.context = location.context

    def op(
        self, name: str, operands: Sequence[ir.Value], type_: ir.Type, **attributes: ir.Attribute
    ) -> ir.Value:
        """Creates a StableHLO op and returns its one result; reducing ops get an empty region."""
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
        """Creates an op of any dialect, with empty regions."""
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
        """Returns a ranked tensor type."""
        return ir.RankedTensorType.get(list(shape), element, loc=self.location)

    def splat(self, number: complex, shape: Sequence[int], element: ir.Type) -> ir.Value:
        """Creates a splat constant: every element is `number`."""
        value: ir.Attribute
        type_ = self.tensor(shape, element)
        if isinstance(element, ir.ComplexType):  # the bindings have no complex attributes
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
        """Creates a splat constant with the type of `value`."""
        return self.splat(number, shape_of(value), element_of(value))

    def i32(self, number: int) -> ir.Value:
        """Creates a constant scalar i32."""
        return self.splat(number, [], ir.IntegerType.get_signless(32, self.context))

    def constant(self, elements: np.ndarray) -> ir.Value:
        """Creates a constant tensor with an array's shape, elements and element type."""
        with self.context:
            value = ir.DenseElementsAttr.get(elements)
        return self.op("constant", [], value.type, value=value)

    def table(self, numbers: Sequence[int]) -> ir.Value:
        """Creates a constant vector of i32."""
        return self.constant(np.asarray(numbers, dtype=np.int32))

    def iota(self, type_: ir.Type, dim: int) -> ir.Value:
        """Creates a tensor of a type whose elements are their places in a dimension."""
        return self.op("iota", [], type_, iota_dimension=self.integer(dim))

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Reshapes a value; its element type stays."""
        return self.op("reshape", [value], self.tensor(shape, element_of(value)))

    def broadcast(self, value: ir.Value, shape: Sequence[int], dims: Sequence[int]) -> ir.Value:
        """Broadcasts a value to a shape; dimension i of the value becomes dimension `dims[i]`."""
        return self.op(
            "broadcast_in_dim",
            [value],
            self.tensor(shape, element_of(value)),
            broadcast_dimensions=self.integers(dims),
        )

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        """Transposes a value: dimension i of the result is dimension `permutation[i]` before."""
        shape = shape_of(value)
        type_ = self.tensor([shape[dim] for dim in permutation], element_of(value))
        return self.op("transpose", [value], type_, permutation=self.integers(permutation))

    def convert(self, value: ir.Value, element: ir.Type) -> ir.Value:
        """Converts a value to an element type; returns the value itself if it has that type."""
        if element_of(value) == element:
            return value
        return self.op("convert", [value], self.tensor(shape_of(value), element))

    def concatenate(self, values: Sequence[ir.Value], dim: int) -> ir.Value:
        """Concatenates values along a dimension."""
        shape = shape_of(values[0])
        shape[dim] = sum(shape_of(value)[dim] for value in values)
        type_ = self.tensor(shape, element_of(values[0]))
        return self.op("concatenate", values, type_, dimension=self.integer(dim))

    def slice(self, value: ir.Value, starts: Sequence[int], limits: Sequence[int]) -> ir.Value:
        """Slices a value from `starts` to `limits` (exclusive), with stride 1."""
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
        """Pads a value with a scalar; `low`, `high` and `interior` have a count for each dimension.
        Returns the value itself if all counts are 0."""
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
        """Slices one dimension from `start` to `limit` (exclusive); the others stay whole."""
        limits = shape_of(value)
        starts = [0] * len(limits)
        starts[dim], limits[dim] = start, limit
        return self.slice(value, starts, limits)

    def compare(self, direction: str, one: ir.Value, other: ir.Value) -> ir.Value:
        """Compares two tensors elementwise; `direction` is `LT`, `EQ` and so on."""
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
        """Slices a value from dynamic `starts`, with static sizes."""
        return self.op(
            "dynamic_slice",
            [value, *starts],
            self.tensor(sizes, element_of(value)),
            slice_sizes=self.integers(sizes),
        )

    def update(self, value: ir.Value, part: ir.Value, starts: Sequence[ir.Value]) -> ir.Value:
        """Overwrites a part of a tensor, from `starts` on."""
        return self.op("dynamic_update_slice", [value, part, *starts], value.type)

    def reduce(
        self, value: ir.Value, initial: ir.Value, dims: Sequence[int], reducer: str
    ) -> ir.Value:
        """Reduces the dimensions `dims` of a value with a binary op, such as `add`."""
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
        """Permutes a value from each pair's first device to its second; other devices get zeros."""
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
        """Reduces a value over each group of devices; without a `reducer` the region is empty."""
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
        """Creates an empty manual computation over axes, with shardings of operands and results."""
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
        """Creates the terminator of a region of a StableHLO op, which returns the values."""
        self.create("stablehlo.return", values, [])

    def same(self, name: str, *operands: ir.Value, **attributes: ir.Attribute) -> ir.Value:
        """Creates an op whose result has the type of its last operand."""
        return self.op(name, operands, operands[-1].type, **attributes)

    def integers(self, numbers: Sequence[int]) -> ir.Attribute:
        """Returns an array attribute of 64-bit integers, the form of dimension lists."""
        return ir.DenseI64ArrayAttr.get(list(numbers), self.context)

    def integer(self, number: int) -> ir.Attribute:
        """Returns a 64-bit integer attribute."""
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, self.context), number)


def transfer_attributes(
    channel: int,
    pairs: Iterable[Sequence[int]],
    context: ir.Context,
    channel_type: int = DEVICE_TO_DEVICE,
) -> dict[str, ir.Attribute]:
    """Returns the channel and the device pairs of a permute, send or recv, as attributes."""
    return {
        "channel_handle": bindings.ChannelHandle.get(channel, channel_type, context),
        "source_target_pairs": device_table(pairs, context),
    }


def device_table(rows: Iterable[Sequence[int]], context: ir.Context) -> ir.Attribute:
    """Returns replica groups or device pairs as an integer matrix, short rows padded with -1."""
    rows = list(rows)
    width = max(map(len, rows), default=0)
    table = [[*row, *[-1] * (width - len(row))] for row in rows]
    with context:
        return ir.DenseElementsAttr.get(np.array(table, np.int64).reshape(len(rows), width))


def shape_of(value: ir.Value) -> list[int]:
    """Returns the dimensions of a tensor."""
    return ir.RankedTensorType(value.type).shape


def element_of(value: ir.Value) -> ir.Type:
    """Returns the element type of a tensor."""
    return ir.RankedTensorType(value.type).element_type


def write_reducer(op_name: str, element: ir.Type, region: ir.Region, location: ir.Location) -> None:
    """Writes a region that combines two scalars with one op; `add` of booleans becomes `or`."""
    if op_name == "add" and isinstance(element, ir.IntegerType) and element.width == 1:
        op_name = "or"
    scalar = ir.RankedTensorType.get([], element, loc=location)
    block = region.blocks.append(scalar, scalar, arg_locs=[location, location])
    build = Builder(ir.InsertionPoint(block), location)
    build.end_region([build.op(op_name, list(block.arguments), scalar)])


def constrain_sharding(
    value: ir.Value,
    sharding: ir.Attribute,
    point: ir.InsertionPoint,
    place: ir.Location | None = None,
    op_name: str = SHARDING_CONSTRAINT,
) -> ir.Value:
    """Returns a value under a sharding constraint, or resharded by another op `op_name`."""
    build = Builder(point, place or value.location)
    return build.create(op_name, [value], [value.type], {"sharding": sharding}).results[0]
