"""Random collective_permutes of any pairs, for eight devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.permute_pairs import Pair
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact

DEVICES = 8
TYPES: dict[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "i1": np.bool_,
    "i4": ml_dtypes.int4,
    "i8": np.int8,
    "i32": np.int32,
    "ui64": np.uint64,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
}
SHAPES = ((), (3,), (2, 5), (0, 2))
FORMS = {"partitions": (1, 8), "replicas": (8, 1), "both": (2, 4), "both, of replicas": (4, 2)}


def random_pairs(rng: np.random.Generator, ids: int) -> list[Pair]:
    """A part of a permutation, in any order: chains, cycles, and ids that send to themselves."""
    targets = rng.permutation(ids)
    if rng.random() < 0.3:  # a shift: one ring or several
        targets = np.roll(np.arange(ids), int(rng.integers(1, ids)))
    if rng.random() < 0.2:
        targets = np.arange(ids)
    kept = rng.random(ids) < rng.choice([0.5, 0.9, 1.1])
    pairs = [(i, int(targets[i])) for i in rng.permutation(ids) if kept[i]]
    return [(int(source), target) for source, target in pairs]


@dataclass(frozen=True)
class Program:
    """A program of `%x0`, `%x1` … that returns as many tensors of the same types, `%y0` …"""

    lines: Sequence[str]
    tensors: Sequence[tuple[tuple[int, ...], str]]  # shapes and elements
    form: str = "partitions"

    def parsed(self) -> Artifact:
        """The module."""
        replicas, partitions = FORMS[self.form]
        kinds = [kind(*tensor) for tensor in self.tensors]
        taken = ", ".join(f"%x{i}: {kind}" for i, kind in enumerate(kinds))
        names = ", ".join(f"%y{i}" for i in range(len(kinds)))
        body = "\n".join([*self.lines, f"return {names} : {', '.join(kinds)}"])
        text = (
            f"module attributes {{mhlo.num_replicas = {replicas} : i32, "
            f"mhlo.num_partitions = {partitions} : i32}} {{\n"
            f"func.func @main({taken}) -> ({', '.join(kinds)}) {{\n{body}\n}}\n}}\n"
        )
        return artifact.parse(text.encode())

    def values(self, seed: int) -> list[list[Any]]:
        """Any bits at all for each argument on each device, those of wide NaNs among them."""
        rng = np.random.default_rng(seed)
        return [[_bits(rng, *tensor) for _ in range(DEVICES)] for tensor in self.tensors]

    def run(self, program: Artifact, values: list[list[Any]]) -> list[list[bytes]]:
        """What a program with this one's signature gives on each device."""
        devices = jax.devices()[:DEVICES]
        code = bindings.write_bytecode(program.module)
        executable = bindings.compile_for_devices(
            code, *FORMS[self.form], devices, partitioned=False
        )
        results = bindings.run_on_devices(executable, values, devices)
        return [[np.asarray(part).tobytes() for part in parts] for parts in results]


def kind(shape: tuple[int, ...], element: str) -> str:
    """The type of a tensor."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def permute(
    name: str, operand: str, pairs: Sequence[Pair], kind: str, channel: int | None = 1
) -> str:
    """The text of a permute; without a channel, of replicas."""
    table = f"dense<{[list(pair) for pair in pairs] or ''}> : tensor<{len(pairs)}x2xi64>"
    handle = f", channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>"
    return (
        f'{name} = "stablehlo.collective_permute"({operand}) '
        f"{{source_target_pairs = {table}{handle if channel else ''}}} : ({kind}) -> {kind}"
    )


def random_program(seed: int) -> Program:
    """Two to four permutes of any type and pairs."""
    rng = np.random.default_rng(seed)
    form = list(FORMS)[seed % len(FORMS)]
    is_replica = "replicas" in form
    ids = FORMS[form][0 if is_replica else 1]
    lines: list[str] = []
    tensors: list[tuple[tuple[int, ...], str]] = []
    for number in range(int(rng.integers(2, 5))):
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        element = list(TYPES)[int(rng.integers(len(TYPES)))]
        tensors.append((shape, element))
        channel = None if is_replica else int(rng.integers(1, 4))
        pairs = random_pairs(rng, ids)
        lines.append(permute(f"%y{number}", f"%x{number}", pairs, kind(shape, element), channel))
    return Program(lines, tensors, form)


def _bits(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> Any:
    dtype = np.dtype(TYPES[element])
    if element == "i1":
        return rng.random(shape) < 0.5
    if element == "i4":
        return rng.integers(-8, 8, shape).astype(dtype)
    bits = np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    if dtype.itemsize > 2 or element.startswith(("i", "ui")):
        return bits
    # XLA:CPU sends narrow floats as wider ones, and NaNs come back as others.
    return np.where(np.isnan(bits), np.array(1, dtype), bits)
