"""Process groups as the attributes of ops: in mesh axes where the original has them, else dense."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    GroupMode,
    ProcessGroups,
    exchange_group_mode,
    mesh_axes_groups,
    permute_groups,
    process_groups,
)
from stablehlo_tools.bindings import ir

_MOST_AXES = 5  # whose subsets are tried in every order


class GroupForms:
    """Reads and writes the groups of one module's collectives; each attribute is read once."""

    def __init__(self, facts: ModuleFacts) -> None:
        self.facts = facts
        self.known: dict[tuple[ir.Attribute | None, GroupMode | None], ProcessGroups | None] = {}

    def groups(self, collective: Collective) -> ProcessGroups | None:
        """The process groups. Raises a located ToolError where the module has no such processes."""
        key = (collective.group_attribute("replica_groups"), collective.group_mode)
        if key[0] is None:
            return None
        if key not in self.known:
            self.known[key] = self.facts.groups(collective)
        return self.known[key]

    def express(self, groups: ProcessGroups, like: Collective) -> ir.Attribute | None:
        """The groups as an attribute for an op with the channel of `like`; None where it has none.

        The order of the groups does not matter, that of their members does.
        """
        original = like.group_attribute("replica_groups")
        mode = like.group_mode
        if original is None or mode is None:
            return None
        wanted = frozenset(groups)
        if frozenset(self.groups(like) or ()) == wanted:
            return original
        for attribute, formed in self._by_axes(original, mode, len(groups[0])):
            if frozenset(formed) == wanted:
                return attribute
        rows = self._rows(groups, mode)
        if not rows or frozenset(process_groups(rows, mode, self.facts.grid)) != wanted:
            return None
        return _table(rows)

    def express_pairs(self, pairs: ProcessGroups, like: Collective) -> ir.Attribute | None:
        """(source, target) pairs for a collective_permute with the channel of `like`."""
        mode = exchange_group_mode(like.channel_id)
        width = self.facts.grid.num_partitions
        if mode is GroupMode.CROSS_PARTITION:
            rows = [pair for pair in pairs if pair[0] < width]
        else:
            rows = [tuple(d // width for d in pair) for pair in pairs if pair[0] % width == 0]
        try:
            formed = permute_groups(rows, mode, self.facts.grid)
        except ValueError:  # a pair that crosses what the mode keeps apart
            return None
        return _table(rows) if frozenset(formed) == frozenset(pairs) else None

    def _by_axes(
        self, original: ir.Attribute, mode: GroupMode, size: int
    ) -> Iterator[tuple[ir.Attribute, ProcessGroups]]:
        """Groups of the wanted size over some of the original's axes, in any order."""
        if not bindings.ReplicaGroupMeshAxesAttr.isinstance(original):
            return
        by_axes = bindings.ReplicaGroupMeshAxesAttr(original)
        if not isinstance(by_axes.mesh, ir.FlatSymbolRefAttr):
            return
        axes = list(ir.ArrayAttr(by_axes.axes))
        mesh = self.facts.meshes[by_axes.mesh.value]
        if len(axes) > _MOST_AXES:
            return
        for count in range(1, len(axes) + 1):
            for chosen in itertools.permutations(axes, count):
                formed = mesh_axes_groups(mesh, [_axis_ref(axis) for axis in chosen])
                if len(formed[0]) != size:
                    continue
                text = ", ".join(str(axis) for axis in chosen)
                attribute = ir.Attribute.parse(
                    f"#stablehlo.replica_group_mesh_axes<mesh = {by_axes.mesh}, axes = [{text}]>",
                    original.context,
                )
                yield attribute, process_groups(formed, mode, self.facts.grid)

    def _rows(self, groups: ProcessGroups, mode: GroupMode) -> list[tuple[int, ...]]:
        width = self.facts.grid.num_partitions
        if mode is GroupMode.FLATTENED_IDS:
            return list(groups)
        if mode is GroupMode.CROSS_REPLICA:
            return [tuple(d // width for d in group) for group in groups if group[0] % width == 0]
        return []


def _axis_ref(attribute: ir.Attribute) -> AxisRef:
    axis = bindings.StablehloAxisRefAttr(attribute)
    split = re.search(r"\((\d+)\)(\d+)", str(axis.sub_axis_info or ""))
    return AxisRef(axis.name, *(int(part) for part in split.groups()) if split else ())


def _table(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    return ir.DenseElementsAttr.get(np.array(rows, dtype=np.int64))
