"""One export, three pipeline schedules: what a flag decides when the program is deployed.

    python pipeline_schedules.py [--keep FILE]

Exports a training step whose layers run in a `lax.scan`, sharded over eight devices (four stages,
two shares of the batch), makes it a GPipe, an interleaved and a 1F1B pipeline, and runs each on
eight virtual CPU devices on the inputs of the first. Exit code 0 when all give the same numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an export needs no accelerator

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.verify import Options, verify_artifacts

LAYERS, STAGES, MICROBATCHES = 8, 4, 4
BATCH, WIDTH, INNER = 16, 32, 64
FLAGS = ("schedule=gpipe", "schedule=circular repeats=2", "schedule=1f1b")


def step(weights: Any, batch: Any) -> Any:
    """The loss, and the weights after a step down its gradient."""

    def layer(hidden: jax.Array, w: Any) -> tuple[jax.Array, None]:
        scale = lax.rsqrt(jnp.mean(hidden * hidden, -1, keepdims=True) + 1e-5)
        return hidden + jax.nn.gelu(hidden * scale @ w["up"]) @ w["down"], None

    def loss(weights: Any) -> jax.Array:
        hidden, _ = lax.scan(layer, batch["inputs"] @ weights["first"], weights["layers"])
        return jnp.mean(jnp.square(hidden @ weights["last"] - batch["targets"]))

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def exported() -> export.Exported:
    """The step for a mesh of stages and shares of the batch, as any JAX program is exported."""
    mesh = AbstractMesh((STAGES, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

    def array(*sizes: int, axes: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, axes))

    weights = {
        "first": array(WIDTH, WIDTH, axes=P()),
        "layers": {
            "up": array(LAYERS, WIDTH, INNER, axes=P("stage")),
            "down": array(LAYERS, INNER, WIDTH, axes=P("stage")),
        },
        "last": array(WIDTH, WIDTH, axes=P()),
    }
    rows = array(BATCH, WIDTH, axes=P("data"))
    return export.export(jax.jit(step))(weights, {"inputs": rows, "targets": rows})


def main() -> int:
    """Runs the example; 1 where a schedule changes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the export there")
    arguments = parser.parse_args()
    program = exported()
    if arguments.keep is not None:
        arguments.keep.write_bytes(program.serialize())
    try:
        return 0 if all_schedules(program) else 1
    except stablehlo_tools.ToolError as error:
        print(error, file=sys.stderr)
        return 1


def all_schedules(program: export.Exported) -> bool:
    """Whether every schedule gives the numbers of the export."""
    before = from_exported(program, "step.jax_export")
    print(
        f"\nOne export of a training step, {LAYERS} layers in a scan, for {STAGES} stages x 2 "
        "shares of the batch.\nThe schedule is a flag:",
        flush=True,
    )
    kept = True
    for flag in FLAGS:
        started = time.perf_counter()
        after = before.copy()
        expand = f"expand-pipeline{{microbatches={MICROBATCHES} {flag} explain=true}}"
        told = run_pipeline(after, Pipeline.parse(f"{expand},partition"))
        done = verify_artifacts(before, after, Options(trials=1))
        kept = kept and done.same
        print(
            f"expand-pipeline{{microbatches={MICROBATCHES} {flag}}}",
            *(f"  {note.message.partition(': ')[2]}" for note in told.collected),
            f"  {len(done.outputs)} outputs, {done.elements:,} elements, exactly: "
            f"{'the same' if done.same else 'THEY DIFFER'} [{time.perf_counter() - started:.1f} s]",
            sep="\n",
            flush=True,
        )
    return kept


if __name__ == "__main__":
    sys.exit(main())
