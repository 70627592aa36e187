"""stablehlo-tools: rewrites distributed StableHLO programs after export.

    exported = stablehlo_tools.transform(exported, "thread-tokens")
    step = stablehlo_tools.jit(step, pipeline="thread-tokens")

The names below load jaxlib when first used, not on import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablehlo_tools.api import jit, transform
    from stablehlo_tools.artifact import Artifact, load, save
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.passes import Pipeline

_HOMES = {
    "Artifact": "artifact",
    "Pipeline": "passes",
    "ToolError": "diagnostics",
    "jit": "api",
    "load": "artifact",
    "save": "artifact",
    "transform": "api",
}

__all__ = ["Artifact", "Pipeline", "ToolError", "jit", "load", "save", "transform"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stablehlo_tools' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stablehlo_tools.{_HOMES[name]}"), name)
