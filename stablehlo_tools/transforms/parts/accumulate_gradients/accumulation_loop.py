"""Writes the loop over microbatches of a division, and replaces its results in the block.

A partitioner cannot implement a constraint that divides 2 samples over 4 devices well, and XLA's
computes wrong values in a loop with such constraints. So a constraint is relaxed to as many devices
as divide the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from stablehlo_tools.analysis.dataflow import Node, inputs_of, walk_nodes
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import counted_name
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import (
    MeshAxes,
    dimension_axes,
    function_sharding,
    sharding_axes,
    tensor_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Severity, to_place
from stablehlo_tools.dialect.names import CONVOLUTION, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import FUNCTION, terminator
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.transforms.parts.accumulate_gradients.microbatch_division import (
    MicrobatchDivision,
)
from stablehlo_tools.transforms.parts.block_rewriter import part_type
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import wide
from stablehlo_tools.transforms.parts.one_part import OnePartWriter, apart, window

Meshes = Mapping[str, DeviceMesh]


def relax_constraints(
    division: MicrobatchDivision, written: Mapping[int, ir.Value], meshes: Meshes
) -> None:
    """Relaxes the constraints of a written loop to as many devices as divide a microbatch.

    `written` is the copy of each value in the loop, by number.
    """
    for node in walk_nodes(division.inside):
        layout = division.dims.tilings.get(node.results[0]) if node.results else None
        if node.name != SHARDING_CONSTRAINT or layout is None:
            continue
        op = maker_of(written[node.results[0]])
        mesh_name = sharding_axes(op.attributes["sharding"])[0]
        if mesh_name not in meshes:
            continue
        mesh, dims = MeshAxes(meshes[mesh_name]), dimension_axes(op.attributes["sharding"])
        axes, is_open = dims[layout.dim]
        samples, devices = shape_of(op.results[0])[layout.dim], mesh.size(axes)
        if samples % devices:
            kept = mesh.split(axes, gcd(samples, devices))
            dims[layout.dim] = (kept[0] if kept is not None else ()), is_open
            op.attributes["sharding"] = tensor_sharding(mesh_name, dims, op.context)


def devices_along(block: ir.Block, meshes: Meshes, place: int, dim: int) -> int:
    """Returns the number of devices that divide an argument of the program along a dimension.
    Returns 1 if no sharding says so, and in a manual computation, whose arguments are per
    device."""
    function = block.owner.operation
    if function.name != FUNCTION:
        return 1
    sharding = function_sharding(function, "arg_attrs", place)
    if sharding is None or sharding_axes(sharding)[0] not in meshes:
        return 1
    axes = MeshAxes(meshes[sharding_axes(sharding)[0]])
    return axes.size(dimension_axes(sharding)[dim][0])


def uneven_arguments(division: MicrobatchDivision, meshes: Meshes) -> Iterator[Diagnostic]:
    """Yields a warning for each argument of the program whose devices along the batch do not divide
    the samples of a microbatch.

    It is an error, which `partition` settles, if microbatches have gradients of convolutions: XLA's
    partitioner multiplies them by the number of devices that compute the same.
    """
    graph = division.dims.graph
    block = graph.root.block
    summed = [
        node.op
        for node in division.inside
        if node.name == CONVOLUTION
        and (tiling := division.dims.op_tilings.get(node)) is not None
        and tiling.combine
    ]
    for number, layout in sorted(division.trial.seeds.items()):
        place = graph.root.arguments.index(number)
        devices = devices_along(block, meshes, place, layout.dim)
        samples = shape_of(graph.values[number])[layout.dim] // division.dims.parts
        if not samples % devices:
            continue
        told = Diagnostic(
            Severity.WARNING,
            f"accumulate-gradients: {counted_name(graph.values[number])} is divided over "
            f"{devices} devices along the batch, and a microbatch has {samples} samples: "
            "several devices will compute the same samples; use fewer microbatches",
            to_place(block.owner.operation.location),
        )
        if summed:
            told = replace(
                told,
                severity=Severity.ERROR,
                message=f"{told.message}, or run partition next: XLA's partitioner computes such "
                "gradients of convolutions wrongly (P6)",
                place=to_place(summed[0].location),
                hint="-p 'accumulate-gradients{…},partition'",
                settled_by="partition",
            )
        yield told


def write_loop(division: MicrobatchDivision, meshes: Meshes) -> None:
    """Replaces the ops of a division by a loop; `meshes` are those of the module, by name.

    Do not use handles of the division afterwards.
    """
    anchor = _anchor(division)
    location = division.inside[0].op.location
    writer = _MicrobatchLoopWriter(division, Builder(ir.InsertionPoint(anchor), location))
    # Such ops do not depend on the loop, so they can move before it.
    for node in needed_later(division):
        node.op.move_before(writer.loop.op)
    results = writer.write(meshes)
    build = Builder(ir.InsertionPoint(anchor), location)
    graph = division.dims.graph
    for n, result in zip(_result_numbers(division), results, strict=True):
        old = graph.values[n]
        whole = build.reshape(result, shape_of(old)) if n in division.samples else result
        old.replace_all_uses_with(build.convert(whole, element_of(old)))
    for node in reversed(division.gone):
        node.op.erase()


def _result_numbers(division: MicrobatchDivision) -> list[int]:
    return [*(n for n, _ in division.sums), *division.samples, *division.same]


def _anchor(division: MicrobatchDivision) -> ir.Operation:
    """Returns the first op that uses a result of the loop; the terminator of the block if none
    does."""
    taken, gone = set(_result_numbers(division)), set(division.gone)
    root = division.dims.graph.root
    for node in root.nodes:
        if node not in gone and not taken.isdisjoint(inputs_of(node)):
            return node.op
    return terminator(root.block)


def needed_later(division: MicrobatchDivision) -> list[Node]:
    """Returns the ops after the loop's position whose results it needs, in order."""
    anchor = _anchor(division)
    inside, gone = set(division.inside), set(division.gone)
    nodes = division.dims.graph.root.nodes
    wanted = {n for node in inside for n in inputs_of(node)}
    later: list[Node] = []
    behind = {node for node in nodes if not node.op.is_before_in_block(anchor)}
    for node in reversed(nodes):
        if node in gone or wanted.isdisjoint(node.results):
            continue
        wanted |= inputs_of(node)
        if node in behind:
            later.append(node)
    return later[::-1]


class _MicrobatchLoopWriter:
    """The loop: it is created first, then its body is written."""

    def __init__(self, division: MicrobatchDivision, build: Builder) -> None:
        self._division = division
        self._dims = division.dims
        self._values = division.dims.graph.values
        self._found: dict[tuple[int, DimTiling], ir.Value] = {}
        self._last: ir.Operation | None = None
        self._zero = build.i32(0)
        carried: list[ir.Value] = []
        for n, kind in division.sums:
            # An accumulator starts from the identity of its reduction.
            value, element = self._values[n], wide(element_of(self._values[n]))
            is_complex = isinstance(element, ir.ComplexType)
            start = 0 if is_complex else identity_of(kind, element)
            assert start is not None
            carried.append(build.splat(start, shape_of(value), element))
        carried += [
            build.splat(0, self._rows(n, self._dims.tilings[n]), element_of(self._values[n]))
            for n in division.samples
        ]
        carried += [build.splat_like(0, self._values[n]) for n in division.same]
        self.loop = CountedLoop(build, build.i32(self._dims.parts), carried)

    def write(self, meshes: Meshes) -> list[ir.Value]:
        """Writes the body; returns the loop's results, in the order of `_result_numbers`."""
        division, build = self._division, self.loop.inside
        writing = OnePartWriter(self._dims, self.loop.counter, self._outside)
        writing.write(division.inside, build.point)
        relax_constraints(division, writing.values, meshes)
        made, carried = writing.values, iter(self.loop.arguments)
        after: list[ir.Value] = []
        for n, kind in division.sums:
            before = next(carried)
            after.append(build.same(kind, before, build.convert(made[n], element_of(before))))
        for n in division.samples:
            rows = next(carried)
            starts, sizes = self._window(shape_of(rows), self._dims.tilings[n])
            after.append(build.update(rows, build.reshape(made[n], sizes), starts))
        return self.loop.close([*after, *(made[n] for n in division.same)])

    def _rows(self, n: int, layout: DimTiling) -> list[int]:
        return apart(shape_of(self._values[n]), layout, self._dims.parts)

    def _window(self, rows: Sequence[int], layout: DimTiling) -> tuple[list[ir.Value], list[int]]:
        """Returns the start of the loop's microbatch in a tensor of shape `apart`, and its
        sizes."""
        return window(rows, layout, self.loop.counter, self._zero)

    def _outside(self, n: int, layout: DimTiling | None) -> ir.Value:
        """Returns a value from before the loop; with a layout, its part for a microbatch. A part
        that is the same for all is made before the loop; others are cut once an iteration."""
        if layout is None:
            return self._values[n]
        if (n, layout) not in self._found:
            self._found[n, layout] = self._part(self._values[n], n, layout)
        return self._found[n, layout]

    def _part(self, value: ir.Value, n: int, layout: DimTiling) -> ir.Value:
        before = self.loop.before
        type_ = part_type(value, layout, self._dims.parts)
        alike = alike_clone(value, layout.dim, type_, before.point)
        if alike is not None:
            return alike
        rows = self._rows(n, layout)
        starts, sizes = self._window(rows, layout)
        # After the previous cut, at the beginning of the body.
        point = ir.InsertionPoint.at_block_begin(While(self.loop.op).body)
        if self._last is not None:
            point = ir.InsertionPoint.after(self._last)
        location, whole = self.loop.inside.location, before.reshape(value, rows)
        taken = Builder(point, location).dynamic_slice(whole, starts, sizes)
        behind = Builder(ir.InsertionPoint.after(maker_of(taken)), location)
        part = behind.reshape(taken, ir.RankedTensorType(type_).shape)
        self._last = maker_of(part)
        return part
