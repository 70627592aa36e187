"""Removes the mesh axis that ranks are laid along: each rank is then a mesh of the other axes.

    sdy.mesh @mesh = <["stage"=4, "data"=2]>
    %w {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {"data"}]>}
==> for each of four ranks
    sdy.mesh @mesh = <["data"=2]>
    %w {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>}

A program with shardings alone computes the same values under any division. Collectives of layers in
a manual computation over other axes get the numbers of a rank's devices. Other code for single
devices is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    find_collectives,
    meshes_of,
)
from stablehlo_tools.analysis.replica_groups import STAGE_AXES, AxisRef, mesh_axes_groups, mesh_with
from stablehlo_tools.analysis.shardings import MeshAxes, drop_axis, manual_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, PARTITION_ID
from stablehlo_tools.ir.builder import device_table
from stablehlo_tools.ir.shardy_round_trip import set_entry
from stablehlo_tools.ir.walk import (
    MESH,
    enclosing,
    entry_function,
    ops_named,
    ops_where,
    symbol_name,
)
from stablehlo_tools.transforms.expand_pipeline import free_layers

_PARTITIONS = "mhlo.num_partitions"


def ranks_along(module: ir.Module, axis: str) -> int:
    """Returns the number of ranks along an axis. Raises ToolError if no mesh has it."""
    meshes = meshes_of(module)
    place = entry_function(module).location
    asks = "expand-mpmd: pipeline-axis"
    named = mesh_with(axis, meshes, asks, " (P8)", place, for_stages=True)
    return dict(meshes[named].axes)[axis]


def usual_axis(module: ir.Module, ranks: int) -> str:
    """Returns the axis of size `ranks` with a name for stages; "" if there is none."""
    axes = [axis for mesh in meshes_of(module).values() for axis in mesh.axes]
    return next((name for name, size in axes if size == ranks and name.lower() in STAGE_AXES), "")


def lay_along(module: ir.Module, axis: str, ranks: int) -> None:
    """Removes the axis from the meshes and shardings of a program, in place.

    Raises a located ToolError if the axis has another number of devices than there are ranks, or
    if the program has code for single devices.
    """
    free_layers(module, axis, "expand-mpmd", "P8")
    size = ranks_along(module, axis)
    place = entry_function(module).location
    if size != ranks:
        raise ToolError(
            f"expand-mpmd: the mesh has {size} devices along {axis!r}, but there are {ranks} "
            "ranks (P8)",
            place,
            instead=(f"ranks={ranks}", f"ranks={size}"),
        )
    computations = ops_named(module.operation, {MANUAL_COMPUTATION})
    of_devices = [op for op in computations if axis in manual_axes(op)]
    of_devices += ops_named(module.operation, {PARTITION_ID})
    renumbered = [(c, _groups_of_rank(module, c, axis)) for c in find_collectives(module)]
    of_devices += [collective.op for collective, groups in renumbered if groups is None]
    if of_devices:
        single = of_devices[0]
        raise ToolError(
            f"expand-mpmd: {single.name} is written for the devices of the whole mesh, so "
            f"{axis!r} cannot be removed from it (P8): use the program before partitioning, or "
            "run fold-pipeline first on a hand-written pipeline",
            single.location,
        )
    for collective, groups in renumbered:
        name = (
            "source_target_pairs" if collective.kind == "collective_permute" else "replica_groups"
        )
        collective.op.attributes[name] = device_table(groups or (), module.context)
    _take_out(module, axis, size)


def _groups_of_rank(
    module: ir.Module, collective: Collective, axis: str
) -> Sequence[Sequence[int]] | None:
    """Returns the groups of a collective of a layer (its pairs, for a permute) by the numbers of
    the devices of one rank; None if they are of devices of the whole mesh."""
    around = enclosing(collective.op, MANUAL_COMPUTATION)
    facts = ModuleFacts.from_module(module)
    groups = facts.groups(collective)
    mesh = next(each for each in facts.meshes.values() if axis in dict(each.axes))
    if around is None or groups is None or collective.op != collective.inner:
        return None
    place = MeshAxes(mesh).positions((AxisRef(axis),))
    if any(len({int(place[device]) for device in group}) > 1 for group in groups):
        return None
    # Devices of one rank keep their order, without those at other places along the axis.
    along = mesh_axes_groups(mesh, [AxisRef(axis)])
    number = {group[0]: place for place, group in enumerate(along)}
    return [[number[device] for device in group] for group in groups if group[0] in number]


def _take_out(module: ir.Module, axis: str, size: int) -> None:
    for op in ops_named(module.operation, {MESH}):
        mesh = meshes_of(module)[symbol_name(op)]
        if math.prod(count for _, count in mesh.axes) % size or axis not in dict(mesh.axes):
            continue
        others = ", ".join(f'"{name}"={count}' for name, count in mesh.axes if name != axis)
        for name in [name for name in op.attributes if name != "sym_name"]:
            del op.attributes[name]
        op.attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{others}]>", op.context)
    for op in ops_where(module.operation, lambda op: op.name != MESH):
        for name in list(op.attributes):
            if name in ("arg_attrs", "res_attrs"):
                for number, entry in enumerate(list(ir.ArrayAttr(op.attributes[name]))):
                    for named in ir.DictAttr(entry):
                        if _names(named.attr, axis):
                            set_entry(op, name, number, named.name, drop_axis(named.attr, axis))
            elif _names(op.attributes[name], axis):
                op.attributes[name] = drop_axis(op.attributes[name], axis)
    count = ir.IntegerAttr(module.operation.attributes[_PARTITIONS])
    module.operation.attributes[_PARTITIONS] = ir.IntegerAttr.get(count.type, count.value // size)


def _names(attribute: ir.Attribute, axis: str) -> bool:
    text = str(attribute)
    return text.startswith("#sdy.") and f'"{axis}"' in text
