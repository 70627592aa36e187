"""Unwraps the program of a rank into the program of each of its devices.

    func @main(%x: tensor<8xf32>) {
      %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}]>] …
           manual_axes={"rank", "data"} (%a: tensor<4xf32>) { BODY  sdy.return %y }
      return %r
    }
    ==>
    func @main(%a: tensor<4xf32>) { BODY  return %y }

It also finds the part of every argument and result on each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import (
    MeshAxes,
    ValueShardings,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import unwrap_body
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, terminator
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.rank_child import element_of, value_of
from stablehlo_tools.verify.element_types import Array

Index = tuple[slice, ...]
_WHOLE: tuple[Index, ...] = ((),)  # on the only device


@dataclass(frozen=True)
class LocalProgram:
    """The program of a device of a rank; `inputs[i][d]` is the part of argument i on device d.

    `types` are the types of the arguments and the results over all devices of the rank.
    """

    module: ir.Module
    inputs: tuple[tuple[Index, ...], ...]
    outputs: tuple[tuple[Index, ...], ...]
    types: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def block(self) -> ir.Block:
        """The body of `main`."""
        return Function(entry_function(self.module)).body

    def split_arguments(self, arrays: Sequence[Array]) -> list[list[Array]]:
        """Returns the parts of whole arguments, `[argument][device]`."""
        return [
            [np.asarray(array[index]) for index in indices]
            for array, indices in zip(arrays, self.inputs, strict=True)
        ]

    def assemble_results(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """Returns the whole results, from parts `[result][device]`."""
        whole: list[Array] = []
        for devices, indices, type_ in zip(parts, self.outputs, self.types[1], strict=True):
            value = value_of(type_)
            whole.append(np.zeros(value.shape, element_of(value).dtype))
            for part, index in reversed(list(zip(devices, indices, strict=True))):
                whole[-1][index] = part  # device 0 comes last and wins
        return whole


def localise_rank(ranks: RankSet, rank: int) -> LocalProgram:
    """Returns the program of each device of a rank, in a copy.

    Raises a located ToolError if a rank has several devices and its `main` is not one manual
    computation over all of them.
    """
    module = copy_module(ranks.programs[rank].module)
    main = entry_function(module)
    block = Function(main).body
    end = terminator(block)
    outer = tuple(
        tuple(str(value.type) for value in values) for values in (block.arguments, end.operands)
    )
    types = (outer[0], outer[1])
    body = [op.operation for op in block.operations][:-1]
    manual = next((op for op in body if op.name == MANUAL_COMPUTATION), None)
    devices = ranks.manifest.devices
    if manual is None and devices > 1:
        raise ToolError(
            f"@main has no {MANUAL_COMPUTATION}, but a rank of {devices} devices needs one",
            main.location,
        )
    if manual is None:
        inputs, outputs = (tuple(_WHOLE for _ in side) for side in types)
        return LocalProgram(module, inputs, outputs, types)
    has_more = list(manual.operands) != list(block.arguments)
    if len(body) > 1 or has_more or list(manual.results) != list(end.operands):
        raise ToolError(
            f"@main must be one {MANUAL_COMPUTATION} that reads all of its arguments and returns "
            "all of its results in order",
            main.location,
        )
    meshes = ModuleFacts.from_module(module, []).meshes
    own = range(rank * devices, (rank + 1) * devices)
    inputs = tuple(_parts(manual, "in_shardings", list(manual.operands), meshes, own))
    outputs = tuple(_parts(manual, "out_shardings", list(manual.results), meshes, own))
    with module.context, ir.Location.unknown():
        unwrap_body(main, manual)
    return LocalProgram(module, inputs, outputs, types)


def _parts(
    manual: ir.Operation,
    name: str,
    values: Sequence[ir.Value],
    meshes: Mapping[str, DeviceMesh],
    devices: range,
) -> Iterator[tuple[Index, ...]]:
    """Yields for each value its part on each device of the rank."""
    for value, attribute in zip(values, sharding_per_value(manual.attributes[name]), strict=True):
        mesh, _ = sharding_axes(attribute)
        if mesh not in meshes:
            raise ToolError("the mesh of a manual computation has no name", manual.location)
        axes = MeshAxes(meshes[mesh])
        dims = ValueShardings(axes, mesh).read(attribute)
        yield tuple(
            tuple(
                _part(size, axes.size(along), int(axes.positions(along)[device]))
                for size, along in zip(shape_of(value), dims, strict=True)
            )
            for device in devices
        )


def _part(size: int, parts: int, number: int) -> slice:
    if parts == 1:
        return slice(None)
    return slice(number * (size // parts), (number + 1) * (size // parts))
