"""What expand-pipeline is worth: time by ticks, memory by schedule, and how long the pass takes.

    python python/benchmarks/pipelines.py                 # time of forward and step, V = 1, 2, 4
    python python/benchmarks/pipelines.py --memory        # GPipe and 1F1B as XLA:TPU counts them
    python python/benchmarks/pipelines.py --full          # a 64-layer 8B training step, expanded
    python python/benchmarks/pipelines.py --schedules     # steps as XLA:GPU schedules them

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
    parser.add_argument("--schedules", action="store_true", help="time and memory on XLA:GPU")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    assert DEVICES >= RANKS
    if arguments.memory:
        memory()
    elif arguments.full:
        full()
    elif arguments.schedules:
        schedules()
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


def schedules() -> None:
    """Training steps of a decoder of 16 layers and of an encoder and a decoder, of as many each, on
    4 H100, as XLA:GPU schedules them, beside the exports as they are."""
    for name in ("decoder", "encoder-decoder"):
        before = stacked(with_encoder=name == "encoder-decoder")
        base = _scheduled(before)
        print(f"{name:16} as exported {base[0]:8.1f} ms, peak {base[1]:5.1f} GiB", flush=True)
        for options in (
            "schedule=gpipe",
            "schedule=circular repeats=2",
            "schedule=1f1b",
            "schedule=eager-1f1b",
            "schedule=1f1b repeats=2",
            "schedule=eager-1f1b repeats=2",
        ):
            pipeline = f"expand-pipeline{{microbatches=16 {options}}},partition"
            ms, peak = _scheduled(stablehlo_tools.transform(before, pipeline))
            print(
                f"{name:16} {options:30} {ms:8.1f} ms, of the export {ms / base[0]:.3f}, "
                f"peak {peak:5.1f} GiB",
                flush=True,
            )


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


def stacked(
    with_encoder: bool, layers: int = 16, width: int = 1024, batch: int = 64
) -> export.Exported:
    """A step of SGD on a decoder, each layer of which may look at what an encoder gives: sequences
    of 512, bfloat16, layers checkpointed and divided over the stages."""
    mesh = AbstractMesh((RANKS,), ("stage",), axis_types=(AxisType.Auto,))

    def attended(x: jax.Array, to: jax.Array, w: Any, name: str) -> jax.Array:
        heads = (batch, -1, 16, width // 16)
        query, key, value = ((of @ w[name][i]).reshape(heads) for i, of in enumerate((x, to, to)))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=name == "causal")
        return x + mixed.reshape(x.shape) @ w[name][3]

    def fed(x: jax.Array, w: Any) -> jax.Array:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(w: Any, sources: jax.Array, targets: jax.Array) -> jax.Array:
        def encode(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return fed(attended(x, x, w, "both"), w), None

        encoded = sources
        if with_encoder:
            encoded, _ = lax.scan(jax.checkpoint(encode), sources, w["encoder"])

        def decode(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            x = attended(x, x, w, "causal")
            return fed(attended(x, encoded, w, "across") if with_encoder else x, w), None

        decoded, _ = lax.scan(jax.checkpoint(decode), targets, w["decoder"])
        return jnp.mean(jnp.square((decoded @ w["out"]).astype(jnp.float32)))

    def trained(w: Any, sources: jax.Array, targets: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, sources, targets)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients)

    def shape(sizes: Sequence[int], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    def stack(*names: str) -> dict[str, jax.ShapeDtypeStruct]:
        square = {name: shape((layers, 4, width, width), "stage") for name in names}
        up = shape((layers, width, 4 * width), "stage")
        return {**square, "up": up, "down": shape((layers, 4 * width, width), "stage")}

    weights = {"decoder": stack("causal"), "out": shape((width, 8 * width))}
    if with_encoder:
        weights |= {"encoder": stack("both"), "decoder": stack("causal", "across")}
    inputs = shape((batch, 512, width))
    return export.export(jax.jit(trained))(weights, inputs, inputs)


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
    """Bytes of temporaries on a device, as XLA:TPU counts them."""
    return int(_asked(after, "compile", "tpu")["memory"]["temp_bytes"])


def _scheduled(program: export.Exported) -> tuple[float, float]:
    """Milliseconds and the peak in GiB of a device, as XLA:GPU schedules a program."""
    (found,) = _asked(program, "inspect", "gpu")["programs"]
    return found["total_ns"] / 1e6, found["peak_bytes"] / 2**30


def _asked(program: export.Exported, command: str, target: str) -> Any:
    """What a command says of a program, in a process that the compiler may end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.jax_export")
        path.write_bytes(bytes(program.serialize()))
        words = [sys.executable, "-c", _TOOL, command, str(path), "--target", target, "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
