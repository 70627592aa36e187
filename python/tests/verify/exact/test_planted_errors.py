"""Four of the errors that `benchmarks/planted_errors.py` plants are found exactly."""

from __future__ import annotations

import pytest
from benchmarks.planted_errors import ADAM, ADAM_16, SGD, SGD_16, Variant, compare_exactly

PLANTED = (
    (SGD, "a gradient times 1 + 2**-20"),
    (ADAM_16, "one of 64 microbatches dropped"),
    (SGD_16, "the mask off by one in one position"),
    (ADAM, "one microbatch doubled, one halved"),
)


@pytest.mark.parametrize(("variant", "error"), PLANTED, ids=str)
def test_a_planted_error_is_found(variant: Variant, error: str):
    assert not compare_exactly(variant, error).same


def test_a_step_without_an_error_is_the_same():
    answer = compare_exactly(ADAM_16, "")
    assert answer.same
    assert not answer.vacuous
