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
from stablehlo_tools.ir.rewriter import inline_block
from stablehlo_tools.ir.structural_key import block_key
from stablehlo_tools.ir.views import Case
from stablehlo_tools.ir.walk import ops_named

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
        blocks = Case(op).branches
        keys = {
            block_key(block, lambda v: v, is_said=lambda name: name != _CHANNEL) for block in blocks
        }
        if len(blocks) > 1 and len(keys) == 1:
            asked.add(op.operands[0])
            inline_block(blocks[0], op)
            folded = True
    return folded


def _only_chooses(op: ir.Operation) -> bool:
    """Whether a branch decides among values that are there, and nothing asks for it any more."""
    if any(list(result.uses) for result in op.results):
        return False
    return all(len(list(region.blocks[0].operations)) == 1 for region in op.regions)
