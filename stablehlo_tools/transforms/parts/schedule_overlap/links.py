"""Which anchors nothing but the schedule orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.transforms.parts.schedule_overlap.anchors import Anchor
from stablehlo_tools.transforms.parts.schedule_overlap.block_plan import BlockPlan


def unordered_neighbours(plan: BlockPlan, anchors: Sequence[Anchor]) -> list[tuple[Anchor, Anchor]]:
    """Anchors that follow each other of which the second does not need the first's result."""
    return [
        (first, second) for first, second in pairwise(anchors) if not _leads_to(plan, first, second)
    ]


def _leads_to(plan: BlockPlan, first: Anchor, second: Anchor) -> bool:
    between = {key_of(op) for op in plan.order[first.place : second.place + 1]}
    pending = [second.op]
    while pending:
        op = pending.pop()
        if key_of(op) == key_of(first.op):
            return True
        for operand in op.operands:
            maker = producer(operand)
            if maker is not None and key_of(maker) in between:
                between.discard(key_of(maker))
                pending.append(maker)
    return False
