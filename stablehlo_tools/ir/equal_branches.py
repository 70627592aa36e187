"""Branches that all do the same are no choice.

An export for several platforms decides by the index of its platform wherever jax has a lowering for
one of them, and mostly has the same ops in each branch, a collective among them:

    %g = "stablehlo.case"(%platform) ({
      %a = "stablehlo.all_gather"(%x)
      stablehlo.return %a
    }, {
      %a = "stablehlo.all_gather"(%x)
      stablehlo.return %a
    })
  ==>
    %g = "stablehlo.all_gather"(%x)
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.walk import ops_named, terminator

_CHANNEL = "channel_handle"  # the platforms' own, for what is one collective of the program


def fold_equal_branches(module: ir.Module) -> bool:
    """Lets one of a branch's regions stand for it where all are equal; whether there was any.

    Handles of ops in folded regions stay valid, those of the branches do not.
    """
    folded = False
    asked: set[ir.Value] = set()  # by branches that are folded
    for op in reversed(ops_named(module.operation, BRANCHES)):  # inner and later ones first
        if asked.intersection(op.results) and _only_chooses(op):
            asked.add(op.operands[0])
            op.erase()
            continue
        blocks = [region.blocks[0] for region in op.regions]
        if len(blocks) > 1 and all(_equal(blocks[0], other, {}) for other in blocks[1:]):
            asked.add(op.operands[0])
            _fold(op)
            folded = True
    return folded


def _fold(op: ir.Operation) -> None:
    """Moves the ops of the first region in front of the branch, in its place."""
    block = op.regions[0].blocks[0]
    end = terminator(block)
    returned = list(end.operands)
    for view in list(block.operations)[:-1]:
        view.operation.move_before(op)
    for result, value in zip(op.results, returned, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _only_chooses(op: ir.Operation) -> bool:
    """Whether a branch decides among values that are there, and nothing asks for it any more."""
    if any(list(result.uses) for result in op.results):
        return False
    return all(len(list(region.blocks[0].operations)) == 1 for region in op.regions)


def _equal(one: ir.Block, other: ir.Block, known: dict[ir.Value, ir.Value]) -> bool:
    """Whether two blocks do the same; `known` gives what stands in the second for values of the
    first, all others being from outside of both."""
    arguments = list(zip(one.arguments, other.arguments, strict=False))
    if len(one.arguments) != len(other.arguments) or any(a.type != b.type for a, b in arguments):
        return False
    known.update(arguments)
    first, second = list(one.operations), list(other.operations)
    if len(first) != len(second):
        return False
    return all(_same(a.operation, b.operation, known) for a, b in zip(first, second, strict=True))


def _same(one: ir.Operation, other: ir.Operation, known: dict[ir.Value, ir.Value]) -> bool:
    results = [[value.type for value in op.results] for op in (one, other)]
    if one.name != other.name or results[0] != results[1] or _said(one) != _said(other):
        return False
    if [known.get(value, value) for value in one.operands] != list(other.operands):
        return False
    regions = list(zip(one.regions, other.regions, strict=False))
    if len(one.regions) != len(other.regions):
        return False
    for ours, theirs in regions:
        blocks = list(zip(ours.blocks, theirs.blocks, strict=False))
        if len(list(ours.blocks)) != len(list(theirs.blocks)):
            return False
        if not all(_equal(a, b, known) for a, b in blocks):
            return False
    known.update(zip(one.results, other.results, strict=True))
    return True


def _said(op: ir.Operation) -> dict[str, ir.Attribute]:
    return {name: value for name, value in op.attributes.items() if name != _CHANNEL}
