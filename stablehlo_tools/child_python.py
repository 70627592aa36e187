"""The environment of a child process that runs this package with `python -m`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_SEARCH_PATH = "PYTHONPATH"


def with_package(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables, with this package where Python looks first, installed or not."""
    package_root = str(Path(__file__).parents[1])
    paths = filter(None, (package_root, environment.get(_SEARCH_PATH)))
    return {**environment, _SEARCH_PATH: os.pathsep.join(paths)}
