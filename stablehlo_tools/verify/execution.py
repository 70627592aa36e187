"""The forms of a program that the child process can run, each from inputs to shards.

Imported by the child process only: it starts JAX with its virtual devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.program_mesh import program_mesh
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.comparison import Shard
from stablehlo_tools.verify.element_types import (
    Array,
    ElementType,
    Kind,
    element_type,
    from_bits,
    real_part,
    to_bits,
)
from stablehlo_tools.verify.interpreter_program import parts, pattern_bits
from stablehlo_tools.verify.job import Run, Side
from stablehlo_tools.verify.signatures import Value

Instances = Sequence[Sequence[Array]]  # [instance][input], global arrays


class Program(Protocol):
    """A compiled program."""

    def __call__(self, instances: Instances) -> list[list[Shard]]:
        """Runs it on inputs for each instance; returns the shards of each output."""
        ...


def load_program(directory: Path, run: Run, side: Side, *, skipped: Sequence[str]) -> Program:
    """Reads and compiles one side's program. Raises whatever JAX or XLA raises."""
    data = (directory / run.program(side)).read_bytes()
    form = run.forms[side]
    if form == "exported":
        return ExportedProgram(data, run, skipped=skipped)
    if form == "interpreter":
        return InterpreterProgram(data, run)
    return ModuleProgram(data, run, partitioned=form == "partitioned", skipped=skipped)


class ExportedProgram:
    """A jax.export artifact, called as its users call it, on a mesh of virtual devices."""

    def __init__(self, data: bytes, run: Run, *, skipped: Sequence[str]) -> None:
        self.exported = export.deserialize(bytearray(data))
        self.inputs, self.outputs = run.inputs, run.outputs
        self.devices = np.array(jax.devices()[: self.exported.nr_devices])
        self.mesh = program_mesh(self.exported, list(self.devices))
        self.shardings = [self._concrete(s) for s in self.exported.in_shardings_jax(None)]
        specs = [
            jax.ShapeDtypeStruct(value.shape, _element(value).dtype, sharding=sharding)
            for value, sharding in zip(self.inputs, self.shardings, strict=True)
            if value.role != "nothing"
        ]
        # Passes that round anew: they would do so differently before and after a pass of ours.
        options = {"xla_disable_hlo_passes": ",".join(skipped)} if skipped else {}
        self.compiled = jax.jit(self._call).lower(*specs).compile(options)

    def __call__(self, instances: Instances) -> list[list[Shard]]:
        arguments = [
            jax.device_put(array, sharding)
            for value, array, sharding in zip(
                self.inputs, instances[0], self.shardings, strict=True
            )
            if value.role != "nothing"
        ]
        results = iter(self.compiled(*arguments))
        return [[] if value.role == "nothing" else _shards(next(results)) for value in self.outputs]

    def _call(self, *arrays: Any) -> list[Any]:
        given = iter(arrays)
        arguments: list[Any] = []
        for value in self.inputs:
            if value.role == "nothing":
                arguments.append(np.zeros(value.shape, jax.dtypes.float0))
            elif value.role == "key":
                arguments.append(jax.random.wrap_key_data(next(given), impl=value.key))
            else:
                arguments.append(next(given))
        results = self.exported.call(*arguments)
        return [
            jax.random.key_data(result) if value.role == "key" else result
            for value, result in zip(self.outputs, results, strict=True)
            if value.role != "nothing"
        ]

    def _concrete(self, sharding: Any) -> NamedSharding:
        """A sharding, on these devices; replicated over all of them where there is none."""
        if sharding is None or sharding.mesh.empty:
            return NamedSharding(self.mesh, PartitionSpec())
        mesh = sharding.mesh
        devices = self.devices.reshape(mesh.axis_sizes)
        return NamedSharding(
            Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), sharding.spec
        )


class ModuleProgram:
    """A bare module, compiled and run below JAX: no calling convention comes between."""

    def __init__(self, code: bytes, run: Run, *, partitioned: bool, skipped: Sequence[str]) -> None:
        self.run = run
        self.devices = jax.devices()[: run.replicas * run.partitions]
        self.executable = bindings.compile_for_devices(
            code,
            run.replicas,
            run.partitions,
            self.devices,
            partitioned=partitioned,
            skipped_passes=skipped,
        )
        self.in_indices = self._indices(
            bindings.input_shardings(self.executable) if partitioned else None, run.inputs
        )
        self.out_indices = self._indices(
            bindings.output_shardings(self.executable) if partitioned else None, run.outputs
        )

    def __call__(self, instances: Instances) -> list[list[Shard]]:
        arguments = [
            [
                instances[self._instance(device)][i][indices[device % self.run.partitions]]
                for device in range(len(self.devices))
            ]
            for i, indices in enumerate(self.in_indices)
        ]
        results = bindings.run_on_devices(self.executable, arguments, self.devices)
        return [
            [
                Shard(device, indices[device % self.run.partitions], part, self._instance(device))
                for device, part in enumerate(on_devices)
            ]
            for indices, on_devices in zip(self.out_indices, results, strict=True)
        ]

    def _instance(self, device: int) -> int:
        return device * self.run.instances // len(self.devices)

    def _indices(
        self, shardings: list[Any] | None, values: Sequence[Value]
    ) -> list[list[tuple[slice, ...]]]:
        if shardings is None:
            return [[_whole(value)] * self.run.partitions for value in values]
        return [
            bindings.shard_indices(sharding, value.shape, self.run.partitions)
            for sharding, value in zip(shardings, values, strict=True)
        ]


class InterpreterProgram:
    """A module that `interpreter_program` made for the StableHLO reference interpreter."""

    def __init__(self, code: bytes, run: Run) -> None:
        context = bindings.new_context()
        bindings.register_interpreter_dialect(context)
        self.module = bindings.parse_module(code, context)
        self.run = run

    def __call__(self, instances: Instances) -> list[list[Shard]]:
        with self.module.context, ir.Location.unknown():
            arguments = [
                attribute
                for arrays in instances
                for value, array in zip(self.run.inputs, arrays, strict=True)
                for attribute in _to_attributes(array, _element(value))
            ]
            results = iter(bindings.eval_module(self.module, arguments))
            shards: list[list[Shard]] = [[] for _ in self.run.outputs]
            for device in range(len(instances)):
                for of_output, value in zip(shards, self.run.outputs, strict=True):
                    array = _from_attributes(results, value)
                    of_output.append(Shard(device, _whole(value), array, device))
        return shards


def _to_attributes(array: Array, element: ElementType) -> list[ir.Attribute]:
    """The bit patterns of an array, as the interpreter takes them."""
    width = pattern_bits(element)
    patterns = to_bits(array, element).astype(f"u{width // 8}")
    type_ = ir.RankedTensorType.get(array.shape, ir.IntegerType.get_unsigned(width))
    if not array.size:
        return [ir.Attribute.parse(f"dense<> : {type_}")] * parts(element)
    pieces = np.moveaxis(patterns, -1, 0) if element.kind is Kind.COMPLEX else [patterns]
    return [ir.DenseElementsAttr.get(np.ascontiguousarray(piece), type=type_) for piece in pieces]


def _from_attributes(attributes: Iterator[Any], value: Value) -> Array:
    """The next array from the bit patterns that the interpreter gives."""
    element = _element(value)
    part = real_part(element)
    pieces = [
        np.array(ir.DenseElementsAttr(next(attributes))).reshape(value.shape)
        for _ in range(parts(element))
    ]
    patterns = np.stack(pieces, -1) if element.kind is Kind.COMPLEX else pieces[0]
    narrow = np.ascontiguousarray(patterns.astype(f"u{part.dtype.itemsize}"))
    return from_bits(narrow, part).view(element.dtype).reshape(value.shape)


def _shards(array: jax.Array) -> list[Shard]:
    return [
        Shard(shard.device.id, shard.index, np.asarray(shard.data))
        for shard in array.addressable_shards
    ]


def _whole(value: Value) -> tuple[slice, ...]:
    return (slice(None),) * len(value.shape)


def _element(value: Value) -> ElementType:
    element = element_type(value.element)
    assert element is not None, value
    return element
