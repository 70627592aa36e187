"""The memory that a program takes on a device, as the report counts it."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.overlap.memory import memory_profile

_ANY_HARDWARE = "h100"  # bytes are the same on each


def peak_bytes(module: ir.Module) -> float:
    """The most bytes alive at once, in the order of the text. Raises ToolError."""
    clock = Clock(load_hardware(_ANY_HARDWARE), ModuleFacts.of(module).grid.size)
    return memory_profile(module_task_graph(module, clock, "")).peak_bytes
