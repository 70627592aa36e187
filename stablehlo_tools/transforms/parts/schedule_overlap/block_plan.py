"""The ops of one block in the order of a schedule, and when each would run.

A task of the schedule stands for ops of the block, or of regions inside ops of it: then for the
op of the block around them. Ops that no task stands for (constants, what each reader makes anew,
what nobody uses) come right before the first op that needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import walk

type Places = Mapping[ir.Value | ir.Operation, int]  # numbers of ops, by what stands for them


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All ops of a block but its last in their new order; by op, its place in it.

    `ops` are those of each task in this block, in program order.
    """

    block: ir.Block
    order: Sequence[ir.Operation]
    ops: Sequence[Sequence[ir.Operation]]


def plan_block(traced: TracedGraph, order: Sequence[int], effects: Effects) -> BlockPlan | None:
    """The plan of the block that most tasks of a graph stand in; None if nothing stands in one."""
    block = _home(traced)
    if block is None:
        return None
    lifted = [_lifted(ops, block) for ops in traced.ops]
    wanted = (op for task in order for op in lifted[task])
    return BlockPlan(block, _in_order(block, wanted, effects), lifted)


def _home(traced: TracedGraph) -> ir.Block | None:
    counts = Counter(op.block for ops in traced.ops for op in ops[-1:])
    return counts.most_common(1)[0][0] if counts else None


def _lifted(ops: Sequence[ir.Operation], block: ir.Block) -> list[ir.Operation]:
    found: dict[ir.Value | ir.Operation, ir.Operation] = {}
    for op in ops:
        around = _ancestor_in(op, block)
        if around is not None:
            found.setdefault(key_of(around), around)
    return list(found.values())


def _ancestor_in(op: ir.Operation, block: ir.Block) -> ir.Operation | None:
    current = op
    while current.block != block:
        parent = current.parent
        if parent is None or parent.name == FUNCTION:
            return None
        current = parent.operation
    return current


def _in_order(
    block: ir.Block, wanted: Iterable[ir.Operation], effects: Effects
) -> list[ir.Operation]:
    """The ops of a block: those wanted in this order, each behind all that it needs."""
    ops = [op.operation for op in block.operations][:-1]
    number = {key_of(op): i for i, op in enumerate(ops)}
    needs = [sorted(_needs(op, number)) for op in ops]
    for before, after in pairwise(effects.in_block(block)):
        needs[number[key_of(after)]].append(number[key_of(before)])
    done = bytearray(len(ops))
    result: list[ir.Operation] = []
    indices = [number[key_of(op)] for op in wanted]
    for wished in (*indices, *range(len(ops))):
        stack = [wished]
        while stack:
            at = stack[-1]
            missing = [i for i in needs[at] if not done[i]]
            if missing and not done[at]:
                stack += reversed(missing)
                continue
            stack.pop()
            if not done[at]:
                done[at] = 1
                result.append(ops[at])
    return result


def _needs(op: ir.Operation, number: dict[ir.Value | ir.Operation, int]) -> set[int]:
    """The ops of the block whose results an op, or an op in its regions, uses."""
    found: set[int] = set()

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for operand in inner.operands:
            owner = operand.owner
            at = None if isinstance(owner, ir.Block) else number.get(key_of(owner.operation))
            if at is not None:
                found.add(at)
        return ir.WalkResult.ADVANCE

    if len(op.regions):
        walk(op, visit)
    else:
        visit(op)
    found.discard(number[key_of(op)])
    return found
