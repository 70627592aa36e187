"""Which anchors a schedule has moved past others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.transforms.overlapping.anchors import Anchor
from stablehlo_tools.transforms.overlapping.block_plan import BlockPlan


def moved_pairs(plan: BlockPlan, anchors: Sequence[Anchor]) -> list[tuple[Anchor, Anchor]]:
    """Neighbours of which the second does not depend on the first."""
    return [
        (first, second) for first, second in pairwise(anchors) if not _leads_to(plan, first, second)
    ]


def _longest_ascending(numbers: Sequence[int]) -> set[int]:
    """The positions of a longest ascending run of numbers, others left out between them."""
    ends: list[int] = []
    ends_at: list[int] = []
    before: list[int] = []
    for position, number in enumerate(numbers):
        length = bisect_left(ends, number)
        before.append(ends_at[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        ends_at[length : length + 1] = [position]
    found: set[int] = set()
    position = ends_at[-1] if ends_at else -1
    while position >= 0:
        found.add(position)
        position = before[position]
    return found


def _leads_to(plan: BlockPlan, first: Anchor, second: Anchor) -> bool:
    """Whether an anchor's op needs another's result."""
    places = {
        key_of(op): place for place, op in enumerate(plan.order[first.place : second.place + 1])
    }
    seen: set[object] = set()
    pending = [second.op]
    while pending:
        op = pending.pop()
        for operand in op.operands:
            maker = producer(operand)
            if maker is None or key_of(maker) not in places or key_of(maker) in seen:
                continue
            if key_of(maker) == key_of(first.op):
                return True
            seen.add(key_of(maker))
            pending.append(maker)
    return False
