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
    from stablehlo_tools.layer_order import (
        LayerOrder,
        find_layer_order,
        to_layer_order,
        to_pipeline_order,
    )
    from stablehlo_tools.passes import Pipeline

_HOMES = {
    "Artifact": "artifact",
    "LayerOrder": "layer_order",
    "Pipeline": "passes",
    "ToolError": "diagnostics",
    "find_layer_order": "layer_order",
    "jit": "api",
    "load": "artifact",
    "save": "artifact",
    "to_layer_order": "layer_order",
    "to_pipeline_order": "layer_order",
    "transform": "api",
}

__all__ = [
    "Artifact",
    "LayerOrder",
    "Pipeline",
    "ToolError",
    "find_layer_order",
    "jit",
    "load",
    "save",
    "to_layer_order",
    "to_pipeline_order",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stablehlo_tools' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stablehlo_tools.{_HOMES[name]}"), name)
