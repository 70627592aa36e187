"""The forms of a program that the child process can run, each from inputs to shards.

Imported by the child process only: it starts JAX with its virtual devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.comparison import Shard
from stablehlo_tools.verify.element_types import (
    Array,
    ElementType,
    Kind,
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
    if form == "interpreter":
        return InterpreterProgram(data, run)
    return ModuleProgram(data, run, side, skipped=skipped)


class ModuleProgram:
    """A bare module, compiled and run below JAX: no calling convention comes between."""

    def __init__(self, code: bytes, run: Run, side: Side, *, skipped: Sequence[str]) -> None:
        self.run = run
        self.taken = run.taken.get(side, tuple(range(len(run.inputs))))
        inputs = [run.inputs[number] for number in self.taken]
        partitioned = run.forms[side] == "partitioned"
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
            bindings.input_shardings(self.executable) if partitioned else None, inputs
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
            for i, indices in zip(self.taken, self.in_indices, strict=True)
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
                for attribute in _to_attributes(array, value.element_type)
            ]
            results = iter(bindings.eval_module(self.module, arguments))
            shards: list[list[Shard]] = [[] for _ in self.run.outputs]
            for device in range(len(instances)):
                for of_output, value in zip(shards, self.run.outputs, strict=True):
                    # The interpreter gives bit patterns.
                    element = value.element_type
                    part = real_part(element)
                    pieces = [
                        np.array(ir.DenseElementsAttr(next(results))).reshape(value.shape)
                        for _ in range(parts(element))
                    ]
                    patterns = np.stack(pieces, -1) if element.kind is Kind.COMPLEX else pieces[0]
                    narrow = np.ascontiguousarray(patterns.astype(f"u{part.dtype.itemsize}"))
                    array = from_bits(narrow, part).view(element.dtype).reshape(value.shape)
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


def _whole(value: Value) -> tuple[slice, ...]:
    return (slice(None),) * len(value.shape)
