"""What check-mpmd costs: seconds for a set of 64 ranks and 256 microbatches, and memory.

    python python/benchmarks/proof_cost.py [--small] [--set DIR]

expand-mpmd writes the sets first, of a step whose model has one layer a stage: a product and a tanh
(`small`), and under 1F1B attention and a feed-forward layer (`decoder`). The whole command is
timed, as a user runs it, start-up included; in turns with it what does no more than to read and
parse the files of the set. On a machine that others use, compare processor time, and its ratio to
parsing.
`--small` takes 8 ranks and 32 microbatches; `--set` times a set that is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import expand_mpmd as decoder
import jax
import jax.numpy as jnp
from jax import export, lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write

WIDTH, SAMPLES = 16, 2
MOST_SECONDS = 10.0  # of wall time, on two cores, for the full size under 1F1B
PARSE = """
import gc, sys
from pathlib import Path
from stablehlo_tools import bindings
gc.disable()
kept = []
for path in sorted(Path(sys.argv[1]).iterdir()):
    text = path.read_text()
    if path.suffix == ".mlir":
        kept.append(bindings.parse_module(text, bindings.new_context()))
sys.stdout.flush()
import os
os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    """A set: its schedule, and what its stages hold."""

    schedule: str
    model: str


CASES = (Case("1f1b", "small"), Case("zb-h1", "small"), Case("1f1b", "decoder"))


@dataclass(frozen=True)
class Times:
    """Of a command: seconds, seconds of processor time of all its processes, and its peak bytes."""

    wall: float
    processor: float
    peak: int


def small(layers: int, microbatches: int) -> export.Exported:
    """A step of gradient descent on layers of a product and a tanh, in a scan."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(x**2)

    def step(weights: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def accumulate(
            total: tuple[jax.Array, jax.Array], x: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            value, gradient = jax.value_and_grad(loss)(weights, x)
            return (total[0] + value, total[1] + gradient), None

        empty = (jnp.zeros(()), jnp.zeros_like(weights))
        (value, gradient), _ = lax.scan(accumulate, empty, xs)
        return weights - 1e-3 * gradient, value

    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    xs = jax.ShapeDtypeStruct((microbatches, SAMPLES, WIDTH), jnp.float32)
    return export.export(jax.jit(step))(weights, xs)


def write_set(directory: Path, case: Case, ranks: int, microbatches: int) -> None:
    """Writes the set, one layer a stage."""
    if case.model == "small":
        step = small(ranks, microbatches)
    else:
        decoder.LAYERS = ranks
        step = decoder.exported(microbatches)
    request = ExpansionRequest(case.schedule, ranks, load_hardware("h100"))
    written = expand_mpmd(artifact.from_exported(step), request)
    write(directory, written.manifest, written.modules)


def timed(command: list[str]) -> tuple[Times, str]:
    """The times of a command that is expected to succeed, and what it prints."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{printed}")
    return Times(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024), printed


def measure(directory: Path, name: str, repetitions: int) -> Times:
    """Times the proof and, between its runs, parsing; prints a row of the fastest of each."""
    command = [sys.executable, "-m", "stablehlo_tools.cli.main", "check-mpmd", str(directory)]
    proofs: list[Times] = []
    parses: list[Times] = []
    for _ in range(repetitions):
        parses.append(timed([sys.executable, "-c", PARSE, str(directory)])[0])
        proof, printed = timed(command)
        if not printed.startswith("proven"):
            raise SystemExit(f"unexpected verdict:\n{printed}")
        proofs.append(proof)
    best = min(proofs, key=lambda times: times.processor)
    parse = min(parses, key=lambda times: times.processor)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{name:18} {size / 2**20:6.1f} {min(p.wall for p in proofs):9.1f} {best.processor:12.1f} "
        f"{parse.processor:10.1f} {best.processor / parse.processor:7.1f} "
        f"{best.peak / 2**20:9,.0f}",
        flush=True,
    )
    return Times(min(p.wall for p in proofs), best.processor, best.peak)


def main() -> int:
    """Prints a row for each set; exit code 1 where the first one takes too long."""
    parser = argparse.ArgumentParser(description="What check-mpmd costs.")
    parser.add_argument("--small", action="store_true", help="8 ranks and 32 microbatches")
    parser.add_argument("--set", type=Path, metavar="DIR", help="time this set only")
    parser.add_argument("--repetitions", type=int, default=2, help="of each command")
    arguments = parser.parse_args()
    ranks, microbatches = (8, 32) if arguments.small else (64, 256)
    print("set                   MiB   seconds   CPU seconds   to parse   ratio   peak MiB")
    if arguments.set is not None:
        measure(arguments.set, arguments.set.name, arguments.repetitions)
        return 0
    walls: list[float] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as room:
            write_set(Path(room), case, ranks, microbatches)
            name = f"{case.schedule} {case.model}"
            walls.append(measure(Path(room), name, arguments.repetitions).wall)
    print(f"{ranks} ranks, {microbatches} microbatches; at most {MOST_SECONDS:.0f} s are promised")
    return 0 if walls[0] <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
