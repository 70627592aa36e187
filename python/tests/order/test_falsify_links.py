"""No compiler deletes a collective through a link that counts."""

from __future__ import annotations

import pytest
from compile_targets import searched

from stablehlo_tools.targets.topologies import Target


def test_links_that_count_stay() -> None:
    tried = searched("falsify_links.py", Target.CPU, 40, 1)
    assert tried["links"] == 40
    assert 0 < tried["ordered"] < tried["links"]
    assert tried["deleted"] > 0  # the compiler is tempted indeed


@pytest.mark.soak
@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_links_that_count_stay_soak(target: Target) -> None:
    assert searched("falsify_links.py", target, 1000, 2)["links"] == 1000
