"""Writes the ops of a block at other shapes; subclasses define how an op reads its operands.

    %h = stablehlo.dot_general %x, %w : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  ==>                                                                      // one of four parts
    %p = stablehlo.dot_general %q, %w : (tensor<2x64xf32>, tensor<64x64xf32>) -> tensor<2x64xf32>

`BatchDims` states which dimension of a value changes, and how each op follows. Control flow passes
values on in the tilings of its results; only `write_control_flow` maps operands to results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, part_shape
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.microbatch_marks import Mark, mark_of
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.clone import Resize, emptied_clone, reshaped_clone
from stablehlo_tools.ir.walk import terminator


class BlockRewriter:
    """Copies ops for `count` consecutive parts; `values` holds the copies of values, by number."""

    # Control flow keeps the shardings of its results, and the locations of arguments and
    # terminators in its regions; otherwise these get the location of the op.
    keeps_shardings: ClassVar[bool] = False
    keeps_locations: ClassVar[bool] = True

    def __init__(self, dims: BatchDims, count: int = 1) -> None:
        self.dims = dims
        self.count = count
        self.values: dict[int, ir.Value] = {}

    def write(self, nodes: Sequence[Node], point: ir.InsertionPoint) -> None:
        """Writes the ops, in order."""
        for node in nodes:
            self.write_node(node, point)

    def write_node(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op and the ops in it."""
        if node.bodies:
            self.write_control_flow(node, point)
        else:
            self.write_op(node, point)

    def write_op(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op that is not control flow."""
        op, step = node.op, self.dims.op_tilings.get(node)
        build = Builder(point, op.location)
        if step is None:
            operands = [self.whole_value(number, build) for number in node.operands]
        else:
            operands = [
                self.operand(number, tiling, build, op)
                for number, tiling in zip(node.operands, step.operands, strict=True)
            ]
            if node.name == MANUAL_COMPUTATION:
                self.record(node, self.write_manual(node, step, operands, point))
                return
        mark = mark_of(op)
        if mark is not None:
            self.values[node.results[0]] = self.write_mark(mark, operands[0], op, build)
            return
        values, parts = self.dims.graph.values, self.dims.parts
        captured = {values[number]: self.whole_value(number, build) for number in node.captures}
        self.record(node, part_clone(op, step, operands, point, parts, self.count, captured))

    def write_manual(
        self, node: Node, step: OpTiling, operands: Sequence[ir.Value], point: ir.InsertionPoint
    ) -> ir.Operation:
        """Returns a copy of a manual computation, with its body rewritten for one device's share of
        the parts."""
        op, inner = node.op, self.dims.inside(node)
        types = [
            part_type(result, tiling, self.dims.parts, self.count)
            for result, tiling in zip(op.results, step.results, strict=True)
        ]
        copy = emptied_clone(op, operands, types, point, keep_shardings=self.keeps_shardings)
        body = inner.graph.root
        block = copy.regions[0].blocks.append(
            *(part_type_of(inner, number, self.count) for number in body.arguments),
            arg_locs=[argument.location for argument in body.block.arguments],
        )
        # The writer may add arguments to the block for values from outside of the body.
        writer = self.inner_writer(inner, block)
        writer.values.update(zip(body.arguments, block.arguments, strict=False))
        writer.write(body.nodes, ir.InsertionPoint(block))
        end = terminator(body.block)
        build = Builder(ir.InsertionPoint(block), end.location)
        returned = [
            writer.operand(number, inner.tilings.get(number), build, end)
            for number in body.returned
        ]
        writer.end_body(end, returned, build)
        return writer.with_operands(copy)

    def inner_writer(self, dims: BatchDims, block: ir.Block) -> BlockRewriter:
        """Returns the writer of a manual computation's body, whose copy is `block`."""
        return type(self)(dims, self.count)

    def with_operands(self, computation: ir.Operation) -> ir.Operation:
        """Returns the computation around a written body, with all operands that the body needs."""
        return computation

    def write_mark(self, mark: Mark, value: ir.Value, op: ir.Operation, build: Builder) -> ir.Value:
        """Returns the value of a mark on `count` of the parts; see `dialect/microbatch_marks`."""
        shape = shape_of(op.results[0])
        if mark is Mark.EACH:
            return build.broadcast(value, [self.count, *shape[1:]], range(1, len(shape)))
        if mark is Mark.OWN:
            return build.reshape(build.slice_along(value, 0, 0, 1), shape)
        ratio = build.splat_like(self.dims.parts // self.count, value)
        name = "multiply" if mark is Mark.ESTIMATE else "divide"
        return build.same(name, value, ratio)

    def write_control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes a loop, which carries parts in place of whole values, or a branch, which returns
        parts."""
        op, is_loop = node.op, node.name == WHILE
        # A branch has only its index as an operand; the operands of a loop become its results.
        into = node.results if is_loop else [None] * len(node.operands)
        operands = self.pass_on(node.operands, into, Builder(point, op.location), op)
        types = [value.type for value in operands] if is_loop else self.result_types(node)
        copy = emptied_clone(op, operands, types, point, keep_shardings=self.keeps_shardings)
        self.record(node, copy)
        for body, region in zip(node.bodies, copy.regions, strict=True):
            inner = self.open_body(body, region, types if is_loop else [])
            end = terminator(body.block)
            self.write(body.nodes, inner)
            # The first body of a loop is its condition, which returns a predicate.
            into = [None] if is_loop and body is node.bodies[0] else node.results
            build = Builder(inner, end.location if self.keeps_locations else op.location)
            self.end_body(end, self.pass_on(body.returned, into, build, end), build)

    def operand(
        self, number: int, tiling: DimTiling | None, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns the copy of a value for an op that reads it in a tiling."""
        return self.values[number]

    def whole_value(self, number: int, build: Builder) -> ir.Value:
        """Returns the copy of a value for an op that is copied at its original shapes."""
        return self.values[number]

    def pass_on(
        self, numbers: Sequence[int], into: Sequence[int | None], build: Builder, user: ir.Operation
    ) -> list[ir.Value]:
        """Returns the copies of the operands of control flow, or of a terminator in it. `into` are
        the results that they become; None for a condition or the index of a branch."""
        return [
            self.pass_value(number, result, build, user)
            for number, result in zip(numbers, into, strict=True)
        ]

    def pass_value(
        self, number: int, result: int | None, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns the copy of a value that control flow passes on to a result."""
        tiling = None if result is None else self.dims.tilings.get(result)
        return self.operand(number, tiling, build, user)

    def result_types(self, node: Node) -> list[ir.Type]:
        """Returns the result types of the copy of a branch."""
        return [part_type_of(self.dims, number, self.count) for number in node.results]

    def record(self, node: Node, copy: ir.Operation) -> None:
        """Notes the copy of an op, whose bodies are still empty."""
        self.values.update(zip(node.results, copy.results, strict=True))

    def open_body(
        self, body: Body, region: ir.Region, types: Sequence[ir.Type]
    ) -> ir.InsertionPoint:
        """Starts the copy of a body, with arguments of these types."""
        outer = body.block.owner.location
        locations = [a.location if self.keeps_locations else outer for a in body.block.arguments]
        block = region.blocks.append(*types, arg_locs=locations)
        self.values.update(zip(body.arguments, block.arguments, strict=True))
        return ir.InsertionPoint(block)

    def end_body(self, end: ir.Operation, values: Sequence[ir.Value], build: Builder) -> None:
        """Writes the terminator of the copy of a body."""
        ir.Operation.create(end.name, operands=values, loc=build.location, ip=build.point)


def part_clone(
    op: ir.Operation,
    step: OpTiling | None,
    operands: Sequence[ir.Value],
    point: ir.InsertionPoint,
    parts: int,
    count: int = 1,
    captured: Mapping[ir.Value, ir.Value] | None = None,
) -> ir.Operation:
    """Returns a copy of an op for `count` of its parts; for all of it if `step` is None."""
    if step is None:
        types, first = [result.type for result in op.results], None
    else:
        types = [
            part_type(result, tiling, parts, count)
            for result, tiling in zip(op.results, step.results, strict=True)
        ]
        first = step.operands[0]
    resize = None if first is None else Resize(first.dim, parts, count)
    return reshaped_clone(op, operands, types, point, resize, captured)


def part_type_of(dims: BatchDims, number: int, count: int = 1) -> ir.Type:
    """Returns the type of `count` parts of a value; of all of it if it has no tiling."""
    return part_type(dims.graph.values[number], dims.tilings.get(number), dims.parts, count)


def part_type(value: ir.Value, tiling: DimTiling | None, parts: int, count: int = 1) -> ir.Type:
    """Returns the type of `count` consecutive parts of a value; of all of it if `tiling` is
    None."""
    if tiling is None:
        return value.type
    shape = part_shape(tuple(shape_of(value)), tiling, parts, count)
    return ir.RankedTensorType.get(shape, element_of(value), loc=ir.Location.unknown())
