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
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import terminator, walk

_CHANNEL = "channel_handle"  # the platforms' own, for what is one collective of the program


def fold_equal_branches(module: ir.Module) -> bool:
    """Lets one of a branch's regions stand for it where all are equal; whether there was any.

    Handles of ops in folded regions stay valid, those of the branches do not.
    """
    branches: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in BRANCHES:
            branches.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    indices: list[ir.Value] = []
    for op in reversed(branches):  # inner ones first
        blocks = [region.blocks[0] for region in op.regions]
        if len(blocks) > 1 and all(_equal(blocks[0], other, {}) for other in blocks[1:]):
            indices.append(op.operands[0])
            _fold(op)
    for index in dict.fromkeys(indices):
        _drop_choice(index)
    return bool(indices)


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


def _drop_choice(index: ir.Value) -> None:
    """Erases the choice of a branch among constants, where nothing asks for it any more."""
    maker = producer(index)
    if maker is None or maker.name not in BRANCHES or any(list(r.uses) for r in maker.results):
        return
    if all(len(list(region.blocks[0].operations)) == 1 for region in maker.regions):
        maker.erase()


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
