"""What the runtime of a set costs on this machine's CPU, beside the step as it was exported.

    python python/benchmarks/mpmd_runtime.py [--repeats N] [--steps N]

The step of python/examples/train_mpmd.py. In turns, in one process: the export, and a set of one
rank; then sets of several ranks, all in one process. `ratio` is to the export, the median over the
repeats of one turn after the other. With two cores no number of ranks can be faster than the work
of one: the ratio is what cutting, copying and dispatching cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from train_mpmd import BATCH, LENGTH, batches, first_state, step_of

from stablehlo_tools import mpmd
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write

SETS = (("1f1b", 1), ("1f1b", 2), ("zb-v", 2), ("1f1b", 4), ("zb-v", 4))


def main() -> None:
    """Prints a line for each set."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    state = first_state(100)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    exported = export.export(jax.jit(step_of(100), donate_argnums=0))(shapes, tokens)
    data = list(batches(0, arguments.steps))
    print(f"{'set':24s} {'export ms':>10s} {'set ms':>10s} {'ratio':>8s}")
    for schedule, ranks in SETS:
        with tempfile.TemporaryDirectory() as directory:
            request = ExpansionRequest(schedule, ranks, load_hardware("h100"))
            made = expand_mpmd(artifact.from_exported(exported), request)
            write(directory, made.manifest, made.modules)
            with mpmd.load(directory) as job:
                pairs = timed(exported, job, data, arguments.repeats)
        plain, own = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(set_ / export_ for export_, set_ in pairs)
        name = f"{schedule}, {ranks} rank{'s' * (ranks > 1)}"
        print(f"{name:24s} {1e3 * plain:10.1f} {1e3 * own:10.1f} {ratio:8.3f}", flush=True)


def timed(
    exported: export.Exported, job: mpmd.Job, data: list[np.ndarray], repeats: int
) -> list[tuple[float, float]]:
    """Seconds of a step of the export and of the set, in turns."""
    call = jax.jit(exported.call, donate_argnums=0)
    plain = jax.tree.map(jnp.array, first_state(100))
    state = job.init(first_state(100))
    found: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        loss: Any = None
        results: Any = None
        began = time.perf_counter()
        for tokens in data:
            plain, loss = call(plain, tokens)
        jax.block_until_ready((plain, loss))
        between = time.perf_counter()
        for tokens in data:
            state, results = job.step(state, tokens)
        float(results["[1]"])
        ended = time.perf_counter()
        found.append(((between - began) / len(data), (ended - between) / len(data)))
    return found[1:]  # the first compiles


if __name__ == "__main__":
    main()
