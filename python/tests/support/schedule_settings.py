"""Settings for searches: drawn by number, of every kind, and what their ranks have room for."""

from __future__ import annotations

import random

from stablehlo_tools.schedules.catalogue import entries
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs
from stablehlo_tools.schedules.table import Placement

SLICES = {entry.name: 2 if entry.sliced else None for entry in entries()}  # for --slices, a setting
_KINDS = ("none", "generous", "tight", "one and a half", "one")


def drawn_setting(
    number: int, ranks: int = 6, microbatches: int = 12, least: int = 1, full: float | None = None
) -> ScheduleSetting:
    """A setting of so many ranks and microbatches at most, and of so many ranks at least.

    `full`: what a full gradient takes, as a share of its two parts; drawn where it is not given.
    """
    dice = random.Random(number)
    p = least + number % (ranks + 1 - least)
    m = dice.randint(least, microbatches)
    slices = drawn_costs(dice, p, full)
    return ScheduleSetting(p, m, slices, dice.choice((None, 1, 2)), _limit(dice, number, slices))


def drawn_costs(dice: random.Random, stages: int, full: float | None = None) -> Costs:
    """Even or uneven stages; times in hundredths; `full` as above."""
    even = dice.random() < 0.4

    def figures(least: float, most: float) -> list[float]:
        drawn = [round(dice.uniform(least, most), 2) for _ in range(stages)]
        return drawn[:1] * stages if even else drawn

    split, rest = figures(0.6, 1.6), figures(0.3, 1.4)
    drawn = dice.choice((1.0, 1.0, 0.9, 0.75))
    share = drawn if full is None else full
    activation = figures(0.7, 1.4)
    kept = dice.choice((0.4, 1.0))
    return costs(
        stages,
        forward=figures(0.6, 1.6),
        input_gradient=split,
        weight_gradient=rest,
        backward=[share * (one + other) for one, other in zip(split, rest, strict=True)],
        communication=dice.choice((0.0, 0.1, 0.5)),
        activation=activation,
        kept=[kept * size for size in activation],
        weights=dice.choice(([0.0] * stages, figures(0.5, 2.0))),
    )


def microbatches_held(slices: Costs, count: float) -> float:
    """The limit with which every rank holds one slice's weights and so many microbatches."""
    held = zip(slices.weights, slices.activation, strict=True)
    return max(weights + count * activation for weights, activation in held)


def room_of(placement: Placement, costs: Costs, limit: float | None) -> list[float]:
    """The bytes that a limit leaves each rank for activations."""
    most = float("inf") if limit is None else limit
    return [most - sum(costs.weights[stage] for stage in own) for own in placement.held]


def _limit(dice: random.Random, number: int, slices: Costs) -> float | None:
    ranks = slices.stages
    kind = _KINDS[number // ranks % len(_KINDS)]
    counts = {"generous": 2.0 * ranks, "tight": ranks / 2 + 0.5, "one and a half": 1.5, "one": 1.0}
    if kind not in counts:
        return None
    return microbatches_held(slices, counts[kind] * dice.choice((1.0, 1.0, 1.1)))
