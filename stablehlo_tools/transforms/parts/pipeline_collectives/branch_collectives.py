"""Moves collectives out of branches of a loop's body, so that they can leave the loop.

The first stage of a pipeline runs in a branch, in the ticks in which it has a microbatch. Gathers
there of weights that do not change in the loop can run before the branch. A reduction whose result
is added to a sum can run after it:

    %next = stablehlo.if %due {                        // %sum is read by nothing else
      %g = "stablehlo.all_reduce"(%x)
      stablehlo.return stablehlo.add(%sum, %g)
    } else {
      stablehlo.return %sum
    }
  ==>                                                  // `bring_out`
    %own = stablehlo.if %due { stablehlo.return %x } else { stablehlo.return zeros }
    %g = "stablehlo.all_reduce"(%own)
    %next = stablehlo.add %sum, %g
  ==>                                                  // the all_reduce left: `put_back`
    %next = stablehlo.if %due { stablehlo.return stablehlo.add(%local, %x) } else { … %local }

So the branch adds only local values, and only in ticks that have something to add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, CONVERT, IF
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import copy_without_regions, rebuild
from stablehlo_tools.ir.values import (
    has_uses,
    in_block_order,
    is_identity_of,
    is_spread_constant,
    key_of,
    maker_of,
    producer,
)
from stablehlo_tools.ir.views import Case
from stablehlo_tools.ir.walk import terminator

_OPENED = "stablehlo_tools.opened"  # on a branch whose sums were moved after it
_BLOCKS = 2

Wanted = Callable[[ir.Operation], bool]


class _BranchSum(NamedTuple):
    """Result `number` of a branch that adds to `total` in its first region.

    The addend is the result of `steps`, with collectives among them. The second region returns
    `total` unchanged.
    """

    number: int
    total: ir.Value
    steps: Sequence[ir.Operation]


def bring_out(body: LoopBody, wanted: Wanted) -> bool:
    """Moves wanted collectives out of the branches of a loop's body.

    They must follow from invariants of the loop, or lead to a sum. Returns True if there were any;
    then `body` is out of date.
    """
    changed = False
    for op in body.ops:
        if op.name != IF or not body.communicates(op):
            continue
        blocks = Case(op).branches
        for block in blocks:
            changed |= _ahead(body, op, block, wanted)
        sums = _sums(body, blocks, wanted)
        if sums:
            _write_behind(op, sums)
            changed = True
    return changed


def put_back(body: LoopBody) -> None:
    """Moves sums back into opened branches, if no op is left between a branch and its sum."""
    for op in body.ops:
        if op.name == IF and _OPENED in op.attributes:
            del op.attributes[_OPENED]
            _add_inside(body, op)


def _ahead(body: LoopBody, branch: ir.Operation, block: ir.Block, wanted: Wanted) -> bool:
    """Moves wanted collectives that follow from invariants of the loop before a branch.

    Their operands' producers in the branch move with them. Returns True if there were any.
    """
    moved = list[ir.Operation]()
    for view in block.operations:
        if wanted(view.operation):
            moved += _leading_to(body, block, view.operation)
    for op in in_block_order(list({key_of(op): op for op in moved}.values())):
        op.move_before(branch)
    return bool(moved)


def _leading_to(body: LoopBody, block: ir.Block, collective: ir.Operation) -> list[ir.Operation]:
    """Returns the ops of a block that a collective depends on, with the collective itself.

    Empty if one of them is costly, has regions, or depends on a value that changes in the loop.
    """
    ops, pending = [collective], list[ir.Value](collective.operands)
    while pending:
        value = pending.pop()
        maker = producer(value)
        if maker is not None and maker.block == block:
            if len(maker.regions) or body.is_costly(maker):
                return []
            ops.append(maker)
            pending += maker.operands
        elif not body.is_indexed(value) or body.is_moving(value):
            return []
    return ops


def _sums(body: LoopBody, blocks: Sequence[ir.Block], wanted: Wanted) -> list[_BranchSum]:
    if len(blocks) != _BLOCKS:
        return []
    runs, rests = (list(terminator(block).operands) for block in blocks)
    found = list[_BranchSum]()
    for number, (value, kept) in enumerate(zip(runs, rests, strict=True)):
        add = producer(value)
        if add is None or add.name != ADD or add.block != blocks[0] or not _only(value):
            continue
        terms = [term for term in add.operands if term != kept]
        if len(terms) != 1 or body.argument_number(kept) is None:
            continue
        steps = _chain(body, blocks[0], terms[0], wanted)
        if steps:
            found.append(_BranchSum(number, kept, steps))
    return found


def _chain(body: LoopBody, block: ir.Block, value: ir.Value, wanted: Wanted) -> list[ir.Operation]:
    """Returns the ops of a block that compute a value, from the first wanted collective on.

    Each is read by the next one alone. Empty without a wanted collective, or if an unwanted one is
    between.
    """
    steps, last = list[ir.Operation](), 0
    while _only(value):
        op = producer(value)
        if op is None or op.block != block or not len(op.operands) or len(op.results) != 1:
            break
        if body.communicates(op) and not wanted(op):
            break
        steps.append(op)
        if wanted(op):
            last = len(steps)
        others = list(op.operands)[1:]
        makers = [producer(other) for other in others if not is_spread_constant(other)]
        if any(maker is not None and maker.block == block for maker in makers):
            break
        value = op.operands[0]
    return steps[:last][::-1]


def _only(value: ir.Value) -> bool:
    return len(list(value.uses)) == 1


def _write_behind(branch: ir.Operation, sums: Sequence[_BranchSum]) -> None:
    """Lets a branch return the first operands of the chains, and runs the chains after it."""
    runs, rests = Case(branch).branches
    ends = [list(terminator(block).operands) for block in (runs, rests)]
    types = [result.type for result in branch.results]
    for each in sums:
        local = each.steps[0].operands[0]
        element = element_of(local)
        nothing = identity_of("add", element)
        assert nothing is not None, "an addition has an identity"
        build = Builder(ir.InsertionPoint(terminator(rests)), branch.location)
        ends[0][each.number] = local
        ends[1][each.number] = build.splat(nothing, shape_of(local), element)
        types[each.number] = local.type
    adds = {each.number: maker_of(terminator(runs).operands[each.number]) for each in sums}
    for block, operands in zip((runs, rests), ends, strict=True):
        rebuild(terminator(block), operands, [])
    results: list[ir.Value] = list(branch.results)
    opened = copy_without_regions(branch, list(branch.operands), types)
    opened.attributes[_OPENED] = ir.UnitAttr.get(branch.context)
    for source, target in zip(branch.regions, opened.regions, strict=True):
        source.blocks[0].append_to(target)
    totals = {each.number: _run_behind(opened, branch, each, adds[each.number]) for each in sums}
    for number, result in enumerate(results):
        stands: ir.Value = totals[number] if number in totals else opened.results[number]
        result.replace_all_uses_with(stands)
    branch.erase()


def _run_behind(
    opened: ir.Operation, branch: ir.Operation, each: _BranchSum, add: ir.Operation
) -> ir.Value:
    """Moves the chain of a sum, and its addition, out of the old branch, after the new one."""
    value: ir.Value = opened.results[each.number]
    for op in each.steps:
        operands = [value, *(_again(other, branch) for other in list(op.operands)[1:])]
        op.move_before(branch)
        for position, operand in enumerate(operands):
            op.operands[position] = operand
        value = op.results[0]
    add.move_before(branch)
    place = next(i for i, operand in enumerate(add.operands) if operand != each.total)
    add.operands[place] = value
    return add.results[0]


def _again(value: ir.Value, branch: ir.Operation) -> ir.Value:
    """Returns a value that is available before a branch; clones constants from inside it."""
    maker = producer(value)
    if maker is None or maker.block == branch.block or not is_spread_constant(value):
        return value
    operands = [_again(operand, branch) for operand in maker.operands]
    copy = maker.clone(ip=ir.InsertionPoint(branch))
    for position, operand in enumerate(operands):
        copy.operands[position] = operand
    return copy.results[0]


def _add_inside(body: LoopBody, branch: ir.Operation) -> None:
    blocks = Case(branch).branches
    ends = [list(terminator(block).operands) for block in blocks]
    types = [result.type for result in branch.results]
    behind = dict[int, list[ir.Operation]]()
    for number, result in enumerate(branch.results):
        ops = _adding(body, result) if is_identity_of("add", ends[1][number]) else []
        if not ops:
            continue
        add = ops[-1]
        total = next(v for v in add.operands if body.argument_number(v) is not None)
        build = Builder(ir.InsertionPoint(terminator(blocks[0])), add.location)
        term = build.convert(ends[0][number], element_of(total))
        ends[0][number], ends[1][number] = build.same("add", total, term), total
        types[number] = total.type
        behind[number] = ops
    if not behind:
        return
    # The identities that `bring_out` returned from the second region are unused now.
    nothing = [producer(terminator(blocks[1]).operands[number]) for number in behind]
    for block, operands in zip(blocks, ends, strict=True):
        rebuild(terminator(block), operands, [])
    for op in nothing:
        if op is not None and op.block == blocks[1] and not has_uses(op.results[0]):
            op.erase()
    for number, ops in behind.items():
        ops[-1].results[0].replace_all_uses_with(branch.results[number])
        for op in reversed(ops):
            op.erase()
    rebuild(branch, list(branch.operands), types)


def _adding(body: LoopBody, value: ir.Value) -> list[ir.Operation]:
    """Returns the ops that add a value, converted perhaps, to a carry with no other reader.

    The addition is last. Empty if the value is used in another way.
    """
    if not _only(value):
        return []
    op = next(iter(value.uses)).owner.operation
    if op.name == CONVERT:
        following = _adding(body, op.results[0])
        return [op, *following] if following else []
    if op.name != ADD or key_of(op) not in body.position_of:
        return []
    carried = [v for v in op.operands if body.argument_number(v) is not None]
    return [op] if len(carried) == 1 and _only(carried[0]) else []
