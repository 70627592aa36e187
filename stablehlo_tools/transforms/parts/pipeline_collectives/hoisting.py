"""Collectives that send the same in every iteration run once, before the loop.

  while {
    %g = "stablehlo.all_gather"(%w)     // of a %w that every iteration hands on as it came
  }
==>
  %g = "stablehlo.all_gather"(%w)
  while (…, %carried = %g)
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import append, append_arguments, append_to_terminator
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import Frame


def is_the_same(body: LoopBody, ops: Sequence[ir.Operation]) -> bool:
    """Whether ops compute the same in every iteration, from what does not change in the loop."""
    made = {result for op in ops for result in op.results}
    read = (value for op in ops for value in body.reads(op) if value not in made)
    return all(body.is_indexed(value) and not body.is_moving(value) for value in read)


def hoist(body: LoopBody, ops: Sequence[ir.Operation]) -> ir.Operation:
    """Runs ops, in their order, before the loop, which carries what others need of them.

    Returns the new loop; `body` is not valid any more.
    """
    operands = list(body.loop.operands)
    kept = {number: operands[number] for number in body.invariant}
    frame = Frame(body, ir.InsertionPoint(body.loop), {}, kept)
    for op in ops:
        frame.run(op, 0)
    moved = {key_of(op) for op in ops}
    read = {v for op in body.ops if key_of(op) not in moved for v in body.reads(op)}
    wanted = [v for op in ops for v in op.results if v in read or body.carries_of(v)]
    carried = [frame.get(value, 0) for value in wanted]
    kinds = [value.type for value in carried]
    loop = append(body.loop, carried, kinds)
    condition, block = (region.blocks[0] for region in loop.regions)
    append_arguments(condition, kinds)
    arguments = append_arguments(block, kinds)
    for value, argument in zip(wanted, arguments, strict=True):
        value.replace_all_uses_with(argument)
    append_to_terminator(block, arguments)
    for op in reversed(ops):
        op.erase()
    return loop
