"""Inlines a `case` or `if` whose branches are all equal.

An export for several platforms has a `case` over the platform index at each primitive with a
platform-specific lowering. Mostly its branches have the same ops, a collective among them:

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
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.views import Case
from stablehlo_tools.ir.walk import ops_named

_CHANNEL = "channel_handle"  # differs between platforms for the same collective of the program


def fold_equal_branches(module: ir.Module) -> bool:
    """Replaces each branch op by one of its regions, if all are equal; returns True if any was.

    Handles of ops in the folded regions stay valid, those of the branch ops do not.
    """
    folded = False
    asked: set[ir.Value] = set()  # the predicates of folded branch ops
    for op in reversed(ops_named(module.operation, BRANCHES)):  # inner and later ones first
        blocks = Case(op).branches
        is_unused = asked.intersection(op.results) and not any(map(has_uses, op.results))
        if is_unused and all(len(block.operations) == 1 for block in blocks):  # only chooses
            asked.add(op.operands[0])
            op.erase()
            continue
        keys = {
            block_key(block, lambda v: v, is_said=lambda name: name != _CHANNEL) for block in blocks
        }
        if len(blocks) > 1 and len(keys) == 1:
            asked.add(op.operands[0])
            inline_block(blocks[0], op)
            folded = True
    return folded
