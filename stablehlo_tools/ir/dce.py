"""Erasing ops that nothing uses."""

from __future__ import annotations

from stablehlo_tools.bindings import ir

_PLAIN = ("stablehlo.", "chlo.", "sdy.sharding_constraint", "sdy.constant")
_KEPT = frozenset(
    f"stablehlo.{name}"
    for name in (
        "after_all", "case", "create_token", "custom_call", "if", "infeed", "outfeed", "recv",
        "return", "rng", "rng_bit_generator", "send", "while",
    )
)  # fmt: skip


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
