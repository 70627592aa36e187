"""The minimum cut against all choices, on small random graphs."""

from __future__ import annotations

import random
from itertools import pairwise, product
from math import inf

import pytest
from soaking import first

from stablehlo_tools.transforms.parts.rematerialize import residual_cut
from stablehlo_tools.transforms.parts.rematerialize.residual_cut import (
    CutValue,
    KeepOrRepeat,
    Repeatable,
)


def random_choice(draw: random.Random) -> KeepOrRepeat:
    """Ops in order, each with a result or two, some that cannot run again."""
    choice = KeepOrRepeat([CutValue(1.0, draw.randint(1, 9), None) for _ in range(2)])
    for _ in range(draw.randint(1, 5)):
        reads = draw.sample(range(len(choice.values)), draw.randint(0, 2))
        ns = inf if draw.random() < 0.2 else float(draw.randint(0, 20))
        choice.ops.append(Repeatable(ns, tuple(reads)))
        for _ in range(draw.randint(1, 2)):
            maker = len(choice.ops) - 1
            choice.values.append(CutValue(draw.randint(0, 3), draw.randint(1, 9), maker))
    choice.required = draw.sample(range(len(choice.values)), draw.randint(1, 3))
    return choice


def price_of(choice: KeepOrRepeat, kept: tuple[bool, ...], price: float) -> float:
    """What it takes to keep some values and to make what else is needed."""
    repeated: set[int] = set()
    pending, total = list(choice.required), 0.0
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        value = choice.values[number]
        if kept[number]:
            total += value.keep_ns + price * value.keep_bytes
        elif value.maker is None:
            return inf
        elif value.maker not in repeated:
            repeated.add(value.maker)
            total += choice.ops[value.maker].ns
            pending += choice.ops[value.maker].reads
    return total


@pytest.mark.parametrize("seed", first(40, range(400)))
def test_no_choice_is_cheaper(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residual_cut, "_APART", 0.0)
    draw = random.Random(seed)
    choice = random_choice(draw)
    for price in (0.0, 0.5, 3.0):
        plan = choice.cheapest(price)
        found = plan.ns + price * plan.bytes
        every = product((False, True), repeat=len(choice.values))
        assert found == pytest.approx(min(price_of(choice, kept, price) for kept in every))


def test_curve_trades_time_for_bytes():
    draw = random.Random(7)
    for _ in range(50):
        plans = random_choice(draw).curve()
        pairs = list(pairwise(plans))
        assert all(a.bytes > b.bytes and a.ns < b.ns for a, b in pairs)


def test_equal_layers_do_not_change_all_at_once():
    """Ten layers, in each of which a value may be kept or made of one that is there."""
    choice = KeepOrRepeat()
    for _ in range(10):
        choice.values += [CutValue(0.0, 0.0, None), CutValue(0.0, 8.0, len(choice.ops))]
        choice.ops.append(Repeatable(5.0, (len(choice.values) - 2,)))
        choice.required.append(len(choice.values) - 1)
    assert len({plan.bytes for plan in choice.curve()}) > 5


def test_what_cannot_be_kept_is_made_again():
    choice = KeepOrRepeat(
        [CutValue(0.0, 1.0, None), CutValue(inf, 0.0, 0)], [Repeatable(9.0, (0,))], [1]
    )
    assert choice.cheapest(0.0).repeated == {0}


def test_values_may_be_left_out():
    choice = KeepOrRepeat(
        [CutValue(0.0, 1.0, None), CutValue(0.0, 1.0, 0)], [Repeatable(9.0, (0,))], [1]
    )
    assert choice.cheapest(0.0).kept == {1}
    assert choice.cheapest(0.0, frozenset({1})).kept == {0}
