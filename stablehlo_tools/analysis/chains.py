"""Whether collectives follow one another in a chain: the usual case, and quick to see.

A short search backwards from each collective for the one before it, through barriers and ops that
keep dependence. Sound, not complete: where it fails, `forced_dependence` looks at every op.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.dataflow import keeps_dependence
from stablehlo_tools.analysis.forced_dependence import has_no_elements
from stablehlo_tools.analysis.liveness import reaches_an_output
from stablehlo_tools.bindings import ir

_BARRIER = "stablehlo.optimization_barrier"
_AFTER_ALL = "stablehlo.after_all"
_LONGEST_SEARCH = 64  # values, for one collective
_LONGEST_LINK = 8  # barriers and joins, from one collective to the next


def is_chain(collectives: Sequence[Collective], live: set[ir.Value]) -> bool:
    """Whether each must come after the one before it.

    None of them is dead, or in control flow; `live` are values on paths that show it, as
    `live_paths` finds them.
    """
    if any(has_no_elements(value.type) for c in collectives for value in c.op.results):
        return False
    return all(_follows(later, earlier, live) for earlier, later in pairwise(collectives))


def _follows(later: Collective, earlier: Collective, live: set[ir.Value]) -> bool:
    if not len(earlier.op.results):
        return False
    goal = earlier.op.results[0]
    if _is_linked(later, goal, live):
        return True
    pending = deque(later.op.operands)  # nearest first: the one before is not far
    seen: set[ir.Value] = set()
    while pending and len(seen) < _LONGEST_SEARCH:
        value = pending.popleft()
        if value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if isinstance(owner, ir.Block) or has_no_elements(value.type):
            continue
        op = owner.operation
        if op.results[0] == goal:
            return True
        if op.name == _BARRIER:
            pending += _kept(op, value, live)
        elif op.name == _AFTER_ALL or keeps_dependence(op):
            pending += op.operands
    return False


def _is_linked(later: Collective, goal: ir.Value, live: set[ir.Value]) -> bool:
    """Whether a token leads from a barrier on the goal to one on the first operand."""
    value = next(iter(later.op.operands), None)
    for _ in range(_LONGEST_LINK):
        if value is None or isinstance(value.owner, ir.Block):
            return False
        op = value.owner.operation
        operands = list(op.operands)
        if op.name == _BARRIER:
            if goal in operands:
                return _is_used(op.results[operands.index(goal)], live)
            if isinstance(operands[-1].type, ir.RankedTensorType):
                return False
        elif op.name != _AFTER_ALL:
            return False
        value = operands[-1] if operands else None
    return False


def _kept(barrier: ir.Operation, value: ir.Value, live: set[ir.Value]) -> list[ir.Value]:
    """What a result of a barrier waits for: its own operand, tokens, and all that is used."""
    return [
        operand
        for operand, result in zip(barrier.operands, barrier.results, strict=True)
        if result == value
        or not isinstance(operand.type, ir.RankedTensorType)
        or _is_used(result, live)
    ]


def _is_used(value: ir.Value, live: set[ir.Value]) -> bool:
    return value in live or reaches_an_output([value], live)
