"""The forms of a program that the child process can run; each maps inputs to shards.

Imported by the child process only: it starts JAX with its virtual devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.comparison import OutputComparison, Rule, Shard, compare_output
from stablehlo_tools.verify.element_types import (
    Array,
    ElementKind,
    ElementType,
    from_bits,
    real_part,
    to_bits,
)
from stablehlo_tools.verify.interpreter_program import parts, pattern_bits
from stablehlo_tools.verify.signatures import SignatureValue
from stablehlo_tools.verify.verification_job import BackendRun, Side

Instances = Sequence[Sequence[Array]]  # [instance][input], global arrays
Shards = list[list[Shard]]  # [output][shard]


class ExecutableProgram(Protocol):
    """A compiled program."""

    def __call__(self, instances: Instances) -> Shards:
        """Runs the program on inputs for each instance; returns the shards of each output."""
        ...


def make_instances(
    run: BackendRun, seed: int, trial: int, make: Callable[[int, tuple[int, ...]], Array]
) -> Instances:
    """Returns the inputs of a trial. `make` gets an input's number and a key, which is the same for
    instances that share its values."""
    return [
        [make(i, (seed, trial, i, run.shared[i][instance])) for i in range(len(run.inputs))]
        for instance in range(run.instances)
    ]


def compare_outputs(
    outputs: Sequence[SignatureValue], before: Shards, after: Shards, rule: Rule
) -> tuple[OutputComparison, ...]:
    """Compares each output; a float0 array has no elements."""
    return tuple(
        OutputComparison(0)
        if value.element == "float0"
        else compare_output(value.element_type, value.shape, before[i], after[i], rule)
        for i, value in enumerate(outputs)
    )


def load_without_rerounding[T](load: Callable[[Sequence[str]], T]) -> tuple[T, bool]:
    """Loads programs without XLA's simplifier, because it changes rounding.

    XLA:CPU cannot run a few programs without it. These are loaded with it, and the second result is
    True.
    """
    skipped = bindings.REROUNDING_PASSES
    try:
        return load(skipped), False
    except Exception:  # XLA's own types; only the error of the second attempt is reported
        return load([name for name in skipped if name not in bindings.INDISPENSABLE_PASSES]), True


def load_program(run: BackendRun, side: Side, *, skipped: Sequence[str]) -> ExecutableProgram:
    """Compiles one side's program. Raises whatever JAX or XLA raises."""
    if run.forms[side] == "interpreter":
        return InterpreterProgram(run, side)
    return ModuleProgram(run, side, skipped=skipped)


class ModuleProgram:
    """A bare module, compiled and run below JAX, without a calling convention."""

    def __init__(self, run: BackendRun, side: Side, *, skipped: Sequence[str]) -> None:
        self.run = run
        self.taken = run.taken.get(side, tuple(range(len(run.inputs))))
        inputs = [run.inputs[number] for number in self.taken]
        partitioned = run.forms[side] == "partitioned"
        self.devices = jax.devices()[: run.replicas * run.partitions]
        self.executable = bindings.compile_for_devices(
            run.programs[side],
            run.replicas,
            run.partitions,
            self.devices,
            partitioned=partitioned,
            skipped_passes=skipped,
        )
        self.in_indices = self._indices(
            self.executable.get_parameter_shardings() if partitioned else None, inputs
        )
        self.out_indices = self._indices(
            self.executable.get_output_shardings() if partitioned else None, run.outputs
        )

    def __call__(self, instances: Instances) -> Shards:
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
        # The devices of an instance are adjacent.
        return device * self.run.instances // len(self.devices)

    def _indices(
        self, shardings: list[Any] | None, values: Sequence[SignatureValue]
    ) -> list[list[tuple[slice, ...]]]:
        if shardings is None:
            return [[_whole(value)] * self.run.partitions for value in values]
        return [
            bindings.shard_indices(sharding, value.shape, self.run.partitions)
            for sharding, value in zip(shardings, values, strict=True)
        ]


class InterpreterProgram:
    """A module from `interpreter_program`, run in the StableHLO reference interpreter."""

    def __init__(self, run: BackendRun, side: Side) -> None:
        context = bindings.new_context()
        bindings.register_interpreter_dialect(context)
        self.module = bindings.parse_module(run.programs[side], context)
        self.run = run

    def __call__(self, instances: Instances) -> Shards:
        with self.module.context, ir.Location.unknown():
            arguments = [
                attribute
                for arrays in instances
                for value, array in zip(self.run.inputs, arrays, strict=True)
                for attribute in _to_attributes(array, value.element_type)
            ]
            results = iter(bindings.eval_module(self.module, arguments))
            shards: Shards = [[] for _ in self.run.outputs]
            for device in range(len(instances)):
                for of_output, value in zip(shards, self.run.outputs, strict=True):
                    # The interpreter returns bit patterns.
                    element = value.element_type
                    part = real_part(element)
                    pieces = [
                        np.array(ir.DenseElementsAttr(next(results))).reshape(value.shape)
                        for _ in range(parts(element))
                    ]
                    patterns = (
                        np.stack(pieces, -1) if element.kind is ElementKind.COMPLEX else pieces[0]
                    )
                    narrow = np.ascontiguousarray(patterns.astype(f"u{part.dtype.itemsize}"))
                    array = from_bits(narrow, part).view(element.dtype).reshape(value.shape)
                    of_output.append(Shard(device, _whole(value), array, device))
        return shards


def _to_attributes(array: Array, element: ElementType) -> list[ir.Attribute]:
    """Returns the bit patterns of an array as arguments of the interpreter."""
    width = pattern_bits(element)
    patterns = to_bits(array, element).astype(f"u{width // 8}")
    type_ = ir.RankedTensorType.get(array.shape, ir.IntegerType.get_unsigned(width))
    if not array.size:
        return [ir.Attribute.parse(f"dense<> : {type_}")] * parts(element)
    pieces = np.moveaxis(patterns, -1, 0) if element.kind is ElementKind.COMPLEX else [patterns]
    return [ir.DenseElementsAttr.get(np.ascontiguousarray(piece), type=type_) for piece in pieces]


def _whole(value: SignatureValue) -> tuple[slice, ...]:
    return (slice(None),) * len(value.shape)
