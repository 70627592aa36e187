"""No compiler puts into another order what check-order calls ordered, on random programs."""

from __future__ import annotations

import pytest
from compile_targets import searched

from stablehlo_tools.targets.topologies import Target


def test_ordered_programs_keep_their_order() -> None:
    assert searched("falsify_order.py", Target.CPU, 8, 1)["ordered"] == 8


@pytest.mark.soak
@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_ordered_programs_keep_their_order_soak(target: Target) -> None:
    assert searched("falsify_order.py", target, 500, 2)["ordered"] == 500
