"""The schedules against their peers, and how their time grows.

    python python/benchmarks/schedules.py [--growth] [--peers] [--all]

--growth: actions, and seconds to generate, validate and simulate, for p = 64 and v = 4; the last
column is the time for an action, as a ratio to that of the first row. --peers: every schedule that
PyTorch 2.13 has, makespan and peak activations against ours, and the bubble rates of arXiv
2401.10241. Both by default; --all prints every record, not only the summary.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from schedule_peers import RATES, TORCH, at_record, like_torchs  # noqa: E402

from stablehlo_tools.schedules.catalogue import build, entries  # noqa: E402
from stablehlo_tools.schedules.setting import ScheduleSetting, costs, unit_costs  # noqa: E402
from stablehlo_tools.schedules.table_simulator import simulate  # noqa: E402
from stablehlo_tools.schedules.validator import violations  # noqa: E402

RANKS, CHUNKS = 64, 4
MICROBATCHES = (64, 128, 256, 512, 1024)
GROWING = ("interleaved-1f1b", "looped-bfs", "zb-h1", "circular", "1f1b", "zb-2p", "zb-v", "v-min")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    both = arguments.growth == arguments.peers
    if arguments.growth or both:
        growth()
    if arguments.peers or both:
        against_pytorch(arguments.all)
        against_the_paper()


def growth() -> None:
    """Times the road from a name to a checked, timed table."""
    rows: list[list[object]] = []
    for name in GROWING:
        first = 0.0
        for microbatches in MICROBATCHES:
            seconds, actions = _seconds(name, microbatches)
            each = sum(seconds) / actions
            first = first or each
            figures = [f"{part:.2f}" for part in (*seconds, sum(seconds))]
            rows.append([name, microbatches, f"{actions:,}", *figures, f"{each / first:.2f}"])
    heads = ("schedule", "m", "actions", "generate s", "validate s", "simulate s", "all s", "ratio")
    _print(heads, rows)


def _seconds(name: str, microbatches: int) -> tuple[list[float], int]:
    fixed = {entry.name: entry.chunks for entry in entries()}[name]
    chunks = CHUNKS if fixed is None else None
    setting = ScheduleSetting(RANKS, microbatches, costs(RANKS, kept=0.5), chunks)
    clock = [time.perf_counter()]
    table = build(name, setting)
    clock.append(time.perf_counter())
    assert not violations(table)
    clock.append(time.perf_counter())
    timeline = simulate(table, setting.costs(table.stages))
    assert timeline.makespan >= timeline.span
    assert timeline.messages
    assert timeline.peak_bytes
    clock.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(clock)], sum(map(len, table.rows))


def against_pytorch(everything: bool) -> None:
    """Ours against the action tables of torch.distributed.pipelining, in units of a chunk."""
    rows: list[list[object]] = []
    for record in TORCH:
        table = like_torchs(record)
        timeline = simulate(table, unit_costs(table.stages))
        rows.append(
            [
                record["schedule"],
                *(record[key] for key in ("p", "m", "v", "makespan")),
                f"{timeline.makespan:g}",
                max(record["peak_activations"]),
                max(timeline.peak_activations),
            ]
        )
    heads = ("schedule", "p", "m", "v", "torch", "ours", "torch peak", "our peak")
    _print(heads, rows if everything else _summary(rows))


def _summary(rows: list[list[Any]]) -> Iterable[list[object]]:
    for name in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == name]
        faster = sum(float(row[5]) < row[4] for row in own)
        smaller = sum(row[7] < row[6] for row in own)
        worse = sum(float(row[5]) > row[4] or row[7] > row[6] for row in own)
        yield [
            f"{name}: {len(own)} records",
            f"{faster} faster",
            f"{smaller} smaller",
            f"{worse} worse",
            *[""] * 4,
        ]


def against_the_paper() -> None:
    """Bubble rates at the settings of the tables of arXiv 2401.10241, published and ours."""
    rows: list[list[object]] = []
    names = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v")
    for record in RATES:
        row: list[object] = [record["p"], record["m"]]
        for name in names:
            published = record["rates"].get(name)
            table, figures = at_record(name, record)
            timeline = simulate(table, figures)
            by_span = name not in ("1f1b", "interleaved-1f1b", "zb-h1")
            rate = timeline.bubble_of_span if by_span else timeline.bubble
            row.append(f"{rate:.4f}" if published is None else f"{published:.4f} {rate:.4f}")
        rows.append(row)
    _print(("p", "m", *names), rows)


def _print(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    heads = tuple(heads)
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


if __name__ == "__main__":
    main()
