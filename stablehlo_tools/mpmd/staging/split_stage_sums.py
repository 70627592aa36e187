"""Splits values that several stages share: sums of gradients, and broadcasts of few elements.

The gradient of a weight that two stages use is the sum of a part from each. If the parts were added
before they are accumulated, one would be sent for every microbatch. If they are accumulated
separately, one is sent once:

    %g = stablehlo.add %a, %b                  // %a of stage 3, %b of stage 0
    %c = stablehlo.convert %g
    %sum = stablehlo.add %total, %c
  ==>
    %d = stablehlo.convert %a
    %e = stablehlo.convert %b
    %t = stablehlo.add %total, %d
    %sum = stablehlo.add %t, %e

A broadcast of few elements, such as the factor that clips all gradients, is copied to each reader.
So the few elements are sent, not the broadcast.
"""

from __future__ import annotations

from math import prod

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.loop_carries import is_sum
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    BROADCAST,
    CONVERT,
    NEGATE,
    REVERSE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.values import is_float, key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.mpmd.staging.assignment import Assignment
from stablehlo_tools.mpmd.staging.step import TrainingStep

_LINEAR = ops_with(Trait.BIJECTIVE) - {REVERSE} | {CONVERT, SHARDING_CONSTRAINT, NEGATE}
_KEEPING = ops_with(Trait.BIJECTIVE) - {REVERSE} | {CONVERT, NEGATE}
_FEW = 64  # elements of a value that is cheaper to send than its broadcast


def take_apart(step: TrainingStep, assignment: Assignment) -> bool:
    """Splits one such sum. Returns False if there is none."""
    if _begin_anew(step, assignment):
        return True
    for each in step.loop.accumulators.values():
        if each.reducer != "add" or len(each.links) < 1:
            continue
        for link in each.links:
            if link.op.name == ADD and _take_apart(step, assignment, link.op, 1 - link.place):
                erase_unused(step.loop.block)
                return True
    return False


def _begin_anew(step: TrainingStep, assignment: Assignment) -> bool:
    """Makes one loop that continues another stage's sum start from zero, and adds the sum after it.

    This happens for the gradient of weights that all layers share. Returns False if there is none.
    """
    for index, work in assignment.of.items():
        loop = step.flow.nodes[index].op
        if loop.name != WHILE:
            continue
        inside = While(loop).body
        ends = terminator(inside).operands
        for carry, (argument, end) in enumerate(zip(inside.arguments, ends, strict=True)):
            maker = step.flow.maker.get(step.flow.numbers[loop.operands[carry]])
            earlier = None if maker is None else assignment.of.get(maker.index)
            is_apart = earlier is not None and earlier.stage != work.stage
            if is_apart and is_float(argument.type) and is_sum(end, argument):
                before, result = loop.operands[carry], loop.results[carry]
                uses = list(result.uses)
                build = Builder(ir.InsertionPoint(loop), loop.location)
                loop.operands[carry] = build.splat_like(0, before)
                build = Builder(ir.InsertionPoint.after(loop), loop.location)
                total = build.same("add", result, before)
                for use in uses:
                    use.owner.operation.operands[use.operand_number] = total
                return True
    return False


def _take_apart(step: TrainingStep, assignment: Assignment, link: ir.Operation, place: int) -> bool:
    between: list[Node] = []
    number = step.flow.numbers[link.operands[place]]
    while True:
        node = _only_read(step, number)
        if node is None:
            return False
        if node.name == ADD:
            break
        if node.name not in _LINEAR:
            return False
        between.append(node)
        number = node.inputs[0]
    if len(node.inputs) != 2 or len(_stages(step, assignment, number)) < 2:
        return False
    _rewrite(step, node, between[::-1], link, place)
    return True


def _only_read(step: TrainingStep, number: int) -> Node | None:
    """Returns the op that yields a value with one use; None if it has more."""
    node = step.flow.maker.get(number)
    return node if len(step.flow.users.get(number, ())) == 1 else None


def _stages(step: TrainingStep, assignment: Assignment, number: int) -> set[int]:
    """Returns the stages of the terms of a sum."""
    stages: set[int] = set()
    pending = [number]
    while pending:
        number = pending.pop()
        node = _only_read(step, number)
        if node is not None and (node.name == ADD or node.name in _LINEAR):
            pending += node.inputs
            continue
        maker = step.flow.maker.get(number)
        work = None if maker is None else assignment.of.get(maker.index)
        if work is not None:
            stages.add(work.stage)
    return stages


def _rewrite(
    step: TrainingStep, added: Node, between: list[Node], link: ir.Operation, place: int
) -> None:
    """Adds each part to the accumulator separately, through copies of the ops in between."""
    total = link.operands[1 - place]
    point = ir.InsertionPoint(link)
    parts: list[ir.Value] = []
    for number in added.inputs:
        value = step.flow.values[number]
        for node in between:
            copy = node.op.clone(ip=point)
            copy.operands[0] = value
            value = copy.results[0]
        parts.append(value)
    first = link.clone(ip=point)
    first.operands[1 - place] = total
    first.operands[place] = parts[0]
    link.operands[1 - place] = first.results[0]
    link.operands[place] = parts[1]


def is_spread(op: ir.Operation) -> bool:
    """Returns True if an op broadcasts few elements, or reshapes or converts such a broadcast."""
    if op.name == BROADCAST:
        count = prod(shape_of(op.operands[0]))
        return count <= _FEW and count < prod(shape_of(op.results[0]))
    if op.name in _KEEPING:
        maker = producer(op.operands[0])
        return maker is not None and is_spread(maker)
    return False


def own_spreads(block: ir.Block) -> None:
    """Copies broadcasts in a block to each of their readers, except those that a region reads."""
    # Last first: copies of an op are then readers of the ops before it, and get their own copies.
    for view in list(block.operations)[::-1]:
        op = view.operation
        if not len(op.results) or not is_spread(op):
            continue
        readers = {key_of(use.owner.operation): use.owner.operation for use in op.results[0].uses}
        outermost = [reader for reader in readers.values() if reader.block == block]
        if len(outermost) != len(readers):
            continue  # a region reads it
        for reader in outermost[1:]:
            copy = op.clone(ip=ir.InsertionPoint(reader)).results[0]
            for position, operand in enumerate(reader.operands):
                if operand == op.results[0]:
                    reader.operands[position] = copy
