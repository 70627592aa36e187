"""Which devices are given the same values of an input, where each is given values of its own.

Devices at one position of the axes that shard an argument hold the same of it. Where no sharding is
stated, an integer scalar is the same everywhere: it counts trips, steps or positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    ProcessGrid,
    mesh_axes_groups,
)
from stablehlo_tools.analysis.shardings import sharding_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.element_types import element_type
from stablehlo_tools.verify.signatures import Value

_SAME_REPLICAS = "mhlo.is_same_data_across_replicas"
_SHARDING, _XLA_SHARDING = "sdy.sharding", "mhlo.sharding"


def shared_inputs(
    module: ir.Module, inputs: Sequence[Value], grid: ProcessGrid, instances: int
) -> tuple[tuple[int, ...], ...]:
    """For each input, and for each instance, the first instance that has the same values of it.

    Instances are the devices of the grid, in their order, or its replicas.
    """
    meshes = ModuleFacts.of(module).meshes
    stated = _stated(module, len(inputs))
    devices = range(0, grid.size, grid.size // instances)
    shared: list[tuple[int, ...]] = []
    for value, attributes in zip(inputs, stated, strict=True):
        keys = [_key(attributes, value, meshes, divmod(d, grid.num_partitions)) for d in devices]
        shared.append(tuple(keys.index(key) for key in keys))
    return tuple(shared)


def _stated(module: ir.Module, count: int) -> list[Mapping[str, ir.Attribute]]:
    main = entry_function(module)
    if "arg_attrs" not in main.attributes:
        return [{}] * count
    listed = [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes["arg_attrs"])]
    return [{entry.name: entry.attr for entry in each} for each in listed]


def _key(
    attributes: Mapping[str, ir.Attribute],
    value: Value,
    meshes: Mapping[str, DeviceMesh],
    device: tuple[int, int],
) -> tuple[int, int]:
    """Equal for devices that are given the same values."""
    replica, partition = device
    element = element_type(value.element)
    if not value.shape and element is not None and not element.is_inexact:
        return 0, 0
    if _SAME_REPLICAS in attributes:
        replica = 0
    if _SHARDING in attributes:
        return replica, _position(attributes[_SHARDING], meshes, partition)
    if str(attributes.get(_XLA_SHARDING)) == '"{replicated}"':
        return replica, 0
    return replica, partition


def _position(sharding: ir.Attribute, meshes: Mapping[str, DeviceMesh], partition: int) -> int:
    """The first device that is at the same position of the axes that shard a value."""
    name, axes = sharding_axes(sharding)
    if not axes:
        return 0
    mesh = meshes.get(name)
    if mesh is None:  # written in line
        return partition
    others = [AxisRef(axis) for axis, _ in mesh.axes if axis not in axes]
    groups = mesh_axes_groups(mesh, others) if others else ()
    return next((min(group) for group in groups if partition in group), partition)
