"""What rings save: tensor-parallel programs as exported, and after collective-matmul.

    python python/benchmarks/collective_matmul.py [--target gpu tpu] [--devices 8]

An MLP of 8192 x 8192 x 28672 and its two halves, the same left to the compiler (which has windowed
einsums of its own on a TPU), experts between two all_to_alls, and Llama layers with sequence
parallelism, forwards and as a training step, unrolled and as a scan with remat. Each is compiled
for the target as exported and after the pass, and timed as the compiler scheduled it. No device is
needed; it takes some minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

PLATFORM = {"gpu": "cuda", "tpu": "tpu"}
BATCH, LENGTH, WIDTH, HEADS, HEAD, HIDDEN = 2, 4096, 4096, 32, 128, 14336
LAYERS, STACKED = 4, 8
CAPACITY = 1280  # tokens of a device for each expert
AXIS = "model"


def main() -> None:
    """Prints a row for each program and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", nargs="+", choices=sorted(PLATFORM), default=["gpu", "tpu"])
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(
        f"{'program':24s}{'target':8s}{'before ms':>10s}{'after ms':>10s}{'ratio':>8s}", flush=True
    )
    for target in arguments.target:
        for name, exported in programs(arguments.devices, PLATFORM[target]):
            before, after = times(name, exported, target)
            print(
                f"{name:24s}{target:8s}{before:10.2f}{after:10.2f}{after / before:8.3f}", flush=True
            )


def times(name: str, exported: Any, target: str) -> tuple[float, float]:
    """The ms of a run as exported and after the pass, as the target's compiler schedules it."""
    import stablehlo_tools
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.cost.hardware import load_hardware
    from stablehlo_tools.overlap.task_simulator import simulate
    from stablehlo_tools.targets.chips import DEFAULT_HARDWARE
    from stablehlo_tools.targets.compilation import compile_artifact
    from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

    hardware = DEFAULT_HARDWARE[target]
    given = artifact.from_exported(exported, name)
    steps = f"collective-matmul{{hardware={hardware}}}"
    if name.endswith("left to XLA"):
        steps = f"partition{{hardware={hardware}}},create-reduce-scatter,{steps}"

    def ms(program: Any) -> float:
        made = compile_artifact(program, target, 3600.0)
        profile = load_hardware(hardware)
        return simulate(hlo_task_graph(made.text, profile, made.topology.devices)).total_ns / 1e6

    return ms(given), ms(stablehlo_tools.transform(given, steps))


def programs(devices: int, platform: str) -> Iterator[tuple[str, Any]]:
    """The programs by name, exported."""
    import jax
    import jax.numpy as jnp
    from jax import export, lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    rows, columns = P(AXIS, None), P(None, AXIS)

    def gathered(x: jax.Array, dim: int = 0) -> jax.Array:
        return lax.all_gather(x, AXIS, axis=dim, tiled=True)

    def scattered(x: jax.Array, dim: int = 0) -> jax.Array:
        return lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True)

    def bf16(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def manual(function: Callable[..., Any], inputs: Any, outputs: Any, *arguments: Any) -> Any:
        step = jax.shard_map(
            function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return export.export(jax.jit(step), platforms=[platform])(*arguments)

    large = bf16(8192, 8192), bf16(8192, 28672), bf16(28672, 8192)
    yield (
        "gather, product",
        manual(lambda x, w: gathered(x) @ w, (rows, columns), columns, *large[:2]),
    )
    yield (
        "product, scatter",
        manual(lambda a, w: scattered(a @ w), (columns, rows), rows, bf16(8192, 28672), large[2]),
    )
    yield (
        "MLP",
        manual(
            lambda x, w, v: scattered(jax.nn.gelu(gathered(x) @ w) @ v),
            (rows, columns, rows),
            rows,
            *large,
        ),
    )
    put = [NamedSharding(mesh, spec) for spec in (rows, columns, rows)]
    plain = jax.jit(lambda x, w, v: jax.nn.gelu(x @ w) @ v, in_shardings=put, out_shardings=put[0])
    yield "MLP left to XLA", export.export(plain, platforms=[platform])(*large)

    def exchanged(x: jax.Array, split: int, concat: int) -> jax.Array:
        return lax.all_to_all(x, AXIS, split_axis=split, concat_axis=concat, tiled=True)

    def experts(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        tokens = exchanged(x, 0, 1)
        gate, up = (jnp.einsum("ecd,edf->ecf", tokens, each) for each in (w, u))
        return exchanged(jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, v), 1, 0)

    def experts_step(x: jax.Array, *ws: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return jnp.sum(experts(x, *weights).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, d: w - d.astype(w.dtype) / 128, ws, jax.grad(loss)(ws))

    inward, outward = bf16(devices, WIDTH, HIDDEN), bf16(devices, HIDDEN, WIDTH)
    tokens = bf16(devices, devices * CAPACITY, WIDTH)
    given, own = (P(None, AXIS), P(AXIS), P(AXIS), P(AXIS)), (P(AXIS),) * 3
    yield "experts", manual(experts, given, P(None, AXIS), tokens, inward, inward, outward)
    yield "experts, step", manual(experts_step, given, own, tokens, inward, inward, outward)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return wide.astype(x.dtype) * scale

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        whole = gathered(norm(x, w["n1"]), 1)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", whole, w[name]) for name in ("wq", "wk", "wv"))
        shares = jnp.einsum("bqhk,bshk->bhqs", q, k) / HEAD**0.5
        shares = jax.nn.softmax(shares.astype(jnp.float32)).astype(x.dtype)
        out = jnp.einsum("bhqs,bshk->bqhk", shares, v)
        x = x + scattered(jnp.einsum("bshk,hkd->bsd", out, w["wo"]), 1)
        whole = gathered(norm(x, w["n2"]), 1)
        return x + scattered((jax.nn.silu(whole @ w["w1"]) * (whole @ w["w3"])) @ w["w2"], 1)

    def weights(*stack: int) -> tuple[dict[str, Any], dict[str, Any]]:
        lead = (None,) * len(stack)
        heads, out = P(*lead, None, AXIS), P(*lead, AXIS)
        specs = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), heads)
        specs |= {"n1": P(), "n2": P(), "wo": out, "w2": out}
        shapes = dict.fromkeys(("wq", "wk", "wv"), (WIDTH, HEADS, HEAD))
        shapes |= {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
        shapes |= {"n1": (WIDTH,), "n2": (WIDTH,), "wo": (HEADS, HEAD, WIDTH)}
        return specs, {name: bf16(*stack, *shape) for name, shape in shapes.items()}

    def unrolled(x: jax.Array, ws: list[dict[str, jax.Array]]) -> jax.Array:
        for w in ws:
            x = layer(x, w)
        return x

    def scanned(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
        return lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x, ws)[0]

    def trained(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
        def step(x: jax.Array, ws: Any) -> Any:
            def loss(weights: Any) -> jax.Array:
                return jnp.sum(forward(x, weights).astype(jnp.float32) ** 2)

            return jax.tree.map(lambda w, d: w - d.astype(w.dtype) / 128, ws, jax.grad(loss)(ws))

        return step

    x, rows = bf16(BATCH, LENGTH, WIDTH), P(None, AXIS)
    specs, shapes = weights()
    several = [specs] * LAYERS, [shapes] * LAYERS
    yield "layers", manual(unrolled, (rows, several[0]), rows, x, several[1])
    yield "layers, step", manual(trained(unrolled), (rows, several[0]), several[0], x, several[1])
    specs, shapes = weights(STACKED)
    yield "scan", manual(scanned, (rows, specs), rows, x, shapes)
    yield "scan, step", manual(trained(scanned), (rows, specs), specs, x, shapes)


if __name__ == "__main__":
    main()
