"""One all_gather in the place of several that gather the same value."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.create_reduce_scatter.group_forms import GroupForms

_SHARED = "stablehlo_tools.shared_gather"  # so that a second run counts what the first one keeps


@dataclass(frozen=True)
class Shared:
    """An all_gather that repeats an earlier one."""

    earlier: ir.Operation
    later: ir.Operation
    is_limited: bool

    def apply(self) -> None:
        """Uses the earlier one's results and erases the later."""
        for old, new in zip(self.later.results, self.earlier.results, strict=True):
            old.replace_all_uses_with(new)
        self.later.erase()
        if self.is_limited:
            self.earlier.attributes[_SHARED] = ir.UnitAttr.get(self.earlier.context)


def plan_sharing(
    collectives: list[Collective], forms: GroupForms, memory_limit: int
) -> list[Shared]:
    """The all_gathers that repeat one before them, in its block or in a region of a later op.

    What an all_gather that is shared makes lives on: at most `memory_limit` bytes of it in all,
    taken in program order, where that is not 0.
    """
    firsts: dict[object, list[Collective]] = {}
    kept = {c.op.results[0] for c in collectives if _SHARED in c.op.attributes}
    total = sum(c.bytes_out or 0 for c in collectives if _SHARED in c.op.attributes)
    plan: list[Shared] = []
    for collective in collectives:
        if collective.kind != "all_gather" or collective.is_async:
            continue
        op = collective.op
        candidates = firsts.setdefault(_key(collective, forms), [])
        earlier = next((c for c in candidates if _encloses(c.op.block, op)), None)
        if earlier is None:
            candidates.append(collective)
            continue
        held = 0 if earlier.op.results[0] in kept else earlier.bytes_out
        if memory_limit and (held is None or total + held > memory_limit):
            candidates.insert(0, collective)  # may still serve what follows it
            continue
        total += held or 0
        kept.add(earlier.op.results[0])
        plan.append(Shared(earlier.op, op, memory_limit > 0))
    return plan


def _key(collective: Collective, forms: GroupForms) -> object:
    """What two all_gathers that give the same have in common."""
    groups = forms.groups(collective)
    return (
        tuple(collective.op.operands),
        tuple(str(result.type) for result in collective.op.results),
        ir.IntegerAttr(collective.op.attributes["all_gather_dim"]).value,
        None if groups is None else frozenset(groups),
    )


def _encloses(block: ir.Block, op: ir.Operation) -> bool:
    """Whether an op stands in a block, or in a region of an op there."""
    current: ir.Operation | None = op
    while current is not None and current.name != "builtin.module":
        if current.block == block:
            return True
        current = current.parent
    return False
