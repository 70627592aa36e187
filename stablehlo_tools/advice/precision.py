"""Detects collectives of wider types than needed: f32 for values that are bf16 before or after.

XLA itself narrows collectives that only move values (`as_compiled.ByItself`), except for some on
TPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.advice.advised_program import AdvisedProgram, CollectiveCost
from stablehlo_tools.advice.collective_uses import (
    Number,
    float_of,
    narrower_after,
    narrower_after_ops,
    narrower_before,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.report.document import Advice

_REDUCING = frozenset({"all_reduce", "reduce_scatter"})


def wide_collectives(program: AdvisedProgram) -> Iterator[Advice]:
    """Yields one item for collectives that only move values, and one for reductions."""
    wide = [
        (each, share)
        for each in program.collectives
        if not program.is_narrowed(each) and (share := narrow_share(each)) < 1
    ]
    for reducing in (False, True):
        alike = [(c, share) for c, share in wide if (c.sent.kind in _REDUCING) == reducing]
        if not program.is_worth(sum(each.exposed_ns * (1 - share) for each, share in alike)):
            continue
        times = {(c.path, c.task): program.transfer_ns(c, share) for c, share in alike}
        gain = program.total_ns - program.retimed_ns(times)
        if program.is_worth(gain):
            yield _item(program, alike, gain, reducing=reducing)


def narrow_share(collective: CollectiveCost) -> float:
    """Returns the share of its bytes that a collective needs to send; 1 if it needs all."""
    op = collective.op
    wide = float_of(op.operands[0]) if len(op.operands) else None
    narrow = _narrow_type(op)
    return 1.0 if wide is None or narrow is None else narrow.width / wide.width


def _narrow_type(op: ir.Operation) -> Number | None:
    return narrower_before(op) or narrower_after(op) or narrower_after_ops(op)


def _item(
    program: AdvisedProgram,
    alike: list[tuple[CollectiveCost, float]],
    gain: float,
    *,
    reducing: bool,
) -> Advice:
    first, _ = max(alike, key=lambda pair: pair[0].ns)
    before = narrower_before(first.op)
    narrow = _narrow_type(first.op)
    after = "just after" if before or narrower_after(first.op) else "after ops on each element"
    sent = sum(each.times * each.sent.bytes for each, _ in alike)
    kinds = " and ".join(dict.fromkeys(each.sent.kind for each, _ in alike))
    cause = (
        f"{len(alike)} {kinds} of {size(sent)} in {first.sent.dtype}, "
        f"{duration(sum(each.ns for each, _ in alike))} in all; their values "
        f"{f'were {narrow} just before' if before else f'become {narrow} {after}'}"
    )
    if reducing:
        remedy = f"reduce in {narrow}, if sums rounded to it are accurate enough: the values change"
    else:
        order = "after" if before else "before"
        remedy = f"convert {order} the collective: it moves {narrow}, and the values stay the same"
        if narrow != (before or narrower_after(first.op)):
            remedy += "; partition does so for the collectives that it writes"
    return program.advice(
        "wide-reduction" if reducing else "wide-collective",
        gain,
        cause,
        program.place(first.op),
        remedy,
    )
