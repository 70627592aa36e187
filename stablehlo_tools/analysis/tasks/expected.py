"""Predicts the time of a module as XLA would schedule it: `overlap.compilers` on its task graph."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.overlap.compilers.expected import Expected, expected


def expected_run(module: ir.Module, hardware: Hardware) -> Expected:
    """Returns the expected run on a device of a module with explicit collectives.

    Raises ToolError for a program that cannot be timed.
    """
    devices = ModuleFacts.of(module).grid.size
    graph = module_task_graph(module, Clock(hardware, devices), "")
    return expected(graph, hardware, devices)


def is_faster(draft: ir.Module, module: ir.Module, hardware: Hardware) -> bool:
    """Returns True if XLA is expected to be faster with a draft of a module than with the module.

    Both times include the slowdown of compute beside collectives. Raises ToolError for a program
    that cannot be timed.
    """
    own = expected_run(module, hardware).contended_ns
    return expected_run(draft, hardware).contended_ns < own
