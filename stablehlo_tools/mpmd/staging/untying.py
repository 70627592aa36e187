"""Takes sums of gradients apart that come from several stages.

The gradient of a weight that two stages use is the sum of a part from each. Summed up before it is
accumulated, the one part would travel with every microbatch; accumulated apart, they meet once:

    %g = stablehlo.add %a, %b                  // %a of stage 3, %b of stage 0
    %c = stablehlo.convert %g
    %sum = stablehlo.add %total, %c
  ==>
    %d = stablehlo.convert %a
    %e = stablehlo.convert %b
    %t = stablehlo.add %total, %d
    %sum = stablehlo.add %t, %e
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.unused import erase_unused
from stablehlo_tools.mpmd.staging.assignment import Assignment
from stablehlo_tools.mpmd.staging.dataflow import Node
from stablehlo_tools.mpmd.staging.step import Step

_ADD = "stablehlo.add"
_LINEAR = frozenset(
    f"stablehlo.{name}" for name in ("convert", "negate", "reshape", "transpose")
) | {"sdy.sharding_constraint"}


def take_apart(step: Step, assignment: Assignment) -> bool:
    """Rewrites one such sum, if there is any."""
    for each in step.loop.accumulators.values():
        if each.kind != "add" or len(each.links) < 1:
            continue
        for link in each.links:
            if link.op.name == _ADD and _take_apart(step, assignment, link.op, 1 - link.place):
                erase_unused(step.loop.block)
                return True
    return False


def _take_apart(step: Step, assignment: Assignment, link: ir.Operation, place: int) -> bool:
    between: list[Node] = []
    number = step.flow.numbers[link.operands[place]]
    while True:
        node = step.flow.maker.get(number)
        if node is None or len(step.flow.users.get(number, ())) != 1:
            return False
        if node.name == _ADD:
            break
        if node.name not in _LINEAR:
            return False
        between.append(node)
        number = node.inputs[0]
    if len(node.inputs) != 2:
        return False
    makers = [step.flow.maker.get(n) for n in node.inputs]
    works = [assignment.of.get(maker.index) for maker in makers if maker is not None]
    stages = {work.stage for work in works if work is not None}
    if len(stages) < 2:
        return False
    _rewrite(step, node, between[::-1], link, place)
    return True


def _rewrite(step: Step, added: Node, between: list[Node], link: ir.Operation, place: int) -> None:
    """Each part, through the ops in between, is added to the accumulator by itself."""
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
