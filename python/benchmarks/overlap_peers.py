"""The scheduler against PyTorch's, how its time grows, and what it loses against the best.

    python python/benchmarks/overlap_peers.py [--exact [GRAPHS]] [--held-out]

Totals are in ms, with a GiB more memory than the graph's own order needs. PyTorch 2.13's figures
are its best with and without buckets on the same graphs, measured once. `bound` is proven: no order
and no buckets are faster, even without a memory limit. --exact: random graphs of 10 to 30 tasks, so
many of each family, against the tests' constraint solver. --held-out: 2 to 32 layers, one sequence
a rank, other links.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "soak"), str(HERE.parent / "tests" / "support")]

from overlap_bound import best_possible  # noqa: E402
from overlap_solver import solve_graph  # noqa: E402
from peers_like import GRAPHS, deeper, peers  # noqa: E402
from scheduler_graphs import FAMILIES, drawn, peak_bytes, total_ns  # noqa: E402

from stablehlo_tools.overlap.graph_file import read_graph  # noqa: E402
from stablehlo_tools.overlap.scheduling.scheduler import OverlapSchedule, ScheduleLimits, schedule  # noqa: E402
from stablehlo_tools.overlap.task_graph import TaskGraph  # noqa: E402
from stablehlo_tools.overlap.task_memory import memory_profile  # noqa: E402

GIB = 2**30
# Of each graph: ms and, where it is known, seconds of PyTorch's scheduler with bucketing.
PYTORCH: dict[str, tuple[float, float | None]] = {
    "llama2d_2_fwd": (13.8, None),
    "llama2d_2_bwd": (26.1, None),
    "llama2d_2_fwdbwd": (37.4, 0.45),
    "llama2d_8_fwd": (31.7, None),
    "llama2d_8_bwd": (51.8, None),
    "llama2d_8_fwdbwd": (81.3, 2.4),
}
MORE_LAYERS = (0, 24, 72, 152)  # of the joint graph: 2,630 tasks and 312 more for each
ROOMS = (1.0, 1.15, float("inf"))  # memory limits, times the peak of the graph's own order
SECONDS = 10.0  # of the solver for a graph
_SMALL = 3000  # tasks: the bound takes their square


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exact", metavar="GRAPHS", nargs="?", const=40, type=int)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    compare_with_pytorch()
    growth()
    if arguments.held_out:
        held_out()
    if arguments.exact:
        against_the_best(arguments.exact)


def compare_with_pytorch() -> None:
    """The six graphs of the peers."""
    print(
        f"{'graph':18} {'input':>8} {'PyTorch':>8} {'ours':>8} {'ratio':>6} {'floor':>7} "
        f"{'bound':>7} {'peak GiB':>8} {'limit':>6} {'seconds':>8} {'PyTorch':>8}"
    )
    ratios: list[float] = []
    for name, (pytorch, its_seconds) in PYTORCH.items():
        graph = read_graph(GRAPHS / f"{name}.json.gz")
        found, limit, seconds = _scheduled(graph)
        ratios.append(found.total_ns / 1e6 / pytorch)
        its = "" if its_seconds is None else f"{its_seconds:.2f}"
        print(
            f"{name:18} {found.before_ns / 1e6:>8.2f} {pytorch:>8.2f} {found.total_ns / 1e6:>8.2f} "
            f"{ratios[-1]:>6.3f} {found.floor_ns / 1e6:>7.2f} {best_possible(graph) / 1e6:>7.2f} "
            f"{found.peak_bytes / GIB:>8.2f} {limit / GIB:>6.2f} {seconds:>8.2f} {its:>8}",
            flush=True,
        )
    print(f"{'geometric mean':45} {statistics.geometric_mean(ratios):>6.3f}\n")


def growth() -> None:
    """The scheduler's own time on the joint graph, with more layers."""
    print(f"{'tasks':>8} {'seconds':>8} {'µs a task':>10} {'buckets':>8}")
    joint = read_graph(GRAPHS / "llama2d_8_fwdbwd.json.gz")
    for layers in MORE_LAYERS:
        graph = deeper(joint, layers)
        found, _, seconds = _scheduled(graph)
        count = len(graph.tasks)
        each = seconds / count * 1e6
        print(f"{count:>8,} {seconds:>8.2f} {each:>10.0f} {len(found.buckets):>8}", flush=True)
    print()


def held_out() -> None:
    """Graphs like the peers', of other sizes, batches and links; also without a memory limit."""
    print(
        f"{'graph':32} {'tasks':>7} {'input':>8} {'PyTorch':>8} {'ours':>8} {'ratio':>6} "
        f"{'no limit':>8} {'bound':>8} {'seconds':>8}"
    )
    ratios: list[float] = []
    bounds: list[float] = []
    for peer in peers():
        graph = peer.graph()
        found, _, seconds = _scheduled(graph)
        ratios.append(found.total_ns / 1e6 / peer.pytorch_ms)
        small = len(graph.tasks) < _SMALL
        bound = best_possible(graph) if small else 0.0
        if small:
            bounds.append(bound / 1e6 / peer.pytorch_ms)
        free = schedule(graph)
        print(
            f"{peer!s:32} {len(graph.tasks):>7,} {found.before_ns / 1e6:>8.2f} "
            f"{peer.pytorch_ms:>8.2f} {found.total_ns / 1e6:>8.2f} {ratios[-1]:>6.3f} "
            f"{free.total_ns / 1e6:>8.2f} {f'{bound / 1e6:.2f}' if small else '':>8} "
            f"{seconds:>8.2f}",
            flush=True,
        )
    print(
        f"geometric mean {statistics.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}; of "
        f"those with a bound, the bound {statistics.geometric_mean(bounds):.3f} of PyTorch\n"
    )


def against_the_best(count: int) -> None:
    """How much longer the scheduler's orders take than the best ones."""
    print(
        f"{'family':16} {'memory':>9} {'proven':>8} {'optimal':>8} {'mean':>7} {'p90':>7} "
        f"{'max':>7} {'solver s':>9}"
    )
    for family in FAMILIES:
        for room in ROOMS:
            losses, seconds = _losses(family, room, count)
            ranked = sorted(losses)
            limit = "no limit" if math.isinf(room) else f"{room:g} own"
            print(
                f"{family:16} {limit:>9} {len(losses):>4}/{count:<3} "
                f"{sum(loss < 1e-9 for loss in losses) / len(losses):>8.0%} "
                f"{statistics.mean(losses):>7.1%} {ranked[int(0.9 * len(ranked))]:>7.1%} "
                f"{ranked[-1]:>7.1%} {seconds / count:>9.2f}",
                flush=True,
            )


def _losses(family: str, room: float, count: int) -> tuple[list[float], float]:
    losses: list[float] = []
    begin = time.perf_counter()
    for seed in range(count):
        graph = drawn(family, seed)
        limits = ScheduleLimits(memory=room * memory_profile(graph).peak_bytes)
        best = solve_graph(graph, limits, SECONDS)
        if best.proven and best.total_ns:
            losses.append(schedule(graph, limits).total_ns / best.total_ns - 1)
    return losses, time.perf_counter() - begin


def _scheduled(graph: TaskGraph) -> tuple[OverlapSchedule, float, float]:
    """The schedule with a GiB of room, judged apart from the scheduler; the limit; seconds."""
    limit = memory_profile(graph).peak_bytes + GIB
    begin = time.perf_counter()
    found = schedule(graph, ScheduleLimits(memory=limit))
    seconds = time.perf_counter() - begin
    assert math.isclose(found.total_ns, total_ns(graph, found.order, found.buckets))
    assert peak_bytes(graph, found.order) <= limit
    return found, limit, seconds


if __name__ == "__main__":
    main()
