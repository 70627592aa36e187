"""A predicate that tells a device whether its id is one of a few that are known beforehand.

It is one comparison where the ids are one, or the first ones; else a lookup in a table, whose last
entry, of no id in the set, is what `dynamic_slice` gives to all ids behind it:

    %id = stablehlo.partition_id                          // ids 0 and 2
    %in = stablehlo.dynamic_slice [true, false, true, false], %id
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.replica_groups import AxisRef, GroupMode, mesh_axes_groups
from stablehlo_tools.analysis.shardings import (
    FreeAxes,
    manual_axes,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder


class Membership:
    """Writes such predicates in front of a module's permutes."""

    def __init__(self, module: ir.Module, facts: ModuleFacts) -> None:
        self._facts = facts
        self._free = FreeAxes(module, facts.meshes)

    def check(self, permute: Collective, ids: Set[int], precondition: str) -> None:
        """Raises a located ToolError where no predicate of these ids can stand beside a permute.

        A value inside a manual computation is one for all devices that differ along the axes which
        are left free, so that a predicate has to be too.
        """
        if not ids or not self._free.around(permute.op):
            return
        around = _manual_around(permute.op)
        if not around:
            raise ToolError(
                f"{permute.inner.name} has a cycle and stands in a function of a module whose "
                "manual computations leave mesh axes free: inline the calls first "
                f"({precondition})",
                permute.op.location,
            )
        mesh, free = self._free_axes(around)
        for group in mesh_axes_groups(self._facts.meshes[mesh], [AxisRef(n) for n in free]):
            if len({i in ids for i in group}) > 1:
                raise ToolError(
                    f"{permute.inner.name}: its cycle would be cut for some of the devices "
                    f"{', '.join(map(str, group))} and not for others, and the mesh axes that they "
                    f"differ along, {', '.join(free)}, are left free around it ({precondition})",
                    permute.op.location,
                )

    def predicate(self, permute: Collective, ids: Set[int]) -> ir.Value:
        """Whether the device's id, as the permute counts them, is one of `ids`."""
        build = Builder(ir.InsertionPoint(permute.op), permute.op.location)
        is_replica = permute.group_mode is GroupMode.CROSS_REPLICA
        if is_replica or not self._free.around(permute.op):
            return _contains(build, "replica_id" if is_replica else "partition_id", ids)
        mesh, free = self._free_axes(_manual_around(permute.op))
        return _in_manual_computation(permute.op, mesh, free, ids)

    def _free_axes(self, around: list[ir.Operation]) -> tuple[str, list[str]]:
        """The mesh of the manual computations, and its axes that none of them takes."""
        taken = {axis for op in around for axis in manual_axes(op)}
        mesh = _mesh_name(around)
        return mesh, [name for name, _ in self._facts.meshes[mesh].axes if name not in taken]


def _manual_around(op: ir.Operation) -> list[ir.Operation]:
    computations: list[ir.Operation] = []
    parent = op.parent
    while parent is not None:
        if parent.name == MANUAL_COMPUTATION:
            computations.append(parent)
        parent = parent.parent
    return computations


def _mesh_name(around: list[ir.Operation]) -> str:
    for op in around:
        for name in ("in_shardings", "out_shardings"):
            for sharding in sharding_per_value(op.attributes[name]):
                if sharding_axes(sharding)[0]:
                    return sharding_axes(sharding)[0]
    raise ToolError(
        "sdy.manual_computation names no mesh of the module, which a cycle inside of it needs to "
        "be broken",
        around[0].location,
    )


def _in_manual_computation(op: ir.Operation, mesh: str, axes: list[str], ids: Set[int]) -> ir.Value:
    """The predicate out of a computation over the axes left free: only there is an id a scalar."""
    sharding = ir.Attribute.parse(f"#sdy.sharding<@{mesh}, []>", op.context)
    one_bit = ir.IntegerType.get_signless(1, op.context)
    boolean = ir.RankedTensorType.get([], one_bit, loc=op.location)
    build = Builder(ir.InsertionPoint(op), op.location)
    manual = build.manual_computation([], [boolean], ([], [sharding]), axes)
    inside = Builder(ir.InsertionPoint(manual.regions[0].blocks.append()), op.location)
    inside.create("sdy.return", [_contains(inside, "partition_id", ids)], [])
    return manual.results[0]


def _contains(build: Builder, id_op: str, ids: Set[int]) -> ir.Value:
    unsigned = ir.IntegerType.get_unsigned(32, build.context)
    own = build.op(id_op, [], build.tensor([], unsigned))
    if len(ids) == 1:
        return build.compare("EQ", own, build.splat(min(ids), [], unsigned))
    if ids == set(range(len(ids))):
        return build.compare("LT", own, build.splat(len(ids), [], unsigned))
    with build.context:
        table = ir.DenseElementsAttr.get(np.array([i in ids for i in range(max(ids) + 2)]))
    row = build.dynamic_slice(build.op("constant", [], table.type, value=table), [own], [1])
    return build.reshape(row, [])
