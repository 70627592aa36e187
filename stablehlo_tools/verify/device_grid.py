"""The devices of a module without an `Exported`, and the inputs that they share.

Devices at one position of the axes that shard an argument hold the same part of it. Without a
sharding, an integer scalar is the same on all devices: it counts trips, steps or positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives, unnumbered_replicas
from stablehlo_tools.analysis.entry import attributes_of_arguments
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    ProcessGrid,
    mesh_axes_groups,
)
from stablehlo_tools.analysis.shardings import sharding_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import FUNCTION, entry_function
from stablehlo_tools.verify.element_types import element_type
from stablehlo_tools.verify.signatures import SignatureValue

_SHARDINGS = ("sdy.sharding", "mhlo.sharding", "sdy.sharding_per_value")
_SHARDING_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def inferred_grid(module: ir.Module) -> ProcessGrid:
    """Returns the smallest grid with all devices of a module's collectives and meshes.

    A collective among "every replica" (no groups) implies no number. Then the grid has two
    replicas, the fewest that exchange data. Raises ToolError if the module has ids of replicas and
    of partitions: the division of devices into replicas and partitions is then unknown.
    """
    facts = ModuleFacts.from_module(module)
    grid = facts.grid
    if grid.num_replicas > 1 and grid.num_partitions > 1:
        raise ToolError(
            "the module states neither mhlo.num_replicas nor mhlo.num_partitions, but its "
            "collectives count both replicas and partitions: set both attributes",
            module.operation.location,
        )
    partitions = max([grid.num_partitions, *(mesh.size for mesh in facts.meshes.values())])
    if grid.num_replicas == 1 and partitions == 1:
        return ProcessGrid(unnumbered_replicas(find_collectives(module)), 1)
    return ProcessGrid(grid.num_replicas, partitions)


def is_partitioned(module: ir.Module) -> bool:
    """Returns True if the module has shardings; if not, it is the program of each device."""
    partitioned = False

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal partitioned
        partitioned = partitioned or _states_sharding(op)
        return ir.WalkResult.INTERRUPT if partitioned else ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return partitioned


def _states_sharding(op: ir.Operation) -> bool:
    if op.name.startswith("sdy.") and op.name != "sdy.mesh":
        return True
    attributes = op.attributes
    if any(name in attributes for name in _SHARDINGS):
        return True
    if op.name == "stablehlo.custom_call":
        return ir.StringAttr(attributes["call_target_name"]).value in _SHARDING_CALLS
    if op.name != FUNCTION:
        return False
    return any(
        name in ir.DictAttr(entry)
        for which in ("arg_attrs", "res_attrs")
        if which in attributes
        for entry in ir.ArrayAttr(attributes[which])
        for name in _SHARDINGS
    )


_SAME_REPLICAS = "mhlo.is_same_data_across_replicas"
_SHARDING, _XLA_SHARDING = "sdy.sharding", "mhlo.sharding"


def shared_inputs(
    module: ir.Module, inputs: Sequence[SignatureValue], grid: ProcessGrid, instances: int
) -> tuple[tuple[int, ...], ...]:
    """Returns, for each input and instance, the first instance with the same values of the input.

    Instances are the devices of the grid, in their order, or its replicas.
    """
    meshes = ModuleFacts.from_module(module).meshes
    nothing = [ir.DictAttr.get({}, module.context)] * len(inputs)
    stated = attributes_of_arguments(entry_function(module)) or nothing
    devices = range(0, grid.size, grid.size // instances)
    shared: list[tuple[int, ...]] = []
    for value, attributes in zip(inputs, stated, strict=True):
        keys = [_key(attributes, value, meshes, divmod(d, grid.num_partitions)) for d in devices]
        shared.append(tuple(keys.index(key) for key in keys))
    return tuple(shared)


def _key(
    attributes: ir.DictAttr,
    value: SignatureValue,
    meshes: Mapping[str, DeviceMesh],
    device: tuple[int, int],
) -> tuple[int, int]:
    """Returns a key that is equal for devices with the same values of an input."""
    replica, partition = device
    element = element_type(value.element)
    if not value.shape and element is not None and not element.is_inexact:
        return 0, 0
    if _SAME_REPLICAS in attributes:
        replica = 0
    if _SHARDING in attributes:
        return replica, _position(attributes[_SHARDING], meshes, partition)
    if _XLA_SHARDING in attributes and str(attributes[_XLA_SHARDING]) == '"{replicated}"':
        return replica, 0
    return replica, partition


def _position(sharding: ir.Attribute, meshes: Mapping[str, DeviceMesh], partition: int) -> int:
    """Returns the first device at the same position of the axes that shard a value."""
    name, axes = sharding_axes(sharding)
    if not axes:
        return 0
    mesh = meshes.get(name)
    if mesh is None:  # written in line
        return partition
    others = [AxisRef(axis) for axis, _ in mesh.axes if axis not in axes]
    groups = mesh_axes_groups(mesh, others) if others else ()
    return next((min(group) for group in groups if partition in group), partition)
