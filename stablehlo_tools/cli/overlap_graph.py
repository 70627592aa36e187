"""Schedule a task graph so that compute hides its communication, within a memory limit.

GRAPH is a task graph in JSON, gzipped or not. SCHEDULE gets the order of its tasks and the buckets
of its collectives. Prints totals, the floor (a lower bound for every order without buckets),
collectives and memory, before and after.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from stablehlo_tools.cli.shared_arguments import amount, positive, positive_amount
from stablehlo_tools.diagnostics import GIB

if TYPE_CHECKING:
    from stablehlo_tools.overlap.scheduling.scheduler import OverlapSchedule, ScheduleLimits
    from stablehlo_tools.overlap.task_graph import TaskGraph
    from stablehlo_tools.overlap.task_simulator import CollectiveFlight

_ROOM = GIB  # the default limit exceeds the peak of the graph's own order by this
_HIDDEN_NS = 1  # a collective that stalls the device for less is hidden


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `overlap-graph` to its parser."""
    parser.add_argument("graph", metavar="GRAPH", help="a task graph, .json or .json.gz")
    parser.add_argument(
        "-o", "--output", metavar="SCHEDULE", required=True, help="the schedule, .json"
    )
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=amount,
        help="limit of live memory at any time in GiB (default: the peak of the graph's own order "
        "+ 1 GiB)",
    )
    parser.add_argument(
        "--in-flight",
        metavar="N",
        type=positive,
        help="most transfers in flight on one stream, issued and not yet waited for",
    )
    parser.add_argument("--no-buckets", action="store_true", help="do not bucket collectives")
    parser.add_argument(
        "--no-compute-reorder", action="store_true", help="keep the order of the main compute"
    )
    parser.add_argument(
        "--compute-overlap-multiplier",
        metavar="X",
        type=positive_amount,
        default=1.0,
        help="share of compute time that hides transfers in the plan (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Writes the schedule and prints the table. Raises ToolError before anything is written."""
    from stablehlo_tools.diagnostics import naming
    from stablehlo_tools.files.atomic import check_writable, write_atomically
    from stablehlo_tools.overlap.graph_file import encode_schedule, read_graph
    from stablehlo_tools.overlap.scheduling.scheduler import schedule

    check_writable(arguments.output)
    graph = read_graph(arguments.graph)
    from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits
    from stablehlo_tools.overlap.task_memory import memory_profile

    memory = arguments.memory_limit
    limits = ScheduleLimits(
        memory=memory_profile(graph).peak_bytes + _ROOM if memory is None else memory * GIB,
        in_flight=arguments.in_flight,
        buckets=not arguments.no_buckets,
        reorder_compute=not arguments.no_compute_reorder,
        compute_overlap_multiplier=arguments.compute_overlap_multiplier,
    )
    begin = time.perf_counter()
    with naming(arguments.graph):
        new_schedule = schedule(graph, limits)
    facts = _facts(graph, new_schedule, limits, time.perf_counter() - begin)
    write_atomically(arguments.output, encode_schedule(new_schedule.order, new_schedule.buckets))
    print(json.dumps(facts, indent=1) if arguments.json else _table(facts, arguments.memory_limit))
    return 0


def _facts(
    graph: TaskGraph, schedule: OverlapSchedule, limits: ScheduleLimits, seconds: float
) -> dict[str, Any]:
    """Returns the figures of the table; times in ms, memory in GiB."""
    from stablehlo_tools.overlap.bounds import potentially_hidden
    from stablehlo_tools.overlap.task_simulator import simulate

    potential = potentially_hidden(graph)
    before = simulate(graph)
    timed = simulate(graph, schedule.order, schedule.buckets)
    flights = list(timed.run.all_flights())
    earlier = list(before.run.all_flights())
    return {
        "total_ms": timed.total_ns / 1e6,
        "before_ms": before.total_ns / 1e6,
        "floor_ms": schedule.floor_ns / 1e6,
        "gap": schedule.gap,
        "exposed_ms": timed.exposed_ns / 1e6,
        "exposed_before_ms": before.exposed_ns / 1e6,
        "collectives": len(earlier),
        "launched": len(flights),
        "hidden": sum(flight.stall < _HIDDEN_NS for flight in flights),
        "hidden_before": sum(flight.stall < _HIDDEN_NS for flight in earlier),
        "potentially_hidden": len(potential),
        "hidden_in_part": len(potential - _exposed_whole(flights)),
        "hidden_in_part_before": len(potential - _exposed_whole(earlier)),
        "buckets": len(schedule.buckets),
        "bucketed": sum(map(len, schedule.buckets)),
        "peak_gib": schedule.peak_bytes / GIB,
        "peak_before_gib": schedule.before_bytes / GIB,
        "limit_gib": limits.memory / GIB,
        "seconds": seconds,
    }


def _exposed_whole(flights: list[CollectiveFlight]) -> set[int]:
    """Returns the starts of collectives that are fully exposed."""
    return {s for flight in flights if flight.stall > flight.ns - _HIDDEN_NS for s in flight.starts}


def _table(facts: dict[str, Any], asked: float | None) -> str:
    gap, limit = facts["gap"], "the peak before + 1 GiB" if asked is None else "as asked"
    lines = [
        f"{'':12} {'before':>12} {'after':>12}",
        f"{'total':12} {facts['before_ms']:>9.3f} ms {facts['total_ms']:>9.3f} ms",
        f"{'floor':12} {'':12} {facts['floor_ms']:>9.3f} ms   unbucketed; "
        f"after is {abs(gap):.1%} {'above' if gap >= 0 else 'below'} it",
        f"{'exposed':12} {facts['exposed_before_ms']:>9.3f} ms {facts['exposed_ms']:>9.3f} ms",
        f"{'collectives':12} {facts['collectives']:>12,} {facts['launched']:>12,}   "
        f"{facts['buckets']} buckets of {facts['bucketed']}",
        f"{'hidden':12} {facts['hidden_before']:>12,} {facts['hidden']:>12,}",
        f"{'partly':12} {facts['hidden_in_part_before']:>12,} {facts['hidden_in_part']:>12,}   "
        f"of {facts['potentially_hidden']} that could be, as PyTorch counts",
        f"{'peak':12} {facts['peak_before_gib']:>8.3f} GiB {facts['peak_gib']:>8.3f} GiB   "
        f"limit {facts['limit_gib']:.3f} GiB, {limit}",
        f"{'scheduled in':12} {'':12} {facts['seconds']:>10.2f} s",
    ]
    return "\n".join(lines)
