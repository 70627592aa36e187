"""What `thread-tokens` costs: against compiling the same program, and as programs grow.

    python threading_cost.py [--quick]

Two promises, measured from outside on whole processes, the runs of what is compared taking turns:

  cost    `stablehlo-tools opt STEP.jax_export -p thread-tokens -o OUT.jax_export` takes less than
          5 % of the time that XLA:CPU takes to compile STEP, a program of about 27,000 ops
  growth  four times the ops take at most 4.6 times as long, the whole process and the pass alone;
          of layers that slice a stack of weights, less the time of a program of one layer

Prints tables of medians and one line of JSON. Exit code 1 when a promise is broken; `--quick` runs
smaller programs, judges growth only, and takes half a minute instead of several.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.devices import mesh
from models.large import UNROLLED_OPS_PER_LAYER, stacked_program, unrolled_step, wide_program

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.bindings import ir

MOST_COST = 0.05
MOST_GROWTH = 4.6  # for four times the ops
OPT = Path(sys.executable).with_name("stablehlo-tools")


@dataclass(frozen=True)
class Plan:
    """What to run: sizes, each four times the one before, and repetitions."""

    step_layers: int
    layers: tuple[int, ...]
    collectives: tuple[int, ...]
    stacked: tuple[int, ...]
    rounds: int  # of opt and a compilation of its input
    repetitions: int  # of opt for each size


FULL = Plan(400, (15, 60, 240), (625, 2500, 10_000), (240, 960, 3840), rounds=2, repetitions=9)
QUICK = Plan(60, (15, 60), (2500, 10_000), (240, 960), rounds=1, repetitions=5)


@dataclass
class Program:
    """A program on disk and the seconds that were measured on it."""

    path: Path
    ops: int
    collectives: int
    whole: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """Where `opt` writes the threaded program."""
        return self.path.with_suffix(f".out{self.path.suffix}")

    def thread(self) -> None:
        """Runs `opt` once, noting the time of the process and that of the pass in it."""
        command = [OPT, "opt", self.path, "-p", "thread-tokens", "-o", self.output, "--time-passes"]
        started = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        self.whole.append(time.perf_counter() - started)
        total = re.search(r"([\d.]+) s +total", ended.stderr)
        assert total is not None, ended.stderr
        self.alone.append(float(total.group(1)))


def main() -> int:
    """Runs the benchmark; 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller programs, fewer runs")
    parser.add_argument("--compile", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        print(compile_seconds(arguments.compile))
        return 0
    plan = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as directory:
        cost = measure_cost(plan, Path(directory))
        growth = measure_growth(plan, Path(directory))
    highest = max(ratio for ratios in growth.values() for ratio in ratios)
    say(f"highest growth: {highest:.2f} (promised: at most {MOST_GROWTH})")
    say(json.dumps({"cost": cost, "growth": growth, "quick": arguments.quick}))
    return int(highest > MOST_GROWTH or (cost > MOST_COST and not arguments.quick))


def measure_cost(plan: Plan, directory: Path) -> float:
    """Time of `opt` over the time that XLA:CPU takes to compile its input."""
    say(f"cost: a training step of {plan.step_layers} unrolled layers; exporting it")
    step = build_step(plan.step_layers, directory)
    say(f"  {step.ops:,} ops, {step.collectives:,} collectives")
    compiled: dict[str, list[float]] = {"as exported": [], "threaded": []}
    for name in (*["as exported"] * plan.rounds, "threaded"):
        for _ in range(3):
            step.thread()
        path = step.output if name == "threaded" else step.path
        compiled[name].append(compile_in_child(path))
        say(
            f"  opt took {median(step.whole[-3:]):.2f} s; XLA:CPU compiled it {name} in "
            f"{compiled[name][-1]:.1f} s"
        )
    ratio = median(step.whole) / median(compiled["as exported"])
    say(
        "  median (least, most) in seconds, of so many runs",
        f"  {'opt, the whole process':34}{spread(step.whole)}",
        f"  {'  thread-tokens in it':34}{spread(step.alone)}",
        *(f"  {f'XLA:CPU compile, {name}':34}{spread(runs)}" for name, runs in compiled.items()),
        f"  opt / compile: {100 * ratio:.1f} % (promised for 27,000 ops: under "
        f"{100 * MOST_COST:.0f} %)",
        "",
    )
    return round(ratio, 4)


def measure_growth(plan: Plan, directory: Path) -> dict[str, list[float]]:
    """By program and by what was timed: each size's time over that of a quarter of it.

    A ratio is the median of those of runs that followed one another, so that what else the
    machine does weighs on both alike.
    """
    say("growth: each row has four times the ops of the row above; median seconds and ratios")
    families = {
        "unrolled layers": [build_step(layers, directory) for layers in plan.layers],
        "independent collectives": [build_wide(count, directory) for count in plan.collectives],
        "layers of a stack": [build_stacked(layers, directory) for layers in plan.stacked],
    }
    one = {"layers of a stack": build_stacked(1, directory)}
    growth: dict[str, list[float]] = {}
    for name, programs in families.items():
        for _ in range(plan.repetitions):
            for program in [*programs, *([one[name]] if name in one else [])]:
                program.thread()
        fixed = one.get(name, Program(directory, 0, 0))
        whole = growth[f"{name}, whole process"] = ratios([p.whole for p in programs], fixed.whole)
        alone = growth[f"{name}, pass alone"] = ratios([p.alone for p in programs], fixed.alone)
        say(f"  {name:24}{'ops':>9}{'collectives':>13}{'opt':>9}{'x':>7}{'pass':>9}{'x':>7}")
        for program, *times in zip(programs, [None, *whole], [None, *alone], strict=True):
            cells = [
                f"{median(seconds):>9.3f}{'' if ratio is None else f'{ratio:.2f}':>7}"
                for seconds, ratio in zip((program.whole, program.alone), times, strict=True)
            ]
            say(f"  {'':24}{program.ops:>9,}{program.collectives:>13,}{''.join(cells)}")
    return growth


def build_step(layers: int, directory: Path) -> Program:
    """The unrolled step as a jax.export file, its size checked against what the model says."""
    path = directory / f"step{layers}.jax_export"
    path.write_bytes(unrolled_step(layers).serialize())
    program = measured(path)
    expected = layers * UNROLLED_OPS_PER_LAYER
    assert expected <= program.ops <= expected + 50, (program.ops, expected)
    return program


def build_wide(collectives: int, directory: Path) -> Program:
    """Independent collectives as MLIR text."""
    path = directory / f"wide{collectives}.mlir"
    path.write_text(wide_program(collectives))
    program = measured(path)
    assert program.collectives == collectives, program.collectives
    return program


def build_stacked(layers: int, directory: Path) -> Program:
    """Written-out layers of one stack of weights and gradients, as MLIR text."""
    path = directory / f"stacked{layers}.mlir"
    path.write_text(stacked_program(layers))
    program = measured(path)
    assert program.collectives == 2 * layers, program.collectives
    return program


def measured(path: Path) -> Program:
    """A program with its ops, bodies of reductions included, and its collectives counted."""
    module = stablehlo_tools.load(path).module
    ops = 0

    def count(_: ir.Operation) -> ir.WalkResult:
        nonlocal ops
        ops += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(count)
    return Program(path, ops, len(find_collectives(module)))


def compile_in_child(path: Path) -> float:
    """Seconds that XLA:CPU takes in a process of its own."""
    command = [sys.executable, __file__, "--compile", path]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def compile_seconds(path: Path) -> float:
    """Compiles an unrolled step as its user would; the seconds of the compiler alone."""
    import jax
    from jax import export

    exported = export.deserialize(bytearray(path.read_bytes()))
    devices = mesh(fsdp=4, model=2)
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(
            exported.in_avals, exported.in_shardings_jax(devices), strict=True
        )
    ]
    arguments, _ = jax.tree.unflatten(exported.in_tree, shapes)
    lowered = jax.jit(exported.call).lower(*arguments)
    started = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - started


def ratios(seconds: Sequence[Sequence[float]], fixed: Sequence[float]) -> list[float]:
    """Of the runs of each size over those of the size before, the median of their ratios.

    `fixed`, if given, are the seconds of runs beside them, which are subtracted from both.
    """
    less = fixed or [0.0] * len(seconds[0])
    return [
        round(median((b - f) / (a - f) for a, b, f in zip(smaller, larger, less, strict=True)), 3)
        for smaller, larger in itertools.pairwise(seconds)
    ]


def spread(seconds: Sequence[float]) -> str:
    """`1.62 (1.58, 1.70) of 6`."""
    return f"{median(seconds):7.2f} ({min(seconds):.2f}, {max(seconds):.2f}) of {len(seconds)}"


def say(*lines: str) -> None:
    """Prints at once, so that progress shows through a pipe, too."""
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
