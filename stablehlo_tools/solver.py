"""OR-Tools, the extra `solver`: loaded only where an exact schedule is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from stablehlo_tools.diagnostics import ToolError


def solver_module(name: str) -> ModuleType:
    """A module that imports OR-Tools. Raises ToolError, saying what to do, without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ToolError(
            "an exact schedule needs OR-Tools, the extra `solver`: "
            f"pip install 'stablehlo-tools[solver]' ({error})"
        ) from None
