"""The search for a pipeline schedule: against the best named one, its bound, and the optimum.

    python python/benchmarks/schedules_auto.py [--all]

Two Markdown tables. The first: p ranks, m microbatches, even and uneven stages, memory of so many
microbatches' activations a rank; the makespan of the search as a share of the best named schedule's
that fits, how far it is above the lower bound, and seconds. F = 1, I = 1.1, W = 0.8, B = I + W, a
hop 0.05, and 0.4 of an activation kept for W; uneven: every time of a stage off by up to 30 %.

The second: small settings of random times, with and without limits, against the optimum that the
tests' constraint solver proves. --all: more ranks and microbatches, more settings.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "soak"), str(HERE.parent / "tests" / "support")]

from schedule_settings import drawn_setting  # noqa: E402
from schedule_solver import solve_setting  # noqa: E402

from stablehlo_tools.schedules.catalogue import compare  # noqa: E402
from stablehlo_tools.schedules.search.auto import find_best  # noqa: E402
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs  # noqa: E402
from stablehlo_tools.schedules.validator import check  # noqa: E402

RANKS, MORE_RANKS = (4, 8), (4, 8, 16)
ROUNDS, MORE_ROUNDS = (1, 2), (1, 2, 4)  # microbatches, times p
ROOMS = (0.25, 0.5, 1.0, 2.0, None)  # microbatches a rank has room for, times p
UNEVEN = 0.3
SMALL, MORE_SMALL = (2, 3), (2, 3, 4)  # ranks against the optimum
SETTINGS, MORE_SETTINGS = 8, 40  # of each kind, against the optimum
SECONDS = 20.0  # of the solver for a setting
FULL = (1.0, 0.8)  # what a full gradient takes, as a share of its two parts
SAME = 1e-9


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    everything: bool = parser.parse_args().all
    against_named(*((MORE_RANKS, MORE_ROUNDS) if everything else (RANKS, ROUNDS)))
    print()
    against_the_optimum(*((MORE_SMALL, MORE_SETTINGS) if everything else (SMALL, SETTINGS)))


def against_named(ranks: Sequence[int], rounds: Sequence[int]) -> None:
    """The search on a grid of settings."""
    print("| p | m | stages | room | best named | makespan | auto / named | over bound | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios: list[float] = []
    gaps: list[float] = []
    for p, times, uneven, room in product(ranks, rounds, (False, True), ROOMS):
        slices = _slices(p, uneven)
        limit = None if room is None else room * p * max(slices.activation)
        setting = ScheduleSetting(p, times * p, slices, None, limit)
        begin = time.perf_counter()
        best = find_best(setting)
        seconds = time.perf_counter() - begin
        check(best.table, best.timeline.costs, limit)
        name, makespan = _best_named(setting)
        ratios.append(best.timeline.makespan / makespan)
        gaps.append(max(0.0, best.gap))
        print(
            f"| {p} | {times * p} | {'uneven' if uneven else 'even'} | "
            f"{'no limit' if room is None else f'{room * p:g}'} | {name} | {makespan:.2f} | "
            f"{ratios[-1]:.3f} | {gaps[-1]:.1%} | {seconds:.2f} |",
            flush=True,
        )
    print(
        f"\nauto / named: geometric mean {statistics.geometric_mean(ratios):.3f}, "
        f"least {min(ratios):.3f}, most {max(ratios):.3f}; over the bound: "
        f"mean {statistics.mean(gaps):.1%}, median {statistics.median(gaps):.1%}, "
        f"most {max(gaps):.1%}"
    )


def against_the_optimum(several: Sequence[int], count: int) -> None:
    """What the search loses on small settings, by what a full gradient takes."""
    print("| ranks | B / (I + W) | memory | proven | optimal | mean loss | largest | solver s |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, full, limited in product(several, FULL, (False, True)):
        losses, proven, seconds = _losses(ranks, full, limited, count)
        optimal = sum(loss < SAME for loss in losses) / max(1, len(losses))
        print(
            f"| {ranks} | {full:g} | {'limited' if limited else 'no limit'} | {proven}/{count} | "
            f"{optimal:.0%} | {statistics.mean(losses or [0.0]):.1%} | "
            f"{max(losses, default=0.0):.1%} | {seconds / count:.2f} |",
            flush=True,
        )


def _losses(ranks: int, full: float, limited: bool, count: int) -> tuple[list[float], int, float]:
    """The losses where the optimum is proven, how many those are, and the solver's seconds."""
    losses: list[float] = []
    seconds = 0.0
    for setting in _small(ranks, full, limited, count):
        found = find_best(setting).timeline
        begin = time.perf_counter()
        best = solve_setting(setting, SECONDS)
        seconds += time.perf_counter() - begin
        if best.proven:
            losses.append(found.makespan / best.timeline.makespan - 1)
    return losses, len(losses), seconds


def _small(ranks: int, full: float, limited: bool, count: int) -> Iterator[ScheduleSetting]:
    number = 0
    while count:
        setting = drawn_setting(number, ranks, 4, least=ranks, full=full)
        number += 1
        if (setting.limit is not None) == limited:
            count -= 1
            yield setting


def _slices(ranks: int, uneven: bool) -> Costs:
    dice = random.Random(ranks)

    def figures(usual: float) -> list[float]:
        return [usual * (1 + uneven * dice.uniform(-UNEVEN, UNEVEN)) for _ in range(ranks)]

    return costs(ranks, figures(1.0), figures(1.1), figures(0.8), communication=0.05, kept=0.4)


def _best_named(setting: ScheduleSetting) -> tuple[str, float]:
    """The fastest named schedule that fits, and its makespan."""
    fitting = [each for each in compare(setting, search=False).candidates if each.fits]
    best = min(fitting, key=lambda candidate: candidate.makespan, default=None)
    return ("none", float("inf")) if best is None else (best.label, best.makespan)


if __name__ == "__main__":
    main()
