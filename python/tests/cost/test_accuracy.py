"""The errors that `inspect` and `optimize` print are those of the stored benchmark."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from stablehlo_tools.cost.accuracy import LARGEST_ERROR, MEDIAN_ERROR, PUBLISHED_STEPS

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "published_steps.json"


def test_the_printed_errors_are_those_of_the_benchmark():
    rows = json.loads(_RESULTS.read_text())["rows"]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    assert len(errors) == PUBLISHED_STEPS
    assert statistics.median(errors) == pytest.approx(MEDIAN_ERROR, abs=1e-3)
    assert max(errors) == pytest.approx(LARGEST_ERROR, abs=1e-3)
