"""partition on random programs with random shardings: the values of one device, bit for bit."""

from __future__ import annotations

import pytest
from random_sharded_programs import random_program
from sharded_programs import complaint
from soaking import first

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("seed", first(5, range(20)))
def test_random_programs(seed: int) -> None:
    program = random_program(seed, most=3)
    assert complaint(program) is None, program.name


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_programs(seed: int) -> None:
    program = random_program(seed)
    assert complaint(program) is None, program.name
