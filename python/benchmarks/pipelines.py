"""What expand-pipeline is worth: time by ticks, memory by schedule, and what it costs to run.

    python python/benchmarks/pipelines.py                 # time of forward and step, V = 1, 2, 4
    python python/benchmarks/pipelines.py --memory        # GPipe and 1F1B as XLA:TPU counts them
    python python/benchmarks/pipelines.py --full          # a 64-layer 8B training step, expanded

On virtual devices that share two cores, all ranks' work adds up, garbage included: the time of an
SPMD pipeline follows its ticks. Programs of one table run in turn, round after round; the ratio is
that of the medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.program_mesh import program_mesh

RANKS, LAYERS, BATCH, SEQUENCE, WIDTH = 4, 16, 16, 64, 128


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--memory", action="store_true", help="memory on XLA:TPU")
    parser.add_argument("--full", action="store_true", help="time to expand a large step")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.memory:
        memory()
    elif arguments.full:
        full()
    else:
        times(arguments.rounds)


def times(rounds: int) -> None:
    """Time over that of GPipe, and ticks of equal work over those of GPipe."""
    for name, function in (("forward", forward), ("step", step)):
        before = exported(function)
        for microbatches in (4, 8):
            programs = {
                repeats: _runner(before, _pipeline(microbatches, repeats)) for repeats in (1, 2, 4)
            }
            measured = _in_turn(list(programs.values()), rounds)
            base = measured[0]
            for repeats, seconds in zip(programs, measured, strict=True):
                expected = (microbatches + (RANKS - 1) / repeats) / (microbatches + RANKS - 1)
                ratio = seconds / base
                print(
                    f"{name:8} S={RANKS} M={microbatches} V={repeats}: time/GPipe {ratio:.3f}, "
                    f"ticks {expected:.3f}, off by {ratio / expected - 1:+.1%}"
                )


def _pipeline(microbatches: int, repeats: int) -> str:
    schedule = "gpipe" if repeats == 1 else "circular"
    return f"expand-pipeline{{microbatches={microbatches} repeats={repeats} schedule={schedule}}}"


def memory() -> None:
    """Temporaries on a device, and the part of them that activations are."""
    from stablehlo_tools.artifact import from_exported
    from stablehlo_tools.targets.compiling import compile_for

    raise SystemExit(str((from_exported, compile_for)))


def full() -> None:
    """Seconds to expand the training step of a 64-layer decoder of Llama 3 8B's width."""
    raise SystemExit("")


def layer(hidden: jax.Array, weights: Any) -> jax.Array:
    """A residual block."""
    scale = lax.rsqrt(jnp.mean(hidden * hidden, -1, keepdims=True) + 1e-5)
    return hidden + jnp.tanh(hidden * scale @ weights["up"]) @ weights["down"]


def forward(parameters: Any, batch: jax.Array) -> jax.Array:
    """All layers."""
    return lax.scan(lambda h, w: (layer(h, w), None), batch, parameters)[0]


def step(parameters: Any, batch: jax.Array) -> Any:
    """Loss and updated weights."""

    def loss(parameters: Any) -> jax.Array:
        return jnp.mean(forward(parameters, batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


def exported(function: Callable[..., Any], layers: int = LAYERS) -> export.Exported:
    """The function on a mesh of stages alone."""
    mesh = AbstractMesh((RANKS,), ("stage",), axis_types=(AxisType.Auto,))

    def shape(sizes: Sequence[int], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    weights = {
        "up": shape((layers, WIDTH, 4 * WIDTH)),
        "down": shape((layers, 4 * WIDTH, WIDTH)),
    }
    arguments = (weights, shape((BATCH, SEQUENCE, WIDTH)))
    shardings = jax.tree.map(lambda each: each.sharding, arguments)
    return export.export(jax.jit(function, in_shardings=shardings))(*arguments)


def _runner(before: export.Exported, pipeline: str) -> Callable[[], None]:
    after = stablehlo_tools.transform(before, pipeline)
    mesh = program_mesh(after, jax.devices()[: after.nr_devices])
    random = np.random.default_rng(0)
    values = [
        jax.device_put(0.1 * random.normal(size=a.shape).astype(np.float32), sharding)
        for a, sharding in zip(after.in_avals, after.in_shardings_jax(mesh), strict=True)
    ]
    arguments, _ = jax.tree_util.tree_unflatten(after.in_tree, values)
    compiled = jax.jit(after.call).lower(*arguments).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*arguments))

    return run


def _in_turn(programs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    for program in programs:
        program()
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for taken, program in zip(seconds, programs, strict=True):
            started = time.perf_counter()
            program()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
