"""Which mesh axes Shardy's attributes name."""

from __future__ import annotations

import re

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir


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
