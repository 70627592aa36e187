"""What stands beside a collective and may make a compiler issue another in its place, or none.

Seen of XLA's compilers for CPU, GPU and TPU, on one or more of them:

- an all_reduce, all_gather, reduce_scatter or all_to_all of a constant is deleted;
- an all_reduce over replicas is deleted where all of them have the same value already;
- an all_gather of which each device takes its own part is deleted, and an all_reduce becomes a
  reduce_scatter;
- a collective whose results are used only by what folds (`x * 0` of integers) is deleted;
- a conversion changes sides, and elements of another type are exchanged;
- an all_reduce of an all_reduce becomes one of larger groups.

Where one program has it and another has not, the two do not meet. Barriers keep all of that away,
and so do token chains, but for the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_async_done
from stablehlo_tools.dialect.names import ALL_GATHER, ALL_REDUCE, BARRIER, CONVERT, DYNAMIC_SLICE
from stablehlo_tools.dialect.traits import (
    COLLECTIVES,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
    short_names,
)
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import producer

_ALIKE = frozenset({ALL_REDUCE, "stablehlo.all_gather"})  # within each group
_UNLIKE = (
    ops_with_any(
        Trait.COLLECTIVE | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.DEVICE_ID | Trait.OPAQUE
    )
    | full_names("async_done infeed recv")
) - {ALL_GATHER, ALL_REDUCE, *full_names("cross-replica-sum")}
# Deleted where they are of a constant; no compiler was seen to do so with a collective_broadcast.
_COMPUTED = short_names(COLLECTIVES & ops_with(Trait.GROUPED)) - {"collective_broadcast"}
_PARTED = frozenset({"all_gather", "all_reduce"})


class Surroundings:
    """Tells what stands beside the collectives of one module."""

    def __init__(self, folded: Sequence[Collective]) -> None:
        self.folded = {collective.op.results[0] for collective in folded}
        self.alike: dict[ir.Attribute | None, dict[ir.Value, bool]] = {}

    def of(self, collective: Collective) -> str:
        """What may be rewritten with the collective: nothing where empty, alike where equal."""
        op = collective.op
        tensors = [v for v in op.operands if isinstance(v.type, ir.RankedTensorType)]
        hazards = [self._before(collective, value) for value in tensors]
        hazards += [_after(collective.kind, value) for value in op.results]
        if len(op.results) and op.results[0] in self.folded:
            hazards.append("used only by what is folded away")
        return ", ".join(dict.fromkeys(part for part in hazards if part))

    def is_of_what_all_have(self, collective: Collective) -> bool:
        """Whether each participant has what the others send: a constant, or what is made of one."""
        sent = collective.op.operands
        tensors = [v for v in sent if isinstance(v.type, ir.RankedTensorType)]
        return all(self._is_alike(value, None) for value in tensors)

    def _before(self, collective: Collective, value: ir.Value) -> str:
        kind, maker = collective.kind, producer(value)
        if maker is None:
            return ""
        over_replicas = kind == "all_reduce" and collective.group_mode is GroupMode.CROSS_REPLICA
        groups = collective.group_attribute("replica_groups") if over_replicas else None
        is_free = kind in _COMPUTED and maker.name != BARRIER
        if (is_free or over_replicas) and self._is_alike(value, groups):
            if is_free and (groups is None or self._is_alike(value, None)):
                return "of a constant"
            return "of what all replicas have alike"
        if maker.name == CONVERT:
            return f"of what is converted from {element_of(maker.operands[0])}"
        is_alone = kind == "all_reduce" and maker.name == ALL_REDUCE and _user(value) is not None
        return "of an all_reduce" if is_alone else ""

    def _is_alike(self, value: ir.Value, groups: ir.Attribute | None) -> bool:
        """Whether all of a group have the same value; without groups, whether it is a constant."""
        known = self.alike.setdefault(groups, {})
        pending = [value]
        while pending:
            needed = None if pending[-1] in known else _computed_from(pending[-1], groups)
            if needed is not None and all(known.get(operand, True) for operand in needed):
                following = next((operand for operand in needed if operand not in known), None)
                if following is not None:
                    pending.append(following)
                    continue
                known[pending[-1]] = True
            known.setdefault(pending.pop(), False)
        return known[value]


def _computed_from(value: ir.Value, groups: ir.Attribute | None) -> list[ir.Value] | None:
    """What all of a group must have alike for the value to be; None where that is not enough."""
    maker = producer(value)
    if maker is None or maker.name in _UNLIKE:
        return None
    if maker.name in _ALIKE:
        return [] if groups is not None and maker.attributes["replica_groups"] == groups else None
    if maker.name == BARRIER:
        return [maker.operands[ir.OpResult(value).result_number]]
    return list(maker.operands)


def _after(kind: str, value: ir.Value) -> str:
    user = _user(value)
    while user is not None and is_async_done(user):
        user = _user(user.results[0])
    if user is None:
        return ""
    if user.name == CONVERT:
        return f"converted to {element_of(user.results[0])}"
    if kind in _PARTED and user.name == DYNAMIC_SLICE:
        return "of which a part is taken"
    return "in an all_reduce" if kind == "all_reduce" and user.name == ALL_REDUCE else ""


def _user(value: ir.Value) -> ir.Operation | None:
    """The only use; None where there is none, or another."""
    uses = [use.owner.operation for use in value.uses]
    return uses[0] if len(uses) == 1 else None
