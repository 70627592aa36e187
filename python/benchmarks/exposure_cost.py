"""What exposure analysis costs: `inspect` and `report` of many collectives, the simulator alone.

    python python/benchmarks/exposure_cost.py

The program gathers, multiplies and slices, layer after layer, on 64 x 4 devices. Commands are timed
whole, as a user runs them, start-up included; the simulator on a graph that is in memory. The last
column is the ratio to the row above, for twice the size.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stablehlo_tools.overlap.bounds import floor, independence
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate

COLLECTIVES = (2_500, 5_000, 10_000)
TASKS = (25_000, 50_000, 100_000)
DEVICES = 256
GROUPS = [[4 * group + member for member in range(4)] for group in range(DEVICES // 4)]
ROWS, WHOLE, WEIGHTS = "tensor<1024x256xbf16>", "tensor<4096x256xbf16>", "tensor<256x256xbf16>"
LAYER = f"""
    %g{{i}} = "stablehlo.all_gather"(%x{{i}}) <{{{{all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<{GROUPS}> : tensor<{DEVICES // 4}x4xi64>, use_global_device_ids}}}}>
      : ({ROWS}) -> {WHOLE}
    %d{{i}} = stablehlo.dot_general %g{{i}}, %w, contracting_dims = [1] x [0]
      : ({WHOLE}, {WEIGHTS}) -> {WHOLE}
    %s{{i}} = stablehlo.slice %d{{i}} [0:1024, 0:256] : ({WHOLE}) -> {ROWS}
    %t{{i}} = stablehlo.tanh %s{{i}} : {ROWS}
    %x{{next}} = stablehlo.add %t{{i}}, %x{{i}} : {ROWS}"""


def program(collectives: int) -> str:
    """A module of so many layers, with a collective in each."""
    layers = "".join(LAYER.format(i=i, next=i + 1) for i in range(collectives))
    return f"""module attributes {{mhlo.num_partitions = {DEVICES} : i32}} {{
  func.func @main(%x0: {ROWS}, %w: {WEIGHTS}) -> {ROWS} {{{layers}
    return %x{collectives} : {ROWS}
  }}
}}"""


def graph(size: int) -> TaskGraph:
    """So many tasks: a tenth are collectives, on two streams that share a link, waited for late."""
    chance = random.Random(1)
    tasks = [Task(0, TaskKind.INPUT, storages=(0,), allocs=(0,))]
    storages = [100.0]
    last, started = 0, -1
    while len(tasks) < size:
        i, storage = len(tasks), len(storages)
        if i % 10 == 0:
            stream = chance.choice(["tp", "dp"])
            sent = Communication("all_gather", stream, 10, 1000, links=("ICI x",))
            ns = chance.uniform(1000, 9000)
            tasks.append(
                Task(i, TaskKind.COLLECTIVE_START, ns, (last,), (storage,), (storage,),
                     communication=sent)
            )  # fmt: skip
            storages.append(5.0)
            started = i
        elif i % 10 == 7 and started > 0:
            held = tasks[started].storages
            tasks.append(Task(i, TaskKind.WAIT, 0.0, (started,), held, (), start=started))
            last = i
        else:
            deps = tuple(sorted({last, max(0, i - chance.randrange(10, 30))}))
            tasks.append(
                Task(i, TaskKind.COMPUTE, chance.uniform(500, 1500), deps, (storage,), (storage,),
                     name=f"kernel {i}")
            )  # fmt: skip
            storages.append(7.0)
            last = i if i % 3 == 0 else last
    return TaskGraph(tasks, storages)


def main() -> None:
    """Prints the tables."""
    with tempfile.TemporaryDirectory() as directory:
        for command in ("inspect", "report"):
            print(f"{command}, start-up included")
            print(f"{'collectives':>12} {'seconds':>8} {'of the row above':>17}")
            _table(COLLECTIVES, lambda size, c=command: _command(c, size, Path(directory)))
    for name, analysis in (
        ("simulate", simulate),
        ("memory_profile", memory_profile),
        ("floor", floor),
        ("independence", lambda tasks: independence(tasks, {})),
    ):
        print(f"{name}")
        print(f"{'tasks':>12} {'seconds':>8} {'of the row above':>17}")
        _table(TASKS, lambda size, a=analysis: _timed(a, graph(size)))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"peak memory of a command: {peak:.0f} MiB")


def _table(sizes: tuple[int, ...], measured: Callable[[int], float]) -> None:
    before = 0.0
    for size in sizes:
        seconds = measured(size)
        ratio = f"x {seconds / before:.2f}" if before else ""
        print(f"{size:>12,} {seconds:>8.2f} {ratio:>17}", flush=True)
        before = seconds


def _command(command: str, collectives: int, directory: Path) -> float:
    path = directory / f"{collectives}.mlir"
    if not path.exists():
        path.write_text(program(collectives))
    words = [command, str(path), "--hardware", "tpu-v5e"]
    if command == "report":
        words += ["-o", str(directory / "report.html")]
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "stablehlo_tools.cli.main", *words],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - begin


def _timed(analysis: Callable[[TaskGraph], object], tasks: TaskGraph) -> float:
    begin = time.perf_counter()
    analysis(tasks)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
