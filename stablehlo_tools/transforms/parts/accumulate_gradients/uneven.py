"""Shardings of the batch that microbatches are too small for.

A constraint to divide 2 samples over 4 devices says nothing that a partitioner can do well, and
XLA's gets values wrong in a loop over such; it is left as far as it divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd

from stablehlo_tools import bindings
from stablehlo_tools.analysis.dimension_propagation.graph import Node
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import sharding_axes
from stablehlo_tools.analysis.tensor_shardings import (
    Axes,
    MeshAxes,
    axes_in,
    axis_text,
    function_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Severity, to_place
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.accumulate_gradients.division import Division

_CONSTRAINT = "sdy.sharding_constraint"
Meshes = Mapping[str, DeviceMesh]


def relax_constraints(division: Division, written: Mapping[int, ir.Value], meshes: Meshes) -> None:
    """Lets the constraints of a loop that was written divide microbatches as far as they can be.

    `written` is what stands for each value, by number.
    """
    for node in _all(division.inside):
        layout = division.dims.tilings.get(node.results[0]) if node.results else None
        if node.name == _CONSTRAINT and layout is not None:
            _relax(maker_of(written[node.results[0]]), layout, meshes)


def uneven_arguments(division: Division, meshes: Meshes) -> Iterator[Diagnostic]:
    """A warning for each argument of the program that is divided over more devices than divide the
    samples of a microbatch."""
    graph = division.dims.graph
    function = graph.root.block.owner.operation
    if function.name != FUNCTION:
        return
    for number, layout in sorted(division.trial.seeds.items()):
        place = graph.root.arguments.index(number)
        sharding = function_sharding(function, "arg_attrs", place)
        if sharding is None or sharding_axes(sharding)[0] not in meshes:
            continue
        axes = MeshAxes(meshes[sharding_axes(sharding)[0]])
        devices = axes.size(_dimensions(sharding)[layout.dim][0])
        samples = shape_of(graph.values[number])[layout.dim] // division.dims.parts
        if samples % devices:
            yield Diagnostic(
                Severity.WARNING,
                f"accumulate-gradients: argument {place} is divided over {devices} devices along "
                f"the batch, and a microbatch has {samples} samples: several devices will compute "
                "the same; take fewer microbatches",
                to_place(function.location),
            )


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for body in node.bodies:
            yield from _all(body.nodes)


def _relax(op: ir.Operation, layout: DimTiling, meshes: Meshes) -> None:
    sharding = op.attributes["sharding"]
    mesh_name = sharding_axes(sharding)[0]
    if mesh_name not in meshes:
        return
    mesh, dims = MeshAxes(meshes[mesh_name]), _dimensions(sharding)
    axes, is_open = dims[layout.dim]
    samples, devices = shape_of(op.results[0])[layout.dim], mesh.size(axes)
    if samples % devices == 0:
        return
    kept = mesh.split(axes, gcd(samples, devices))
    dims[layout.dim] = (kept[0] if kept is not None else ()), is_open
    listed = ", ".join(
        "{" + ", ".join([*map(axis_text, each), *(["?"] if rest else [])]) + "}"
        for each, rest in dims
    )
    op.attributes["sharding"] = ir.Attribute.parse(
        f"#sdy.sharding<@{mesh_name}, [{listed}]>", op.context
    )


def _dimensions(sharding: ir.Attribute) -> list[tuple[Axes, bool]]:
    """The axes that divide each dimension, and whether others may."""
    found: list[tuple[Axes, bool]] = []
    for attribute in bindings.TensorShardingAttr(sharding).dimension_shardings:
        dim = bindings.SdyDimensionShardingAttr(attribute)
        found.append((axes_in(str(dim)), not dim.is_closed))
    return found
