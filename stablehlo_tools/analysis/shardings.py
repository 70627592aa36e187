"""Shardings in attributes: the mesh axes they name, and those a manual computation leaves free."""

from __future__ import annotations

import re
from functools import cached_property

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import ops_named


def sharding_axes(attribute: ir.Attribute) -> tuple[str, tuple[str, ...]]:
    """The mesh of a tensor's sharding (empty for one written in line), and the axes that shard it.

    A sub-axis counts as its axis.
    """
    sharding = bindings.TensorShardingAttr(attribute)
    mesh = sharding.mesh_or_ref
    name = mesh.value if isinstance(mesh, ir.FlatSymbolRefAttr) else ""
    axes = [
        bindings.SdyAxisRefAttr(axis).name
        for dimension in sharding.dimension_shardings
        for axis in bindings.SdyDimensionShardingAttr(dimension).axes
    ]
    return name, tuple(dict.fromkeys(axes))


def sharding_per_value(attribute: ir.Attribute) -> list[ir.Attribute]:
    """The shardings of a list of values, as `in_shardings` holds them."""
    return list(bindings.TensorShardingPerValueAttr(attribute).shardings)


def manual_axes(computation: ir.Operation) -> frozenset[str]:
    """The axes over which a manual computation is divided by hand."""
    return frozenset(re.findall(r'"([^"]*)"', str(computation.attributes["manual_axes"])))


class FreeAxes:
    """Tells of an op whether axes are free around it."""

    def __init__(self, module: ir.Module, meshes: dict[str, DeviceMesh]) -> None:
        self._module = module
        self._meshes = meshes

    def around(self, op: ir.Operation) -> bool:
        """Whether a mesh axis of several devices may be free around an op.

        Of an op in no manual computation, a function's that one may call, all of them are asked.
        """
        manual: set[str] = set()
        parent = op.parent
        while parent is not None:
            if parent.name == MANUAL_COMPUTATION:
                manual |= manual_axes(parent)
            parent = parent.parent
        return self._leaves_free(manual) if manual else self._anywhere

    @cached_property
    def manual_computations(self) -> list[ir.Operation]:
        """Those of the module."""
        return ops_named(self._module.operation, {MANUAL_COMPUTATION})

    @cached_property
    def _anywhere(self) -> bool:
        return any(self._leaves_free(set(manual_axes(op))) for op in self.manual_computations)

    def _leaves_free(self, manual: set[str]) -> bool:
        meshes = [mesh for mesh in self._meshes.values() if manual & {n for n, _ in mesh.axes}]
        free = [n for mesh in meshes for n, size in mesh.axes if size > 1 and n not in manual]
        return not meshes or bool(free)
