"""partition on random programs of windows, shifts and uneven parts: the values of one device.

What a device holds beyond the end of a dimension, and what it does not get from a neighbour, is NaN
here: whatever asks for it is seen.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from halo_programs import drawn
from sharded_programs import complaint
from soaking import first

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.partition import halo_writing

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def nan_where_undefined(monkeypatch: pytest.MonkeyPatch) -> Any:
    def undefined(build: Any, shape: Any, element: Any) -> Any:
        is_float = isinstance(element, ir.FloatType)
        return build.splat(float("nan") if is_float else 1, shape, element)

    monkeypatch.setattr(halo_writing, "undefined", undefined)
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", first(6, range(40)))
def test_values_are_those_of_one_device(seed: int) -> None:
    program = drawn(seed)
    assert complaint(program) is None, program.name


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_many(seed: int) -> None:
    program = drawn(seed)
    assert complaint(program) is None, program.name
