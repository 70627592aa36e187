"""Cases that stand for others: a few run by default, and all of them with `make soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first of every `count` cases for every run, the others for `make soak`."""
    return [_case(case, soak=number % count > 0) for number, case in enumerate(cases)]


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first `count` cases for every run, the others for `make soak`."""
    return [_case(case, soak=number >= count) for number, case in enumerate(cases)]


def _case(case: Any, *, soak: bool) -> Any:
    return pytest.param(case, marks=pytest.mark.soak if soak else ())
