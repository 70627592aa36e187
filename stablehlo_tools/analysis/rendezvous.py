"""Describes a collective as its participants see it: what must match, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.communication_kinds import DIMENSIONS, RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.custom_calls import stays_on_device, target_of
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names
from stablehlo_tools.order.program import (
    UNKNOWN_CALL,
    CollectiveSignature,
    Rendezvous,
    connected_components,
)

_GROUPED = short_names(ops_with(Trait.GROUPED)) | {RAGGED_ALL_TO_ALL}
_CALLED = frozenset({"custom_call", UNKNOWN_CALL})
TRANSFER = "transfer"  # the kind that a send and its recv share


class Rendezvousing:
    """Reads the collectives of one module that some devices run; equal attributes are read once."""

    def __init__(
        self, facts: ModuleFacts, devices: Sequence[int], *, by_channel: bool = False
    ) -> None:
        self.facts = facts
        self.mine = frozenset(devices)
        self.by_channel = by_channel  # if True, the pairs of a send or recv are ignored
        self.groups: dict[tuple[object, ...], tuple[Rendezvous, ...]] = {}
        self.whole: dict[object, tuple[tuple[int, ...], ...]] = {}
        self.texts: dict[ir.Type | ir.Attribute, str] = {}
        self.signatures: dict[CollectiveSignature, CollectiveSignature] = {}
        self.everyone = tuple(range(facts.grid.size))

    def signature(self, collective: Collective) -> CollectiveSignature:
        """Returns the form that all participants must share; equal ones are one object."""
        inner = collective.inner
        if collective.kind in ("send", "recv"):
            tensors = inner.operands if collective.kind == "send" else inner.results
            types = tuple(str(v.type) for v in tensors if isinstance(v.type, ir.RankedTensorType))
            signature = CollectiveSignature(TRANSFER, types, f"channel {collective.channel_id}")
        else:
            types = (
                ", ".join(self._text(value.type) for value in inner.operands),
                "-> " + ", ".join(self._text(value.type) for value in inner.results),
            )
            signature = CollectiveSignature(collective.kind, types, self._details(collective))
        return self.signatures.setdefault(signature, signature)

    def rendezvous(self, collective: Collective) -> tuple[Rendezvous, ...]:
        """Returns the groups, with our devices, whose members wait for each other.

        Empty for a collective that stays on its device. All devices take part in a
        collective_permute, whatever its pairs, because XLA:CPU waits for all. A custom call that
        may communicate is assumed to do so with all devices.
        """
        kind = collective.kind
        if kind in _GROUPED or kind == "collective_permute":
            groups = collective.group_attribute("replica_groups")
            key = (collective.kind, groups, collective.group_mode)
            if key not in self.groups:
                members = self.facts.groups(collective) or ()  # raises for devices outside the grid
                if kind == "collective_permute":
                    table = np.arange(self.facts.grid.size).reshape(
                        -1, self.facts.grid.num_partitions
                    )
                    is_partitioned = collective.group_mode is GroupMode.CROSS_PARTITION
                    members = list(map(tuple, (table if is_partitioned else table.T).tolist()))
                meetings = [Rendezvous(group, group) for group in members if group]
                self.groups[key] = self._ours(meetings)
            return self.groups[key]
        if kind in ("send", "recv"):
            end = 0 if collective.kind == "send" else 1
            return self._ours([Rendezvous(p, (p[end],)) for p in self.groups_of_all(collective)])
        if kind in _CALLED and not stays_on_device(collective.inner):
            return self._ours([Rendezvous(self.everyone, self.everyone)])
        return ()

    def groups_of_all(self, collective: Collective) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of a collective, whichever programs run them; none if unknown.

        For a transfer between devices these are its pairs, for a permute its connected components.
        """
        is_permute = collective.kind == "collective_permute"
        if collective.kind in ("send", "recv", "collective_permute"):
            if not is_permute and (self.by_channel or is_host_transfer(collective)):
                return ()
            groups = collective.inner.attributes.get("source_target_pairs")
        elif collective.kind in _GROUPED:
            groups = collective.group_attribute("replica_groups")
        else:
            return ()
        key = is_permute, groups, collective.group_mode
        if key not in self.whole:
            listed = self.facts.groups(collective) or ()
            self.whole[key] = tuple(
                connected_components(listed, self.everyone) if is_permute else listed
            )
        return self.whole[key]

    def _ours(self, meetings: Sequence[Rendezvous]) -> tuple[Rendezvous, ...]:
        return tuple(m for m in meetings if not self.mine.isdisjoint(m.issuers))

    def _details(self, collective: Collective) -> str:
        inner, parts = collective.inner, list[str]()
        for name in DIMENSIONS.get(collective.kind, ()):
            parts.append(f"{name} {ir.IntegerAttr(inner.attributes[name]).value}")
        reduction = collective.reduction
        if reduction == "custom":
            reduction = (
                f"reduction {_region_text(inner.regions[0])}" if len(inner.regions) else None
            )
        if reduction is not None:
            parts.append(reduction)
        if collective.kind == "collective_permute":
            pairs = collective.inner.attributes["source_target_pairs"]
            if pairs not in self.texts:
                self.texts[pairs] = f"pairs {sorted(self.facts.groups(collective) or ())}"
            parts.append(self.texts[pairs])
        if collective.kind in _CALLED:
            parts.append(target_of(inner))
        return ", ".join(parts)

    def _text(self, type_: ir.Type) -> str:
        if type_ not in self.texts:
            self.texts[type_] = str(type_)
        return self.texts[type_]


def _region_text(region: ir.Region) -> str:
    """Returns the text of a reduction without a name: its ops, with values numbered in order."""
    (block,) = region.blocks
    numbers: dict[ir.Value, int] = {value: i for i, value in enumerate(block.arguments)}
    told: list[str] = []
    for view in block.operations:
        op = view.operation
        operands = [str(numbers.get(value, value)) for value in op.operands]
        attributes = [f"{name}={attribute}" for name, attribute in sorted(op.attributes.items())]
        inside = [_region_text(inner) for inner in op.regions]
        told.append(f"{op.name}({', '.join([*operands, *attributes, *inside])})")
        for result in op.results:
            numbers[result] = len(numbers)
    return f"{{{'; '.join(told)}}}"


def is_host_transfer(collective: Collective) -> bool:
    """Returns True if a send or recv talks to the device's host."""
    flag = collective.inner.attributes.get("is_host_transfer")
    return flag is not None and ir.BoolAttr(flag).value
