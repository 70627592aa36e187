"""What is summed over the ranks of a pipeline behind its last tick."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.pipelines.flows import Classify
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONVERT, SELECT, SLICE
from stablehlo_tools.dialect.traits import LAYOUT, Trait, ops_with, short_names
from stablehlo_tools.ir.values import key_of

_REDUCES = short_names(ops_with(Trait.ACROSS_DEVICES))
_FORMS = LAYOUT - {"stablehlo.reverse"} | {CONVERT, SELECT, SLICE}


def final_reductions(
    loop: ir.Operation, axis: MeshAxis, facts: ModuleFacts, classify: Classify
) -> Iterator[Collective]:
    """The reductions over the axis of what a loop over ticks leaves, or of a form of that."""
    waiting = list(loop.results)
    seen: set[ir.Value | ir.Operation] = set()
    while waiting:
        for use in waiting.pop().uses:
            op = use.owner.operation
            if key_of(op) in seen or op.block != loop.block:
                continue
            seen.add(key_of(op))
            if op.name in _FORMS:
                waiting += op.results
                continue
            collective = classify(op)
            if collective is not None and _is_over(collective, axis, facts):
                yield collective


def _is_over(collective: Collective, axis: MeshAxis, facts: ModuleFacts) -> bool:
    """Whether a collective reduces over the whole axis, and maybe over others too."""
    groups = facts.groups(collective) if collective.kind in _REDUCES else None
    if groups is None:
        return False
    number = {device: n for n, group in enumerate(groups) for device in group}
    return all(len({number.get(device) for device in line}) == 1 for line in axis.groups)
