"""No compiler deletes a collective through a link that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tree import SOAK

from stablehlo_tools.targets.topologies import Target, missing_package

SCRIPT = SOAK / "falsify_links.py"


def test_links_that_count_stay() -> None:
    tried = _tried(Target.CPU, 40, 1)
    assert tried["links"] == 40
    assert 0 < tried["ordered"] < tried["links"]
    assert tried["deleted"] > 0  # the compiler is tempted indeed


@pytest.mark.soak
@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_links_that_count_stay_soak(target: Target) -> None:
    assert _tried(target, 1000, 2)["links"] == 1000


def _tried(target: Target, count: int, seed: int) -> dict[str, Any]:
    """Runs the script in a process of its own: a compiler may end it."""
    if (package := missing_package(target)) is not None:
        pytest.skip(f"{target.value} needs {package}, of the extra `aot`")
    command = [sys.executable, str(SCRIPT), target.value, str(count), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)
