"""Copies ops of a block for one part of the batch, whose number is a value of the program.

    %h = stablehlo.dot_general %x, %w : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  ==>                                                  // microbatch %i of 4, in a loop over them
    %xi = stablehlo.dynamic_slice %x, %i …
    %hi = stablehlo.dot_general %xi, %w : (tensor<2x64xf32>, …) -> tensor<2x64xf32>

Every value has a stand-in: for a value in parts, the part of this microbatch; for any other, the
value itself. If an op on parts uses a whole value, the part is sliced out of it. The ops themselves
are kept; `all_parts.py` instead replaces them by copies for each part, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, part_shape
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import append
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.transforms.parts.block_rewriter import BlockRewriter

Outside = Callable[[int, DimTiling | None], ir.Value]
Finish = Callable[[ir.Operation], None]


class OnePartWriter(BlockRewriter):
    """Copies ops for one microbatch, number `microbatch`, a scalar i32.

    `outside` returns a value that no op of the block makes, in a layout or whole. `finish` is
    called with each copy, before its regions are filled. `values` are the stand-ins so far, by
    number.
    """

    keeps_shardings = True
    keeps_locations = False

    def __init__(
        self, dims: BatchDims, microbatch: ir.Value, outside: Outside, finish: Finish | None = None
    ) -> None:
        super().__init__(dims)
        self._microbatch = microbatch
        self._outside = outside
        self._finish = finish

    def operand(
        self,
        number: int,
        tiling: DimTiling | None,
        build: Builder,
        user: ir.Operation | None = None,
    ) -> ir.Value:
        """Returns the stand-in of a value for an op that uses it in a layout."""
        stand_in = self.values.get(number)
        if stand_in is None:
            return self._outside(number, tiling)
        # The stand-in of a value in parts is already the part of this microbatch.
        if tiling is None or number in self.dims.tilings:
            return stand_in
        parts = self.dims.parts
        alike = _alike_part(build, stand_in, tiling, parts)
        if alike is not None:
            return alike
        return cut(build, stand_in, tiling, parts, self.number_of_microbatch())

    def whole_value(self, number: int, build: Builder) -> ir.Value:
        return self.operand(number, None, build)

    def inner_writer(self, dims: BatchDims, block: ir.Block) -> BlockRewriter:
        return _InnerPartWriter(dims, self, block)

    def number_of_microbatch(self) -> ir.Value:
        """Returns the number of the microbatch where ops are written."""
        return self._microbatch

    def record(self, node: Node, copy: ir.Operation) -> None:
        if self._finish is not None:
            self._finish(copy)
        super().record(node, copy)


class _InnerPartWriter(OnePartWriter):
    """Copies the body of a manual computation, `block`, for one microbatch. If the body cuts a
    whole value, the number of the microbatch becomes an operand of the computation."""

    def __init__(self, dims: BatchDims, outer: OnePartWriter, block: ir.Block) -> None:
        # The body captures no value, so there is none from outside of it.
        super().__init__(dims, outer._microbatch, outer._outside, outer._finish)
        self._outer = outer
        self._block = block
        self._argument: ir.Value | None = None

    def number_of_microbatch(self) -> ir.Value:
        if self._argument is None:
            type_ = self._microbatch.type
            self._argument = self._block.add_argument(type_, self._block.owner.location)
        return self._argument

    def with_operands(self, computation: ir.Operation) -> ir.Operation:
        if self._argument is None:
            return computation
        return append(computation, [self._outer.number_of_microbatch()], [])


def apart(shape: Sequence[int], layout: DimTiling, parts: int) -> list[int]:
    """Returns a shape with its batch dimension split in three: outer, microbatches, inner."""
    dim = layout.dim
    inner = shape[dim] // (layout.outer * parts)
    return [*shape[:dim], layout.outer, parts, inner, *shape[dim + 1 :]]


def cut(
    build: Builder, value: ir.Value, layout: DimTiling, parts: int, microbatch: ir.Value
) -> ir.Value:
    """Returns one microbatch of a whole value."""
    alike = _alike_part(build, value, layout, parts)
    if alike is not None:
        return alike
    shape = part_shape(tuple(shape_of(value)), layout, parts)
    rows = apart(shape_of(value), layout, parts)
    zero = build.splat(0, [], element_of(microbatch))
    starts, sizes = window(rows, layout, microbatch, zero)
    return build.reshape(build.dynamic_slice(build.reshape(value, rows), starts, sizes), shape)


def _alike_part(build: Builder, value: ir.Value, layout: DimTiling, parts: int) -> ir.Value | None:
    """Returns a microbatch of a value that is the same for all; None for other values."""
    shape = part_shape(tuple(shape_of(value)), layout, parts)
    type_ = build.tensor(shape, element_of(value))
    return alike_clone(value, layout.dim, type_, build.point)


def window(
    rows: Sequence[int], layout: DimTiling, microbatch: ir.Value, zero: ir.Value
) -> tuple[list[ir.Value], list[int]]:
    """Returns the start of a microbatch in a tensor of shape `apart`, and its sizes. `zero` is of
    the microbatch's type."""
    sizes, starts = [*rows], [zero] * len(rows)
    sizes[layout.dim + 1], starts[layout.dim + 1] = 1, microbatch
    return starts, sizes
