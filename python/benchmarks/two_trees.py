"""What a change of structure costs: the time of commands in this tree, over that in another.

    git worktree add --detach build/before COMMIT
    python python/benchmarks/two_trees.py build/before [--rounds 7]

Both trees run in turn, each first in every other round, on the same inputs; a ratio is that of the
two medians of CPU seconds, user and system, of the command and its children. Over 1: this tree is
slower. The dependencies are those of the environment that runs this script, for both.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODELS = {
    "model": ("llama", "--layers=24", "--scan-layers=false"),
    "step": ("decoder-2d-scan-step",),
}
PIPELINE = ("--schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
COMMANDS = {
    "--help": ("--help",),
    "opt, a small module": ("opt", "small.mlir", "-p", "symbol-dce", "-o", "out.mlir"),
    "thread-tokens": ("opt", "model.mlir", "-p", "partition,thread-tokens", "-o", "out.mlirbc"),
    "partition": ("opt", "step.mlir", "-p", "partition", "-o", "out.mlirbc"),
    "inspect --hardware": ("inspect", "model.mlir", "--hardware", "h100", "--json"),
    "check-order": ("check-order", "local.mlirbc", "local.mlirbc", "--target", "none", "--json"),
    "expand-mpmd": ("expand-mpmd", "step.mlir", "-o", "ranks", *PIPELINE),
}
SMALL = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n  return %x : tensor<4xf32>\n}\n"


def main() -> None:
    """Prints a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", type=Path, help="the root of the other tree")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    trees = (arguments.before.resolve(), ROOT)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _make_inputs(directory)
        print(f"{'command':22} {'before':>9} {'now':>9} {'now/before':>11} {'wall':>6}")
        for title, words in COMMANDS.items():
            times = _times(trees, words, directory, arguments.rounds)
            cpu = [statistics.median(cpu for cpu, _ in of_tree) for of_tree in times]
            wall = [statistics.median(wall for _, wall in of_tree) for of_tree in times]
            ratios = f"{cpu[1] / cpu[0]:11.3f} {wall[1] / wall[0]:6.3f}"
            print(f"{title:22} {cpu[0]:7.2f} s {cpu[1]:7.2f} s {ratios}", flush=True)


def _make_inputs(directory: Path) -> None:
    (directory / "small.mlir").write_text(SMALL)
    script = ROOT / "python" / "models" / "export_model.py"
    for file, words in MODELS.items():
        command = [sys.executable, script, *words, "-o", directory / f"{file}.mlir"]
        subprocess.run(command, check=True)
    words = ("opt", "model.mlir", "-p", "partition,thread-tokens", "-o", "local.mlirbc")
    _run(ROOT, words, directory)


def _times(
    trees: tuple[Path, Path], words: tuple[str, ...], directory: Path, rounds: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """CPU and wall seconds of each round in both trees, the first round left out."""
    times = (list[tuple[float, float]](), list[tuple[float, float]]())
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            measured = _run(trees[side], words, directory)
            if number:
                times[side].append(measured)
    return times


def _run(tree: Path, words: tuple[str, ...], directory: Path) -> tuple[float, float]:
    """CPU and wall seconds of one run of the command."""
    shutil.rmtree(directory / "ranks", ignore_errors=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-m", "stablehlo_tools.cli.main", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, wall


if __name__ == "__main__":
    main()
