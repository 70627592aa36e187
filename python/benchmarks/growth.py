"""How the time of each pass and command grows with the layers of a program.

    python python/benchmarks/growth.py [--layers 8 32 128 512] [--only TEXT ...]

Two programs of written-out layers: `jit`, a sharded step with gradient and update, and `stack`, a
shard_map that gathers slices of a stack of weights. Passes on collectives run on what `partition`
makes of the first. Each run is a process of its own, of which the CPU time counts. The growth from
one size to the next is the ratio of their times, each less that at the smallest size: linear work
gives 4.2 from 128 to 512 layers. Exit code 1 if the last growth of a run is above 4.8. A refused
run is named, and a run over a minute ends its row.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.devices import mesh  # first: sets up the devices
from models.large import stacked_program

import jax  # isort: skip
import jax.numpy as jnp
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

TOOL = str(Path(sys.executable).with_name("stablehlo-tools"))
MOST_GROWTH = 4.8
LONGEST = 60.0  # seconds of CPU, after which a row has no larger size
LEAST = 0.2  # seconds of CPU above the smallest size, below which a growth is noise
EXPLICIT = "partition,create-reduce-scatter"
ON_EXPORTS = (
    "partition",
    "partition{choices=shardy}",
    "constrain-batch",
    "roll-layers",
    "fold-pipeline",
    "accumulate-gradients{microbatches=2}",
    "shard-optimizer",
)
ON_COLLECTIVES = (
    "create-reduce-scatter",
    "thread-tokens",
    "thread-tokens{minimal}",
    "bucket-collectives{hardware=h100}",
    "schedule-overlap{hardware=h100}",
    "hold-collectives",
    "pipeline-collectives",
    "reassociate-collectives",
    "hierarchical-collectives{rows=2}",
    "collective-matmul{rings=all}",
    "split-batch{parts=2}",
    "split-weight-gradients",
    "rematerialize{hardware=h100}",
    "offload{hardware=h100}",
    "roll-layers",
    "decompose-collective-permute",
    "break-permute-cycles",
)
COMMANDS = (
    ("inspect", "--hardware", "h100"),
    ("report", "--hardware", "h100", "-o", "OUT.html"),
    ("check-order", "--target", "none"),
)


@dataclass(frozen=True)
class Run:
    """A command on one of the programs, by the suffix of its file."""

    title: str
    program: str
    words: tuple[str, ...]

    def cpu_seconds(self, directory: Path, layers: int) -> float | None:
        """Returns the CPU time of a run; None if the command refuses the program."""
        given = str(directory / f"{layers}.{self.program}")
        words = [str(directory / word) if word.startswith("OUT") else word for word in self.words]
        before = os.times()
        ended = subprocess.run(
            [TOOL, words[0], given, *words[1:]], capture_output=True, check=False
        )
        after = os.times()
        used = after.children_user + after.children_system
        used -= before.children_user + before.children_system
        return used if ended.returncode in (0, 1) else None


def jit_step(layers: int) -> bytes:
    """An export of a step of written-out layers, weights and batch divided over 8 devices."""
    on = mesh(data=8)

    def loss(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(on, P("data")))
            x = x + jnp.tanh(x @ up) @ down
        return jnp.square(x).mean()

    def step(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    rows = NamedSharding(on, P("data"))
    pair = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows)
        for shape in ((1024, 4096), (4096, 1024))
    )
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=rows)
    made = export.export(jax.jit(step, donate_argnums=0))([pair] * layers, x)
    return bytes(made.serialize())


def write_programs(directory: Path, layers: int) -> None:
    """Writes the programs of one size."""
    given, explicit = (directory / f"{layers}.{kind}" for kind in ("jit", "explicit"))
    given.write_bytes(jit_step(layers))
    (directory / f"{layers}.stack").write_text(stacked_program(layers))
    opt = [TOOL, "opt", given, "-p", EXPLICIT, "-o", f"{explicit}.jax_export"]
    subprocess.run(opt, check=True, capture_output=True)
    Path(f"{explicit}.jax_export").rename(explicit)


def runs() -> Iterator[Run]:
    """Every pass on the programs that it is for, and every command."""
    for program, passes in (("jit", ON_EXPORTS), ("explicit", ON_COLLECTIVES)):
        for text in passes:
            yield Run(f"{text}", program, ("opt", "-p", text, "-o", "OUT.mlir"))
    for text in ON_COLLECTIVES:
        yield Run(f"{text}", "stack", ("opt", "-p", text, "-o", "OUT.mlir"))
    plan = (
        "plan",
        "--hardware",
        "h100",
        "--devices",
        "8",
        "--replan",
        "--axes",
        "data=8",
        "--budget",
        "0",
    )
    yield Run("plan", "jit", plan)
    for words in COMMANDS:
        for program in ("explicit", "stack"):
            yield Run(words[0], program, words)


def growth(seconds: Sequence[float]) -> list[float | None]:
    """Returns the growth from each size to the next, both less the smallest; None: too short."""
    above = [each - seconds[0] for each in seconds[1:]]
    return [later / one if one > LEAST else None for one, later in pairwise(above)]


def main() -> int:
    """Prints a row for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the titles")
    arguments = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for layers in arguments.layers:
            write_programs(directory, layers)
        print(f"{'run':40}{'program':>10}{'CPU seconds':>40}   growth")
        for run in runs():
            if not any(text in run.title for text in arguments.only):
                continue
            seconds: list[float] = []
            note = ""
            for layers in arguments.layers:
                used = run.cpu_seconds(directory, layers)
                if used is None:
                    note = f"refuses {layers} layers"
                    break
                seconds.append(used)
                if used > LONGEST:
                    break
            grown = growth(seconds) if seconds else []
            last = next((each for each in reversed(grown) if each is not None), 0.0)
            worst = max(worst, last)
            times = "".join(f"{each:10.2f}" for each in seconds)
            ratios = " ".join("-" if each is None else f"{each:.1f}" for each in grown)
            print(f"{run.title:40}{run.program:>10}{times:>40}   {ratios} {note}", flush=True)
    print(f"largest growth: {worst:.1f}; allowed: {MOST_GROWTH}")
    return int(worst > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
