"""Runs a command again in a process of its own, where its pipeline holds C++ passes: those can end
the process on what they do not know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stablehlo_tools.child_python import with_package
from stablehlo_tools.diagnostics import ToolError

if TYPE_CHECKING:
    from stablehlo_tools.passes import Pipeline

_ISOLATED = "STABLEHLO_TOOLS_ISOLATED"  # set in the process that runs the passes


def isolated(words: list[str], pipelines: Iterable[Pipeline], unwritten: str) -> int | None:
    """The exit code of the same command in another process; None where this one is to go on.

    Raises a ToolError that says that `unwritten` was not written where that process was ended.
    """
    native = any(pipeline.runs_native_passes for pipeline in pipelines)
    if not native or _ISOLATED in os.environ:
        return None
    result = subprocess.run(
        [sys.executable, "-P", "-m", "stablehlo_tools.cli.main", *words],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env={**with_package(), _ISOLATED: "1"},
    )
    if result.returncode < 0:
        from stablehlo_tools.last_words import how_it_ended, last_words

        ended = how_it_ended(result.returncode, "running C++ passes")
        told = last_words(result.stderr)
        raise ToolError(f"the pipeline {ended}; no {unwritten} was written", notes=told)
    sys.stderr.write(result.stderr)
    return result.returncode
