"""The compilers as parameters of tests, and searches with one: a compiler that is not installed is
skipped, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tree import SOAK

from stablehlo_tools.targets.topologies import Target, missing_package

TARGETS = [
    pytest.param(
        target,
        id=target.value,
        marks=pytest.mark.skipif(
            missing_package(target) is not None,
            reason=f"{target.title} needs {missing_package(target)}: pip install '.[aot]'",
        ),
    )
    for target in Target
]


def searched(name: str, target: Target, count: int, seed: int) -> dict[str, Any]:
    """Runs a script of `python/soak/` in a process of its own: a compiler may end it."""
    if (package := missing_package(target)) is not None:
        pytest.skip(f"{target.value} needs {package}, of the extra `aot`")
    command = [sys.executable, str(SOAK / name), target.value, str(count), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)
