"""Computes in front of the loop over microbatches what each hands to the next, where no work on the
microbatches goes into it: a key of random numbers that is split in every iteration, a rate.

    while(%i, %key, %sum) { %next, %own = split(%key)   … dropout(%own) … }
  ==>
    %keys = while(%j, %key, %keys) { … %keys[%j] = %key …  %next, %own = split(%key) … }
    while(%i, %key, %sum) { %own = split(%keys[%i]) … }
"""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import is_accumulated
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import constant_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.counted_loop import CountedLoop
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.staging.dataflow import Dataflow, Node
from stablehlo_tools.mpmd.staging.microbatches import heavy_ops

_WHILE = "stablehlo.while"


def stack_recurrences(block: ir.Block, effects: Effects) -> None:
    """Rewrites the heavy loops of a block that run a known number of times, in place."""
    loops = [view.operation for view in block.operations if view.operation.name == _WHILE]
    for loop in loops:
        trips = constant_trips(loop)
        if trips is not None and heavy_ops(loop):
            _Recurrences(loop, trips, effects).rewrite()


class _Recurrences:
    """What iterations of a loop hand on that hangs on itself and their number alone."""

    def __init__(self, loop: ir.Operation, trips: int, effects: Effects) -> None:
        self._loop = loop
        self._trips = trips
        self._effects = effects
        self._body = LoopBody(loop, effects)
        self._flow = Dataflow.of(self._body.block)
        self._communicates = classify_communication(loop.context)
        self._carry_of = {number: carry for carry, number in enumerate(self._flow.arguments)}

    def rewrite(self) -> None:
        """Stacks them in front of the loop, which then takes row after row."""
        counter = next(iter(sorted(self._body.steps)), None)
        found = self._found()
        if not found or counter is None:
            return
        stacks, last = self._stack(found)
        end = terminator(self._body.block)
        build = Builder(ir.InsertionPoint.at_block_begin(self._body.block), self._loop.location)
        row = self._row(build, counter)
        for carry, stack, value in zip(found, stacks, last, strict=True):
            argument = self._body.arguments[carry]
            sizes = shape_of(argument)
            starts = [row, *[build.i32(0)] * len(sizes)]
            taken = build.reshape(build.dynamic_slice(stack, starts, [1, *sizes]), sizes)
            argument.replace_all_uses_with(taken)
            end.operands[carry] = argument
            self._loop.results[carry].replace_all_uses_with(value)

    def _found(self) -> list[int]:
        """The carries, as many as hang on each other alone."""
        body = self._body
        found = [
            carry
            for carry, argument in enumerate(body.arguments)
            if carry not in body.invariant
            and carry not in body.steps
            and not is_accumulated(body.ends[carry], argument)
        ]
        nodes = {carry: self._nodes([carry]) for carry in found}
        found = [carry for carry in found if all(map(self._is_light, nodes[carry]))]
        known = body.invariant | body.steps.keys()
        while True:
            kept = [c for c in found if self._read(nodes[c], c) <= known | set(found)]
            if kept == found:
                return found
            found = kept

    def _nodes(self, carries: list[int]) -> list[Node]:
        """What computes the next values of carries, in order."""
        ends = [self._flow.numbers[self._body.ends[carry]] for carry in carries]
        return [self._flow.nodes[index] for index in sorted(self._flow.ancestors(ends))]

    def _read(self, nodes: list[Node], carry: int) -> set[int]:
        """The carries that a next value is computed from."""
        read = {n for node in nodes for n in node.inputs}
        read.add(self._flow.numbers[self._body.ends[carry]])
        return {self._carry_of[n] for n in read if n in self._carry_of}

    def _is_light(self, node: Node) -> bool:
        if self._effects.has_effect(node.op) or heavy_ops(node.op):
            return False
        silent = True

        def visit(op: ir.Operation) -> ir.WalkResult:
            nonlocal silent
            silent = silent and self._communicates(op) is None
            return ir.WalkResult.ADVANCE

        walk(node.op, visit)
        return silent

    def _stack(self, carries: list[int]) -> tuple[list[ir.Value], list[ir.Value]]:
        """A loop that writes the values of all iterations; these, and what they come to."""
        body, operands = self._body, self._loop.operands
        nodes = self._nodes(carries)
        read = {c for carry in carries for c in self._read(nodes, carry)}
        counters = sorted(read & body.steps.keys())
        build = Builder(ir.InsertionPoint(self._loop), self._loop.location)
        empty = [
            build.splat(0, [self._trips, *shape_of(operands[c])], element_of(operands[c]))
            for c in carries
        ]
        moving = [*carries, *counters]
        start = [operands[c] for c in moving]
        loop = CountedLoop(build, build.i32(self._trips), [*start, *empty])
        values, stacks = loop.arguments[: len(moving)], loop.arguments[len(moving) :]
        stand_ins = {body.arguments[c]: operands[c] for c in sorted(body.invariant)}
        stand_ins |= {body.arguments[c]: v for c, v in zip(moving, values, strict=True)}
        inside = loop.inside
        written = [
            _written(inside, stack, value, loop.counter)
            for stack, value in zip(stacks, values, strict=False)
        ]
        for node in self._nodes(moving):
            copy = copy_with(node.op, stand_ins, inside.point)
            stand_ins |= dict(zip(node.op.results, copy.results, strict=True))
        following = [stand_ins.get(body.ends[c], body.ends[c]) for c in moving]
        results = loop.close([*following, *written])
        return results[len(moving) :], results[: len(carries)]

    def _row(self, build: Builder, counter: int) -> ir.Value:
        """Which iteration it is, by a counter."""
        argument = self._body.arguments[counter]
        start, step = self._loop.operands[counter], self._body.steps[counter]
        passed = build.same("subtract", argument, start)
        if step != 1:
            passed = build.same("divide", passed, build.splat(step, [], element_of(argument)))
        return passed


def _written(build: Builder, stack: ir.Value, value: ir.Value, row: ir.Value) -> ir.Value:
    sizes = shape_of(value)
    starts = [row, *[build.i32(0)] * len(sizes)]
    return build.update(stack, build.reshape(value, [1, *sizes]), starts)
