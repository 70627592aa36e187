"""Erasing ops that nothing uses."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import Trait, ops_with_any

_PLAIN = ("stablehlo.", "chlo.", "sdy.sharding_constraint", "sdy.constant")
_KEPT = ops_with_any(
    Trait.TRANSFER | Trait.TOKEN | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.OPAQUE
) | {"stablehlo.return"}


def erase_unused(block: ir.Block) -> None:
    """Erases the ops of a block, and of blocks in it, whose results nothing uses; those with
    an effect, or that may have one in a region, stay."""
    for view in reversed(list(block.operations)):
        op = view.operation
        used = any(next(iter(result.uses), None) is not None for result in op.results)
        if not used and len(op.results) and op.name.startswith(_PLAIN) and op.name not in _KEPT:
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                erase_unused(inner)
