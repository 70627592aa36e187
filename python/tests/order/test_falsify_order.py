"""No compiler puts into another order what check-order calls ordered, on random programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tree import SOAK

from stablehlo_tools.targets.topologies import Target, missing_package

SCRIPT = SOAK / "falsify_order.py"


def test_ordered_programs_keep_their_order() -> None:
    assert _tried(Target.CPU, 8, 1)["ordered"] == 8


@pytest.mark.soak
@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_ordered_programs_keep_their_order_soak(target: Target) -> None:
    assert _tried(target, 500, 2)["ordered"] == 500


def _tried(target: Target, count: int, seed: int) -> dict[str, Any]:
    """Runs the script in a process of its own: a compiler may end it."""
    if (package := missing_package(target)) is not None:
        pytest.skip(f"{target.value} needs {package}, of the extra `aot`")
    command = [sys.executable, str(SCRIPT), target.value, str(count), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)
