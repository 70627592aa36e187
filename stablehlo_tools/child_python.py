"""Child processes that run this package with `python -m`: their environment, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SEARCH_PATH = "PYTHONPATH"


def with_package(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables, with this package where Python looks first, installed or not."""
    package_root = str(Path(__file__).parents[1])
    paths = filter(None, (package_root, environment.get(_SEARCH_PATH)))
    return {**environment, _SEARCH_PATH: os.pathsep.join(paths)}


def wait_or_end(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit code of a process that leads a group of its own; None where it took more than so
    many seconds. Whatever happens, the group has ended then."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with the group, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
