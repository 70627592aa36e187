"""One training step on one GPU: jax's checkpoint policies beside `rematerialize`, run for real.

    python python/benchmarks/rematerialize_on_gpu.py --write DIR    # anywhere: the artifacts
    python rematerialize_on_gpu.py --run DIR                        # where a GPU is; jax is enough

A decoder of 16 layers (0.9 billion parameters, bfloat16 activations, Adam in float32, 8 x 2,048
tokens) as a scan, whose step without jax.checkpoint needs more than an H100 has. Each program runs
in a process of its own: the median of eight steps, and the most bytes that jax's allocator gave
out. Programs with rows in the host's memory run without command buffers, and once more without
XLA's own matrix kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

_SIZES = {
    "layers": 16,
    "d_model": 2048,
    "heads": 16,
    "d_feed_forward": 8192,
    "vocabulary": 32_000,
    "batch": 8,
    "sequence": 2048,
    "fsdp": 1,
    "model": 1,
}
_POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
_LIMITS = (40, 30, 26, 25)  # GiB
_OFFLOADED = (30, 26)
_HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
_NO_BUFFERS = f"{_HIDING} --xla_gpu_enable_command_buffer="
_LIBRARY = f"{_NO_BUFFERS} --xla_gpu_enable_triton_gemm=false"
_SAID = {_HIDING: "", _NO_BUFFERS: ", no command buffers", _LIBRARY: ", no command buffers, cuBLAS"}


def write(directory: Path) -> None:
    """The artifacts, and what is expected of them."""
    from models.zoo import MODELS

    from stablehlo_tools.analysis.tasks.graph import expected_run
    from stablehlo_tools.api.transforming import transform
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.cost.hardware import load_hardware

    directory.mkdir(exist_ok=True)
    model, hardware = MODELS["decoder-2d-scan-step"], load_hardware("h100")
    whole = artifact.from_exported(model.full(**_SIZES))
    programs = {}
    for policy in _POLICIES:
        kept = model.full(**_SIZES, remat=True, policy=policy)
        programs[policy] = artifact.from_exported(kept)
    for limit in _LIMITS:
        options = f"memory-limit={limit} margin=0 hardware=h100"
        programs[f"limit-{limit}"] = transform(whole, f"rematerialize{{{options}}}")
        if limit in _OFFLOADED:
            offloaded = transform(whole, f"rematerialize{{{options} offload}}")
            programs[f"limit-{limit}-offload"] = offloaded
    listed = {}
    for name, program in programs.items():
        artifact.save(program, directory / f"{name}.jax_export")
        run = expected_run(program.module, hardware)
        listed[name] = (run.contended_ns / 1e6, run.peak_bytes / 2**30)
    (directory / "expected.json").write_text(json.dumps(listed))


def run(directory: Path) -> None:
    """Runs each artifact in a process of its own, and prints what it took."""
    print("| program | ms | GiB | norms of gradients | expected ms | GiB |")
    print("|---|---:|---:|---|---:|---:|")
    listed = json.loads((directory / "expected.json").read_text())
    for name, (ms, gib) in listed.items():
        offloads = name.endswith("offload")
        for flags in (_HIDING, _NO_BUFFERS, _LIBRARY) if offloads else (_HIDING, _LIBRARY):
            told = subprocess.run(
                [sys.executable, __file__, "--one", str(directory / f"{name}.jax_export")],
                env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                capture_output=True,
                text=True,
                check=False,
            )
            said = told.stdout.strip() or f"failed: {told.stderr[-200:]}"
            what = _SAID[flags]
            print(f"| {name}{what} | {said} | {ms:.1f} | {gib:.2f} |", flush=True)


def one(path: Path) -> None:
    """Runs one artifact: ms of a step, GiB, and what the first step said."""
    import jax
    import jax.numpy as jnp
    from jax import export

    program = export.deserialize(bytearray(path.read_bytes()))
    program = dataclasses.replace(program, platforms=("cuda",))

    def value(number: int, aval: Any) -> jax.Array:
        key = jax.random.key(number)
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.abs(0.02 * jax.random.normal(key, aval.shape, aval.dtype))
        if aval.shape:
            return jax.random.randint(key, aval.shape, 0, _SIZES["vocabulary"], aval.dtype)
        return jnp.zeros((), aval.dtype)

    values = [value(number, aval) for number, aval in enumerate(program.in_avals)]
    (state, batch), _ = jax.tree.unflatten(program.in_tree, values)
    del values
    step = jax.jit(program.call, donate_argnums=0).lower(state, batch).compile()
    shape = jax.tree.structure(state)
    times: list[float] = []
    norms: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        results = step(state, batch)
        state, said = sorted(results, key=lambda each: jax.tree.structure(each) != shape)
        jax.block_until_ready((state, said))
        times.append(1e3 * (time.perf_counter() - start))
        norms.append(float(jax.tree.leaves(said)[0]))
    peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    print(f"{statistics.median(times[1:]):.1f} | {peak:.2f} | {norms[0]:.7f} {norms[-1]:.7f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--one", type=Path)
    arguments = parser.parse_args()
    for name, action in (("write", write), ("run", run), ("one", one)):
        if (path := getattr(arguments, name)) is not None:
            action(path)


if __name__ == "__main__":
    main()
