"""Partitioned programs that no pass was written for keep their values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import held_out_others
import held_out_training
import pytest
from held_out_training import Case
from kept_values import Known, assert_kept

import stablehlo_tools

PIPELINE = "partition,create-reduce-scatter,thread-tokens"
PROGRAMS: list[tuple[Callable[[], Case], bool]] = [
    (held_out_training.gpt2_step, False),
    (held_out_training.masked_language_step, False),
    (held_out_others.diffusion_step, False),
    (held_out_others.recommender_step, False),
    (held_out_others.sampler, False),
    (held_out_others.sequence_split_sampler, False),
]


# For `make soak`: those that take longest, and are much as the others.
LONG = (
    held_out_training.gpt2_step,
    held_out_training.masked_language_step,
    held_out_others.diffusion_step,
    held_out_others.sequence_split_sampler,
)


@cache
def known(program: Callable[[], Case]) -> Known:
    """A program, and what it computes."""
    return Known.of(*program())


@pytest.mark.parametrize(
    ("program", "bitwise"),
    [pytest.param(*pair, marks=pytest.mark.soak if pair[0] in LONG else ()) for pair in PROGRAMS],
    ids=[program.__name__ for program, _ in PROGRAMS],
)
def test_values_are_kept(program: Callable[[], Case], bitwise: bool):
    before = known(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = stablehlo_tools.transform(before.program, PIPELINE)
    assert_kept(before.compared(after), bitwise=bitwise)


def test_the_sampler_ends_early_and_differs_between_sequences():
    tokens, place, *_ = known(held_out_others.sampler).values
    assert place == 11
    assert any(row[-1] == 0 for row in tokens)
    assert len({tuple(row[3:]) for row in tokens}) == len(tokens)
