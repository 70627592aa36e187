"""Random loops keep their values bit for bit, whatever of them is sunk."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from random_sinks import programs
from sink_programs import arguments, parsed, run, same, sunk

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def check(drawn: tuple[str, int | None], merge: bool) -> None:
    text, bound = drawn
    before = parsed(text)
    after = sunk(before, merge=merge)
    values = arguments(before, 0, bound)
    assert same(run(before, values), run(after, values)), f"{text}\n{after.module}"


@settings(max_examples=4, suppress_health_check=SLOW, derandomize=True)
@given(programs())
def test_random_loops(drawn: tuple[str, int | None]):
    check(drawn, merge=False)


@pytest.mark.soak
@pytest.mark.parametrize("merge", [False, True])
@settings(max_examples=400, suppress_health_check=SLOW)
@given(programs())
def test_random_loops_soak(merge: bool, drawn: tuple[str, int | None]):
    check(drawn, merge)
