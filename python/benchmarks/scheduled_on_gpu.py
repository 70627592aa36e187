"""What XLA:GPU's own schedule says of a program, for benchmarks: it runs ahead of time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_TOOL = "from stablehlo_tools.cli.main import main; main()"


def scheduled(path: Path) -> tuple[float, float]:
    """Milliseconds and the peak in GiB of a device."""
    (found,) = json.loads(run_tool("inspect", path, "--target", "gpu", "--json"))["programs"]
    return found["total_ns"] / 1e6, found["peak_bytes"] / 2**30


def run_tool(*words: object) -> str:
    """What a command of the tool prints."""
    command = [sys.executable, "-c", _TOOL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
