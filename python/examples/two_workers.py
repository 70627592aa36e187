"""Two workers that wait for each other for ever, and the two commands that find and repair it.

    python two_workers.py [--keep DIR]

Two workers train one model with fully sharded data parallelism; each traces, exports and compiles
the step by itself. Someone looks for a NaN and guards the gradient of the weights on worker 1: one
op more, and XLA:CPU issues the step's collectives in another order there. The two processes hang.
`check-order` compiles both programs and says so beforehand. The programs of `align-order` finish,
with the values of NumPy. It runs for 1 to 2 minutes without an accelerator. Exit code 0 if so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models` and `workers`

from models.devices import mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workers.run import Array, State, Worker, run_workers

import stablehlo_tools
from stablehlo_tools.targets.compilation import compile_artifact

WORKERS = 2
AXIS = "workers"
FEATURES, OUTPUTS, EXAMPLES = 16, 8, 32  # of the model, and of a batch
RATE = 0.1
MAY_DEADLOCK = 1  # the exit code of check-order when it says no


def loss(weights: jax.Array, bias: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The model: one layer, and the mean of the squared errors."""
    return jnp.mean((jnp.tanh(x @ weights + bias) - y) ** 2)


def step(
    weights: jax.Array, bias: jax.Array, x: jax.Array, y: jax.Array, *, guarded: bool
) -> tuple[jax.Array, jax.Array]:
    """What each worker runs: a shard of the weights and of the batch, and the whole bias."""
    whole = lax.all_gather(weights, AXIS, tiled=True)
    of_weights, of_bias = jax.grad(loss, argnums=(0, 1))(whole, bias, x, y)
    if guarded:
        of_weights = jnp.nan_to_num(of_weights)  # the only difference between the workers
    of_bias = lax.psum(of_bias, AXIS) / WORKERS
    of_weights = lax.psum_scatter(of_weights, AXIS, tiled=True) / WORKERS
    return weights - RATE * of_weights, bias - RATE * of_bias


def export_step(*, guarded: bool) -> export.Exported:
    """The step of one worker, as that worker exports it."""
    devices = mesh(**{AXIS: WORKERS})
    specs = (P(AXIS), P(), P(AXIS), P(AXIS))
    shapes = ((FEATURES, OUTPUTS), (OUTPUTS,), (EXAMPLES, FEATURES), (EXAMPLES, OUTPUTS))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(devices, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    local = partial(step, guarded=guarded)
    sharded = jax.shard_map(
        local, mesh=devices, in_specs=specs, out_specs=specs[:2], check_vma=False
    )
    return export.export(jax.jit(sharded))(*arguments)


def main() -> int:
    """Tells the story; 1 where it goes otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files there")
    arguments = parser.parse_args()
    if arguments.keep is None:
        with tempfile.TemporaryDirectory() as directory:
            return tell(Path(directory))
    arguments.keep.mkdir(parents=True, exist_ok=True)
    return tell(arguments.keep)


def tell(directory: Path) -> int:
    """The six steps, with the files in `directory`."""
    started = time.perf_counter()
    inputs = make_inputs()
    programs = [directory / f"worker{rank}.jax_export" for rank in range(WORKERS)]
    aligned = [directory / "aligned" / program.name for program in programs]

    say("1 Each worker exports its own step; only worker 1 guards a gradient against NaN")
    for program, guarded in zip(programs, (False, True), strict=True):
        program.write_bytes(export_step(guarded=guarded).serialize())
        say(f"    {program.name}: {program.stat().st_size:,} bytes")

    say("", "2 Can they wait for each other for ever?")
    doubted = tool(directory, "check-order", *programs) == MAY_DEADLOCK

    say("", "3 Run them: two processes, a device each, connected by gloo")
    show_schedules(programs)
    before = show_run(run_workers(programs, inputs))
    hung = all(worker.state is State.HUNG for worker in before)

    say("", "4 Give both one order")
    if tool(directory, "align-order", *programs, "-o", aligned[0].parent) != 0:
        return 1

    say("", "5 And now?")
    ordered = tool(directory, "check-order", *aligned) == 0

    say("", "6 Run what was written")
    show_schedules(aligned)
    after = show_run(run_workers(aligned, inputs))
    right = right_values(after, inputs)
    say(f"    values: {'as NumPy computes them' if right else 'WRONG'}")
    say("", f"{time.perf_counter() - started:.0f} s")
    return 0 if doubted and hung and ordered and right else 1


def tool(directory: Path, *words: str | Path) -> int:
    """Runs a command of stablehlo-tools in `directory`, shows what it prints, returns its code."""
    shown = [str(w.relative_to(directory)) if isinstance(w, Path) else w for w in words]
    say(f"    $ stablehlo-tools {' '.join(shown)}")
    done = subprocess.run(
        [sys.executable, "-m", "stablehlo_tools.cli.main", *shown],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.replace(f"{Path(__file__).parent}/", "").splitlines()
    say(*(f"    {line}" for line in lines), f"    (exit code {done.returncode})")
    return done.returncode


def show_schedules(programs: Sequence[Path]) -> None:
    """The order in which XLA:CPU issues the collectives of each program."""
    for rank, program in enumerate(programs):
        compiled = compile_artifact(stablehlo_tools.load(program), "cpu")
        kinds = {op.id: op.kind for op in compiled.tagged}
        issued = [kinds[i] for e in compiled.schedule.events if e.issues for i in e.ids]
        say(f"    worker {rank} issues {', '.join(issued)}")


def show_run(workers: list[Worker]) -> list[Worker]:
    """What became of each worker."""
    for rank, worker in enumerate(workers):
        killed = ": killed" if worker.state is State.HUNG else ""
        say(f"    worker {rank} {worker.state.value} after {worker.seconds:.2f} s{killed}")
        if worker.state is State.FAILED:
            say(worker.errors)
    return workers


def make_inputs() -> list[list[Array]]:
    """What each worker holds: its shard of the weights, the bias, its shard of the batch."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    bias = numbers(OUTPUTS)
    return [
        [
            numbers(FEATURES // WORKERS, OUTPUTS),
            bias,
            numbers(EXAMPLES // WORKERS, FEATURES),
            numbers(EXAMPLES // WORKERS, OUTPUTS),
        ]
        for _ in range(WORKERS)
    ]


def right_values(workers: Sequence[Worker], inputs: Sequence[Sequence[Array]]) -> bool:
    """Whether all finished with what one step on the whole batch makes of the parameters."""
    if any(worker.state is not State.FINISHED for worker in workers):
        return False
    weights, x, y = (np.concatenate([own[i] for own in inputs]) for i in (0, 2, 3))
    bias = inputs[0][1]
    guess = np.tanh(x @ weights + bias)
    slope = 2 * (guess - y) * (1 - guess**2) / y.size
    shards = np.split(weights - RATE * x.T @ slope, WORKERS)
    new_bias = bias - RATE * slope.sum(0)
    return all(
        np.allclose(found, expected, rtol=1e-5, atol=1e-6)
        for worker, shard in zip(workers, shards, strict=True)
        for found, expected in zip(worker.outputs, (shard, new_bias), strict=True)
    )


def say(*lines: str) -> None:
    """Prints at once, so that progress shows through a pipe, too."""
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
