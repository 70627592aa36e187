"""stablehlo-tools: rewrites distributed StableHLO programs after export.

    exported = stablehlo_tools.transform(exported, "thread-tokens")
    exported = stablehlo_tools.optimize(exported, target="gpu").exported
    step = stablehlo_tools.jit(step, pipeline="auto")

The names below load jaxlib when first used, not on import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablehlo_tools.api.assertions import assert_collectives, assert_exposed_below
    from stablehlo_tools.api.inspecting import inspect
    from stablehlo_tools.api.jitted import jit
    from stablehlo_tools.api.layer_order import (
        LayerOrder,
        find_layer_order,
        to_layer_order,
        to_pipeline_order,
    )
    from stablehlo_tools.api.optimizing import optimize
    from stablehlo_tools.api.planning import plan
    from stablehlo_tools.api.steps import export, load_step
    from stablehlo_tools.api.transforming import transform
    from stablehlo_tools.artifacts.artifact import Artifact, load, save
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.passes.describing import describe
    from stablehlo_tools.passes.pipeline import Pipeline

_HOMES = {
    "Artifact": "artifacts.artifact",
    "LayerOrder": "api.layer_order",
    "Pipeline": "passes.pipeline",
    "ToolError": "diagnostics",
    "assert_collectives": "api.assertions",
    "assert_exposed_below": "api.assertions",
    "describe": "passes.describing",
    "export": "api.steps",
    "find_layer_order": "api.layer_order",
    "inspect": "api.inspecting",
    "jit": "api.jitted",
    "load": "artifacts.artifact",
    "load_step": "api.steps",
    "optimize": "api.optimizing",
    "plan": "api.planning",
    "save": "artifacts.artifact",
    "to_layer_order": "api.layer_order",
    "to_pipeline_order": "api.layer_order",
    "transform": "api.transforming",
}

__all__ = [
    "Artifact",
    "LayerOrder",
    "Pipeline",
    "ToolError",
    "assert_collectives",
    "assert_exposed_below",
    "describe",
    "export",
    "find_layer_order",
    "inspect",
    "jit",
    "load",
    "load_step",
    "optimize",
    "plan",
    "save",
    "to_layer_order",
    "to_pipeline_order",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name == "activity":  # `stablehlo_tools.activity.trust_input()`
        return importlib.import_module("stablehlo_tools.processes.activity")
    if name not in _HOMES:
        raise AttributeError(f"module 'stablehlo_tools' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stablehlo_tools.{_HOMES[name]}"), name)
