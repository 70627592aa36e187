"""What check-order costs: time and memory for 64 programs, and how it grows with their size.

    python python/benchmarks/order_cost.py

Each of the 64 programs of an 8 x 8 mesh differs from the others by ops of its own, so that none is
read for another. Per layer: an all_gather and a reduce_scatter along one axis, an all_reduce along
the other, in one token chain. The whole command is timed, as a user runs it, start-up included;
no compiler is asked.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS, SIDE = 64, 8
SIZES = (500, 1000, 2000, 4000)  # collectives in each program
ROWS = [[SIDE * row + column for column in range(SIDE)] for row in range(SIDE)]
COLUMNS = [list(column) for column in zip(*ROWS, strict=True)]
SUM = """({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    })"""


def groups(rows: list[list[int]]) -> str:
    """The attributes of collectives of all partitions, for some groups; the channel is to add."""
    return f"replica_groups = dense<{rows}> : tensor<{SIDE}x{SIDE}xi64>, use_global_device_ids"


def program(collectives: int, number: int) -> str:
    """A threaded program of so many collectives; its number decides what else it computes."""
    lines = ["    %t0 = stablehlo.after_all : !stablehlo.token"]
    layer = [
        ("all_gather", f"all_gather_dim = 0 : i64, {groups(ROWS)}", "", 16, 128),
        ("all_reduce", groups(COLUMNS), SUM, 128, 128),
        ("reduce_scatter", f"scatter_dimension = 0 : i64, {groups(ROWS)}", SUM, 128, 16),
    ]
    size = 16
    for i in range(collectives):
        kind, attributes, region, before, after = layer[i % len(layer)]
        assert size == before
        before_type, after_type = f"tensor<{before}xf32>", f"tensor<{after}xf32>"
        own = "sine" if (i + number) % 7 == 0 else "tanh"
        lines += [
            f"    %y{i} = stablehlo.{own} %x{i} : {before_type}",
            f"    %i{i}:2 = stablehlo.optimization_barrier %y{i}, %t{i} : {before_type}, "
            "!stablehlo.token",
            f'    %c{i} = "stablehlo.{kind}"(%i{i}#0) <{{{attributes}, channel_handle = '
            f"#stablehlo.channel_handle<handle = {i + 1}, type = 1>}}> {region} : "
            f"({before_type}) -> {after_type}",
            f"    %o{i}:2 = stablehlo.optimization_barrier %c{i}, %i{i}#1 : {after_type}, "
            "!stablehlo.token",
            f"    %x{i + 1} = stablehlo.negate %o{i}#0 : {after_type}",
            f"    %t{i + 1} = stablehlo.after_all %o{i}#1 : !stablehlo.token",
        ]
        size = after
    lines.append(f"    return %x{collectives} : tensor<{size}xf32>")
    main = f"  func.func @main(%x0: tensor<16xf32>) -> tensor<{size}xf32> {{"
    grid = f"attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = {PROGRAMS} : i32}}"
    return "\n".join([f"module @worker_{number} {grid} {{", main, *lines, "  }", "}", ""])


def run(directory: Path, collectives: int) -> tuple[float, float, int]:
    """Of a run over fresh programs: seconds, CPU seconds, peak bytes of any one process."""
    paths = [directory / f"worker{number:02}.mlir" for number in range(PROGRAMS)]
    for number, path in enumerate(paths):
        path.write_text(program(collectives, number))
    command = [sys.executable, "-m", "stablehlo_tools.cli.main", "check-order"]
    command += ["--target", "none", *map(str, paths)]
    start, used = time.perf_counter(), cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0 or not done.stdout.startswith("ordered"):
        raise SystemExit(f"unexpected verdict:\n{done.stdout}{done.stderr}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return seconds, cpu_seconds() - used, peak


def cpu_seconds() -> float:
    """What the children that have ended used of all cores."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prints a row for each size."""
    print(f"check-order, {PROGRAMS} programs of {PROGRAMS} devices, start-up included")
    print("collectives each   seconds   CPU seconds   peak MiB of a process   CPU of the row above")
    previous = 0.0
    with tempfile.TemporaryDirectory() as name:
        for collectives in SIZES:
            seconds, used, peak = run(Path(name), collectives)
            ratio = f"x {used / previous:.2f}" if previous else ""
            row = f"{collectives:16,}   {seconds:7.1f}   {used:11.1f}   {peak / 2**20:21,.0f}"
            print(f"{row}   {ratio:>20}")
            previous = used


if __name__ == "__main__":
    main()
