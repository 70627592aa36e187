"""Which layers each range has, and which iterations of the loop go over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.analysis.loop_carries import LayerLoop
from stablehlo_tools.transforms.split_layers import Range, ranges


def loop(trips: int, *, reverse: bool) -> LayerLoop:
    """As much of a loop over layers as ranges ask for."""
    return cast(LayerLoop, SimpleNamespace(trips=trips, reverse=reverse))


def test_ranges_follow_one_another():
    forward = loop(6, reverse=False)
    assert ranges(forward, [1, 2, 3]) == [Range(0, 0, 1), Range(1, 1, 3), Range(2, 3, 6)]
    assert [part.iterations(forward) for part in ranges(forward, [1, 2, 3])] == [
        (0, 1),
        (1, 3),
        (3, 6),
    ]


def test_a_backward_loop_begins_with_the_last_range():
    backward = loop(6, reverse=True)
    assert ranges(backward, [1, 2, 3]) == [Range(2, 3, 6), Range(1, 1, 3), Range(0, 0, 1)]
    assert [part.iterations(backward) for part in ranges(backward, [1, 2, 3])] == [
        (0, 3),
        (3, 5),
        (5, 6),
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_every_iteration_belongs_to_the_range_of_its_row(counts: list[int], reverse: bool):
    over = loop(sum(counts), reverse=reverse)
    gone: list[int] = []
    for part in ranges(over, counts):
        iterations = range(*part.iterations(over))
        rows = [over.trips - 1 - i if reverse else i for i in iterations]
        assert sorted(rows) == list(range(part.first, part.end))
        assert len(rows) == counts[part.number]
        gone += iterations
    assert gone == list(range(over.trips))


@pytest.mark.parametrize("reverse", [False, True])
def test_one_range_is_the_whole_loop(reverse: bool):
    over = loop(4, reverse=reverse)
    (whole,) = ranges(over, [4])
    assert whole.iterations(over) == (0, 4)
