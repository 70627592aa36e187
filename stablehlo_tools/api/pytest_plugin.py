"""The pytest plugin of this package: fixtures that assert, and their explanations.

    def test_the_step(assert_collectives, assert_exposed_below, collectives_of):
        exported = export.export(step)(*shapes)
        assert collectives_of(exported) == {"all_gather": 2, "reduce_scatter": 1}
        assert_exposed_below(exported, "h100", ms=1.5)

Nothing is imported when pytest starts; jaxlib is loaded by the first test that asks for a fixture.
`-p no:stablehlo_tools` leaves the plugin out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_collectives() -> Callable[..., None]:
    """`assert_collectives(exported, all_gather=2)`: so many of each kind, and no others."""
    from stablehlo_tools.api import assertions

    return assertions.assert_collectives


@pytest.fixture(scope="session")
def assert_exposed_below() -> Callable[..., None]:
    """`assert_exposed_below(exported, "h100", ms=1.5)`: at most so much is hidden by nothing."""
    from stablehlo_tools.api import assertions

    return assertions.assert_exposed_below


@pytest.fixture(scope="session")
def collectives_of() -> Callable[..., dict[str, int]]:
    """`collectives_of(exported)`: how many there are of each kind, to be compared with a dict."""
    from stablehlo_tools.api import assertions

    return assertions.collectives_of


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> list[str] | None:
    """Where the collectives stand, for `assert collectives_of(exported) == {…}`."""
    for found, wanted in ((left, right), (right, left)):
        explain = getattr(type(found), "explained_against", None)
        if op == "==" and explain is not None and isinstance(wanted, dict):
            lines: list[str] = explain(found, wanted)
            return lines
    return None
