"""Writes ops of a block once more, for one microbatch.

Every value gets a stand-in: of a value in parts, the part of this microbatch; of any other, the
value itself. Where an op on parts takes a whole value, the part is sliced out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.analysis.dimension_propagation.graph import WHILE, Body, Node
from stablehlo_tools.analysis.dimension_propagation.layout import Layout, part_shape
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.transforms.parts.expand_pipeline.constraints import without_axis
from stablehlo_tools.transforms.parts.split_batch.pieces import narrowed
from stablehlo_tools.transforms.parts.split_batch.writing import part_type, shrink

Outside = Callable[[int, Layout | None], ir.Value]


class Narrowing:
    """Copies of ops for one microbatch, number `microbatch`, a scalar i32.

    `outside` gives a value that no op of the block makes, in a layout or whole; `axis` is the one
    that is manual, if any, which no sharding may name any more.
    """

    def __init__(
        self, dims: BatchDims, microbatch: ir.Value, outside: Outside, axis: str | None = None
    ) -> None:
        self._dims = dims
        self._microbatch = microbatch
        self._outside = outside
        self._axis = axis
        self.values: dict[int, ir.Value] = {}

    def part_type(self, number: int) -> ir.Type:
        """The type of what stands for a value."""
        layout = self._dims.layouts.get(number)
        return part_type(self._dims.graph.values[number], layout, self._dims.parts)

    def get(self, number: int, layout: Layout | None, build: Builder) -> ir.Value:
        """What stands for a value, where an op takes it in a layout."""
        found = self.values.get(number)
        own = self._dims.layouts.get(number)
        if found is None:
            return self._outside(number, layout)
        if own is not None or layout is None:
            return found
        return cut(build, found, layout, self._dims.parts, self._microbatch)

    def write(self, nodes: Sequence[Node], point: ir.InsertionPoint) -> None:
        """Writes the ops, in order."""
        for node in nodes:
            if node.name == WHILE:
                self._loop(node, point)
            elif node.bodies:
                self._branches(node, point)
            else:
                self._op(node, point)

    def _op(self, node: Node, point: ir.InsertionPoint) -> None:
        build = Builder(point, node.op.location)
        step = self._dims.steps.get(node)
        layouts = step.operands if step is not None else (None,) * len(node.operands)
        operands = [
            self.get(number, layout, build)
            for number, layout in zip(node.operands, layouts, strict=True)
        ]
        graph = self._dims.graph
        captured = {graph.values[n]: self.get(n, None, build) for n in node.captures}
        copy = copy_with(node.op, captured, point) if captured else node.op.clone(ip=point)
        for position, value in enumerate(operands):
            copy.operands[position] = value
        if step is not None:
            for number, result in zip(node.results, copy.results, strict=True):
                result.set_type(self.part_type(number))
            shrink(copy, step, self._dims.parts)
        self._without_axis(copy)
        self.values.update(zip(node.results, copy.results, strict=True))

    def _loop(self, node: Node, point: ir.InsertionPoint) -> None:
        op = node.op
        build = Builder(point, op.location)
        carried = [self._dims.layouts.get(number) for number in node.results]
        operands = [
            self.get(number, layout, build)
            for number, layout in zip(node.operands, carried, strict=True)
        ]
        loop = self._opened(op, operands, [value.type for value in operands], point)
        for body, region in zip(node.bodies, loop.regions, strict=True):
            block = region.blocks.append(
                *(value.type for value in operands), arg_locs=[op.location] * len(operands)
            )
            self.values.update(zip(body.arguments, block.arguments, strict=True))
            layouts = carried if body is node.bodies[1] else [None]
            self._fill(body, block, layouts)
        self.values.update(zip(node.results, loop.results, strict=True))

    def _branches(self, node: Node, point: ir.InsertionPoint) -> None:
        op = node.op
        build = Builder(point, op.location)
        layouts = [self._dims.layouts.get(number) for number in node.results]
        operands = [self.get(number, None, build) for number in node.operands]
        types = [self.part_type(number) for number in node.results]
        choice = self._opened(op, operands, types, point)
        for body, region in zip(node.bodies, choice.regions, strict=True):
            block = region.blocks.append()
            self._fill(body, block, layouts)
        self.values.update(zip(node.results, choice.results, strict=True))

    def _fill(self, body: Body, block: ir.Block, layouts: Sequence[Layout | None]) -> None:
        point = ir.InsertionPoint(block)
        self.write(body.nodes, point)
        build = Builder(point, block.owner.location)
        returned = [
            self.get(number, layout, build)
            for number, layout in zip(body.returned, layouts, strict=True)
        ]
        build.end_region(returned)

    def _opened(
        self,
        op: ir.Operation,
        operands: Sequence[ir.Value],
        types: Sequence[ir.Type],
        point: ir.InsertionPoint,
    ) -> ir.Operation:
        """The op with empty regions."""
        copy = ir.Operation.create(
            op.name,
            results=list(types),
            operands=list(operands),
            attributes=dict(op.attributes.items()),
            regions=len(op.regions),
            loc=op.location,
            ip=point,
        )
        self._without_axis(copy)
        return copy

    def _without_axis(self, copy: ir.Operation) -> None:
        if self._axis is not None:
            without_axis(copy, self._axis)


def apart(shape: Sequence[int], layout: Layout, parts: int) -> list[int]:
    """A shape with its batch dimension in three: outer, microbatches, inner."""
    dim = layout.dim
    inner = shape[dim] // (layout.outer * parts)
    return [*shape[:dim], layout.outer, parts, inner, *shape[dim + 1 :]]


def cut(
    build: Builder, value: ir.Value, layout: Layout, parts: int, microbatch: ir.Value
) -> ir.Value:
    """One microbatch of a whole value."""
    shape = part_shape(tuple(shape_of(value)), layout, parts)
    smaller = narrowed(build, value, layout, build.tensor(shape, element_of(value)))
    if smaller is not None:
        return smaller
    rows = apart(shape_of(value), layout, parts)
    starts, sizes = window(build, rows, layout, microbatch)
    return build.reshape(build.dynamic_slice(build.reshape(value, rows), starts, sizes), shape)


def window(
    build: Builder, rows: Sequence[int], layout: Layout, microbatch: ir.Value
) -> tuple[list[ir.Value], list[int]]:
    """Where a microbatch of a tensor that lies `apart` begins, and its sizes."""
    sizes = [*rows]
    sizes[layout.dim + 1] = 1
    starts = [build.splat(0, [], element_of(microbatch))] * len(sizes)
    starts[layout.dim + 1] = microbatch
    return starts, sizes
