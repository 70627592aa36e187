"""Ops of a block written once more, for one part of the batch that is known only when it runs.

    %h = stablehlo.dot_general %x, %w : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  ==>                                                  // microbatch %i of 4, in a loop over them
    %xi = stablehlo.dynamic_slice %x, %i …
    %hi = stablehlo.dot_general %xi, %w : (tensor<2x64xf32>, …) -> tensor<2x64xf32>

Every value gets a stand-in: of a value in parts, the part of this microbatch; of any other, the
value itself. Where an op on parts takes a whole value, the part is sliced out of it. The ops
themselves stay; `all_parts.py` instead replaces them by copies for each part, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, part_shape
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.clone import Resize, alike_clone, emptied_clone, reshaped_clone

Outside = Callable[[int, DimTiling | None], ir.Value]
Finish = Callable[[ir.Operation], None]


class OnePartWriter:
    """Copies of ops for one microbatch, number `microbatch`, a scalar i32.

    `outside` gives a value that no op of the block makes, in a layout or whole; `finish` is called
    with each copy, its regions not yet filled. `values` are the stand-ins so far, by number.
    """

    def __init__(
        self,
        dims: BatchDims,
        microbatch: ir.Value,
        outside: Outside,
        finish: Finish | None = None,
    ) -> None:
        self._dims = dims
        self._microbatch = microbatch
        self._outside = outside
        self._finish = finish
        self.values: dict[int, ir.Value] = {}

    def get(self, number: int, layout: DimTiling | None, build: Builder) -> ir.Value:
        """What stands for a value, where an op takes it in a layout."""
        stand_in = self.values.get(number)
        if stand_in is None:
            return self._outside(number, layout)
        if layout is None or number in self._dims.tilings:
            return stand_in
        return cut(build, stand_in, layout, self._dims.parts, self._microbatch)

    def write(self, nodes: Sequence[Node], point: ir.InsertionPoint) -> None:
        """Writes the ops, in order."""
        for node in nodes:
            if node.bodies:
                self._control_flow(node, point)
            else:
                self._op(node, point)

    def _op(self, node: Node, point: ir.InsertionPoint) -> None:
        build = Builder(point, node.op.location)
        step, values = self._dims.op_tilings.get(node), self._dims.graph.values
        layouts = step.operands if step is not None else (None,) * len(node.operands)
        operands = self._taken(node.operands, layouts, build)
        types = [result.type for result in node.op.results]
        if step is not None:
            types = [part_type_of(self._dims, number) for number in node.results]
        captured = {values[number]: self.get(number, None, build) for number in node.captures}
        resize = resize_of(step, self._dims.parts)
        copy = reshaped_clone(node.op, operands, types, point, resize, captured)
        self._record(node, copy)

    def _control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        """A loop carries parts in place of whole values, and a branch returns them."""
        build = Builder(point, node.op.location)
        layouts = [self._dims.tilings.get(number) for number in node.results]
        carried = layouts if node.name == WHILE else [None] * len(node.operands)
        operands = self._taken(node.operands, carried, build)
        types = [part_type_of(self._dims, number) for number in node.results]
        if node.name == WHILE:
            types = [value.type for value in operands]
        copy = emptied_clone(node.op, operands, types, point, keep_shardings=True)
        self._record(node, copy)
        for body, region in zip(node.bodies, copy.regions, strict=True):
            arguments = types if node.name == WHILE else []
            block = region.blocks.append(*arguments, arg_locs=[node.op.location] * len(arguments))
            self.values.update(zip(body.arguments, block.arguments, strict=True))
            is_condition = node.name == WHILE and body is node.bodies[0]
            self._fill(body, block, [None] if is_condition else layouts)

    def _fill(self, body: Body, block: ir.Block, layouts: Sequence[DimTiling | None]) -> None:
        build = Builder(ir.InsertionPoint(block), block.owner.location)
        self.write(body.nodes, build.point)
        build.end_region(self._taken(body.returned, layouts, build))

    def _taken(
        self, numbers: Sequence[int], layouts: Sequence[DimTiling | None], build: Builder
    ) -> list[ir.Value]:
        return [
            self.get(number, layout, build) for number, layout in zip(numbers, layouts, strict=True)
        ]

    def _record(self, node: Node, copy: ir.Operation) -> None:
        if self._finish is not None:
            self._finish(copy)
        self.values.update(zip(node.results, copy.results, strict=True))


def part_type_of(dims: BatchDims, number: int) -> ir.Type:
    """The type of one part of a value, or of all of it where it is in none."""
    return part_type(dims.graph.values[number], dims.tilings.get(number), dims.parts)


def part_type(value: ir.Value, layout: DimTiling | None, parts: int, count: int = 1) -> ir.Type:
    """The type of one part of a value, or of `count` consecutive ones together."""
    if layout is None:
        return value.type
    shape = part_shape(tuple(shape_of(value)), layout, parts, count)
    return ir.RankedTensorType.get(shape, element_of(value), loc=ir.Location.unknown())


def resize_of(step: OpTiling | None, parts: int, count: int = 1) -> Resize | None:
    """How the first operand of an op shrinks to `count` of its parts."""
    layout = None if step is None else step.operands[0]
    return None if layout is None else Resize(layout.dim, parts, count)


def apart(shape: Sequence[int], layout: DimTiling, parts: int) -> list[int]:
    """A shape with its batch dimension in three: outer, microbatches, inner."""
    dim = layout.dim
    inner = shape[dim] // (layout.outer * parts)
    return [*shape[:dim], layout.outer, parts, inner, *shape[dim + 1 :]]


def cut(
    build: Builder, value: ir.Value, layout: DimTiling, parts: int, microbatch: ir.Value
) -> ir.Value:
    """One microbatch of a whole value."""
    shape = part_shape(tuple(shape_of(value)), layout, parts)
    type_ = build.tensor(shape, element_of(value))
    alike = alike_clone(value, layout.dim, type_, build.point)
    if alike is not None:
        return alike
    rows = apart(shape_of(value), layout, parts)
    zero = build.splat(0, [], element_of(microbatch))
    starts, sizes = window(rows, layout, microbatch, zero)
    return build.reshape(build.dynamic_slice(build.reshape(value, rows), starts, sizes), shape)


def window(
    rows: Sequence[int], layout: DimTiling, microbatch: ir.Value, zero: ir.Value
) -> tuple[list[ir.Value], list[int]]:
    """Where a microbatch of a tensor that lies `apart` begins, and its sizes; `zero` is of the
    microbatch's type."""
    sizes, starts = [*rows], [zero] * len(rows)
    sizes[layout.dim + 1], starts[layout.dim + 1] = 1, microbatch
    return starts, sizes
