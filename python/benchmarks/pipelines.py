"""What expand-pipeline is worth: time by ticks, memory by schedule, and how long the pass takes.

    python python/benchmarks/pipelines.py                 # time of forward and step, V = 1, 2, 4
    python python/benchmarks/pipelines.py --memory        # GPipe and 1F1B as XLA:TPU counts them
    python python/benchmarks/pipelines.py --full          # a 64-layer 8B training step, expanded

On virtual devices that share two cores all ranks' work adds up, garbage included: the time of an
SPMD pipeline follows its ticks. The programs of a table run in turn, round after round; the ratio
is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.devices import DEVICES  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.artifacts.program_mesh import program_mesh

RANKS, LAYERS = 4, 16
_TOOL = "from stablehlo_tools.cli.main import main; main()"


def main() -> None:
    """Prints the table that is asked for."""
    parser = argparse.ArgumentParser(description="What expand-pipeline is worth.")
    parser.add_argument("--memory", action="store_true", help="memory on XLA:TPU")
    parser.add_argument("--full", action="store_true", help="time to expand a large step")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    assert DEVICES >= RANKS
    if arguments.memory:
        memory()
    elif arguments.full:
        full()
    else:
        times(arguments.rounds)


def times(rounds: int) -> None:
    """Time over that of GPipe, and ticks of equal work over those of GPipe."""
    for name, function in (("forward", forward), ("step", step)):
        before = exported(function, (32, 64, 256), None)
        for microbatches in (4, 8):
            pipelines = [_pipeline(microbatches, repeats) for repeats in (1, 2, 4)]
            measured = _in_turn([_runner(before, pipeline) for pipeline in pipelines], rounds)
            for repeats, seconds in zip((1, 2, 4), measured, strict=True):
                expected = (microbatches + (RANKS - 1) / repeats) / (microbatches + RANKS - 1)
                ratio = seconds / measured[0]
                print(
                    f"{name:8} S={RANKS} M={microbatches} V={repeats}: time/GPipe {ratio:.3f}, "
                    f"ticks {expected:.3f}, off by {ratio / expected - 1:+.1%}"
                )


def memory() -> None:
    """Temporaries on a device over those of GPipe, and the chunks that are kept over all."""
    before = exported(step, (64, 256, 512), "stage")
    base = 0
    for options, kept in (
        ("schedule=gpipe", 16),
        ("schedule=1f1b", 4),
        ("schedule=1f1b skip=false", 7),
        ("schedule=1f1b repeats=2", 11 / 2),
    ):
        after = stablehlo_tools.transform(before, f"expand-pipeline{{microbatches=16 {options}}}")
        taken = _temporaries(after)
        base = base or taken
        print(
            f"S={RANKS} M=16 {options:26} {taken / 2**20:8.1f} MiB, of GPipe {taken / base:.3f}, "
            f"activations kept {kept / 16:.3f}"
        )


def full() -> None:
    """Seconds to expand the training step of a 64-layer decoder of Llama 3 8B's width."""
    model = MODELS["decoder-2d-scan-step"]
    before = model.full(layers=64, stage=8, fsdp=8, model=1)
    for options in ("schedule=gpipe", "schedule=circular repeats=4", "schedule=1f1b repeats=2"):
        started = time.perf_counter()
        stablehlo_tools.transform(before, f"expand-pipeline{{microbatches=8 {options}}}")
        print(f"64 layers, 8 stages, {options:28} {time.perf_counter() - started:6.2f} s")


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


def exported(
    function: Callable[..., Any], sizes: tuple[int, int, int], layers: str | None
) -> export.Exported:
    """The function on a mesh of stages alone, for a batch, a sequence and a width; `layers` is the
    axis that the caller divides the weights over."""
    mesh = AbstractMesh((RANKS,), ("stage",), axis_types=(AxisType.Auto,))
    _, _, width = sizes

    def shape(sizes: Sequence[int], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    weights = {
        "up": shape((LAYERS, width, 4 * width), layers),
        "down": shape((LAYERS, 4 * width, width), layers),
    }
    arguments = (weights, shape(sizes))
    shardings = jax.tree.map(lambda each: each.sharding, arguments)
    return export.export(jax.jit(function, in_shardings=shardings))(*arguments)


def _pipeline(microbatches: int, repeats: int) -> str:
    schedule = "gpipe" if repeats == 1 else "circular"
    return f"expand-pipeline{{microbatches={microbatches} repeats={repeats} schedule={schedule}}}"


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
    """The median time of each, in seconds."""
    for program in programs:
        program()
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for taken, program in zip(seconds, programs, strict=True):
            started = time.perf_counter()
            program()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


def _temporaries(after: export.Exported) -> int:
    """Bytes of temporaries on a device, as XLA:TPU counts them, in a process that it may end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.jax_export")
        path.write_bytes(bytes(after.serialize()))
        command = [sys.executable, "-c", _TOOL, "compile", str(path), "--target", "tpu", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return int(json.loads(done.stdout)["memory"]["temp_bytes"])


if __name__ == "__main__":
    main()
