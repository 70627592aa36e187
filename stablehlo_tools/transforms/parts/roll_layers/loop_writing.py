"""Writes the loops of a plan in place of the repeated ops.

    %w = stablehlo.concatenate %w0, %w1, %w2                      // reshaped to rows of one
    %y, %kept = stablehlo.while(%i, %h = %x, %kept, %w) {
      %own = stablehlo.dynamic_slice %w, %i
      … the ops of one layer …
      %stored = stablehlo.dynamic_update_slice %kept, %h, %i
    }

A loop is written at the position of the last of its ops. Other ops between them that use its
results move after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import RESHAPE, SLICE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import rename
from stablehlo_tools.ir.values import is_spread_constant, maker_of, producer, skip_constraints
from stablehlo_tools.ir.while_loop import CountedLoop, room_for_rows
from stablehlo_tools.transforms.parts.roll_layers.iterations import (
    Inside,
    IterationCarry,
    IterationResult,
    Same,
    Source,
)
from stablehlo_tools.transforms.parts.roll_layers.stack_plan import RolledLoop, RollPlan, Stack


def write_loops(plan: RollPlan) -> None:
    """Rewrites the block of a plan; do not use the plan's numbers afterwards."""
    writer = _RolledWriter(plan)
    for loop in plan.loops:
        writer.write(loop)
    rolled = [node for loop in plan.loops for node in loop.iterations.nodes]
    # Users before their operands: MLIR erases no op with uses.
    for node in sorted(rolled, key=lambda each: -each.index):
        node.op.erase()


class _RolledWriter:
    def __init__(self, plan: RollPlan) -> None:
        self._plan = plan
        self._flow: Dataflow = plan.flow
        self._new: dict[int, ir.Value] = {}
        self._stacks: dict[Stack, ir.Value] = {}

    def write(self, loop: RolledLoop) -> None:
        """Writes a loop before the last of its ops, and moves ops that use its results after it."""
        iterations = loop.iterations
        anchor = max(iterations.nodes, key=lambda node: node.index).op
        build = Builder(ir.InsertionPoint(anchor), iterations.template[0].op.location)
        carried, stacks = iterations.carried, list(dict.fromkeys(loop.reads.values()))
        starts: list[ir.Value] = []
        for each in carried:
            if each.start is not None:
                starts.append(self._value(each.start))
                continue
            # The identity of addition: -0.0 for floats.
            like = iterations.template[each.made.position].op.results[0]
            is_complex = isinstance(element_of(like), ir.ComplexType)
            starts.append(build.splat_like(complex(-0.0, -0.0) if is_complex else -0.0, like))
        room = [room_for_rows(build, self._like(stack), iterations.count) for stack in loop.writes]
        read = [self._stack(build, stack) for stack in stacks]
        counted = CountedLoop(build, build.i32(iterations.count), [*starts, *room, *read])
        arguments = counted.arguments
        body = _RolledBody(self._flow, self._new, loop, counted)
        rows = dict(zip(stacks, arguments[len(starts) + len(room) :], strict=True))
        body.read(dict(zip(carried, arguments, strict=False)), rows)
        stored = body.run(arguments[len(starts) :][: len(room)])
        results = counted.close([*(body.made(c.made) for c in carried), *stored, *rows.values()])
        ends = {each.made: end for each, end in zip(carried, results, strict=False)}
        self._stacks.update(zip(loop.writes, results[len(starts) :], strict=False))
        # Rows of its stacks, and its last carries, replace the values that others read.
        for number, use in self._plan.uses.items():
            if use.loop is not loop:
                continue
            old = self._flow.values[number]
            if use.stack is None:
                new = ends[use.made]
            else:
                row = build.slice_along(self._stacks[use.stack], 0, use.row, use.row + 1)
                new = build.reshape(row, shape_of(old))
            self._new[number] = new
            old.replace_all_uses_with(new)
        own = {node.index for node in iterations.nodes}
        made = {number for node in iterations.nodes for number in node.results}
        for node in self._flow.nodes[min(own) : max(own)]:
            if node.index not in own and not made.isdisjoint(node.inputs):
                made.update(node.results)
                node.op.move_before(anchor)

    def _value(self, number: int) -> ir.Value:
        return self._new.get(number, self._flow.values[number])

    def _like(self, stack: Stack) -> ir.Value:
        """Returns a value with the type of the stack's rows."""
        return self._flow.values[next(number for number in stack.numbers if number is not None)]

    def _stack(self, build: Builder, stack: Stack) -> ir.Value:
        if stack in self._stacks:
            return self._stacks[stack]
        like = self._like(stack)
        shape = [1, *shape_of(like)]
        values = [None if n is None else self._value(n) for n in stack.numbers]
        whole = _rows_of_one(values)
        if whole is None:
            # Rows that no iteration reads are empty.
            empty = room_for_rows(build, like, 1) if any(v is None for v in values) else None
            pieces = [empty if v is None else build.reshape(v, shape) for v in values]
            whole = build.concatenate([piece for piece in pieces if piece is not None], 0)
        self._stacks[stack] = whole
        return whole


class _RolledBody:
    """The body of a loop, while it is written."""

    def __init__(
        self, flow: Dataflow, new: Mapping[int, ir.Value], loop: RolledLoop, counted: CountedLoop
    ) -> None:
        self._flow = flow
        self._new = new
        self._loop = loop
        self._build = counted.inside
        self._layer = counted.counter
        if loop.is_reverse:
            # Iteration i of a loop in reverse runs layer count - 1 - i.
            last = self._build.i32(loop.iterations.count - 1)
            self._layer = self._build.same("subtract", last, counted.counter)
        self._zero = self._build.i32(0)
        self._given: dict[Source, ir.Value] = {}
        self._made: list[ir.OpResultList] = []
        self._copies: dict[ir.Value, ir.Value] = {}

    def read(
        self, carried: Mapping[IterationCarry, ir.Value], stacks: Mapping[Stack, ir.Value]
    ) -> None:
        """Notes the carries of the loop, and slices the iteration's rows out of the stacks."""
        self._given = {**carried}
        for rows, stack in self._loop.reads.items():
            value, build = stacks[stack], self._build
            shape = shape_of(value)
            row = build.dynamic_slice(value, self._layer_indices(shape), [1, *shape[1:]])
            self._given[rows] = build.reshape(row, shape[1:])

    def run(self, rooms: list[ir.Value]) -> list[ir.Value]:
        """Writes the ops of an iteration; returns the stacks with its rows."""
        iterations = self._loop.iterations
        for node, sources in zip(iterations.template, iterations.sources, strict=True):
            self._made.append(self._copy(node, sources).results)
        stored: list[ir.Value] = []
        for stack, room in zip(self._loop.writes, rooms, strict=True):
            source = stack.source
            assert source is not None, "the loop writes a result or a carry of an iteration"
            value = (
                self.made(source) if isinstance(source, IterationResult) else self._given[source]
            )
            row = self._build.reshape(value, [1, *shape_of(value)])
            stored.append(self._build.update(room, row, self._layer_indices(shape_of(room))))
        return stored

    def made(self, made: IterationResult) -> ir.Value:
        """Returns a result of an op of the iteration."""
        return self._made[made.position][made.result]

    def _copy(self, node: Node, sources: tuple[Source, ...]) -> ir.Operation:
        values = [self._source(source) for source in sources]
        copy = node.op.clone(ip=self._build.point)
        for position in range(len(node.operands)):
            copy.operands[position] = values[position]
        for region in copy.regions:
            captures = [self._flow.values[number] for number in node.captures]
            inner = dict(zip(captures, values[len(node.operands) :], strict=True))
            for view in region.blocks[0].operations:
                rename(view.operation, inner)
        return copy

    def _source(self, source: Source) -> ir.Value:
        if isinstance(source, Inside):
            return self.made(source.made)
        if isinstance(source, Same):
            return self._local(self._new.get(source.number, self._flow.values[source.number]))
        return self._given[source]

    def _local(self, value: ir.Value) -> ir.Value:
        """Returns a value from outside. Constants, and their broadcasts, are copied into the body,
        so that no loop carries them."""
        if value in self._copies or not is_spread_constant(value):
            return self._copies.get(value, value)
        operands = [self._local(operand) for operand in maker_of(value).operands]
        copy = maker_of(value).clone(ip=self._build.point)
        for position, operand in enumerate(operands):
            copy.operands[position] = operand
        self._copies[value] = copy.results[0]
        return copy.results[0]

    def _layer_indices(self, shape: list[int]) -> list[ir.Value]:
        return [self._layer, *[self._zero] * (len(shape) - 1)]


def _rows_of_one(values: list[ir.Value | None]) -> ir.Value | None:
    """Returns the tensor whose rows are these values, all of them in order; None if there is
    none."""
    whole: ir.Value | None = None
    for row, value in enumerate(values):
        reshape = producer(skip_constraints(value)) if value is not None else None
        is_row = reshape is not None and reshape.name == RESHAPE
        cut = producer(skip_constraints(reshape.operands[0])) if reshape and is_row else None
        if reshape is None or cut is None or cut.name != SLICE:
            return None
        source = cut.operands[0]
        if whole is not None and source != whole:
            return None
        whole, shape = source, shape_of(source)
        starts, limits = integers(cut, "start_indices"), integers(cut, "limit_indices")
        is_row = [row, *[0] * (len(shape) - 1)] == list(starts)
        is_row &= list(limits) == [row + 1, *shape[1:]] and shape[0] == len(values)
        if not is_row or shape_of(reshape.results[0]) != shape[1:]:
            return None
    return whole
