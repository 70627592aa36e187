"""What a module takes as XLA would schedule it: `overlap.compilers` on the module's task graph."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.overlap.compilers.expected import Expected, expected


def expected_run(module: ir.Module, hardware: Hardware) -> Expected:
    """A run of a module whose collectives are explicit, on a device.

    Raises ToolError for a program that cannot be timed.
    """
    devices = ModuleFacts.of(module).grid.size
    graph = module_task_graph(module, Clock(hardware, devices), "")
    return expected(graph, hardware, devices)


def is_faster(draft: ir.Module, module: ir.Module, hardware: Hardware) -> bool:
    """Whether XLA is expected to be faster with a draft of a module than with the module, with what
    collectives take of compute beside them.

    Raises ToolError for a program that cannot be timed.
    """
    own = expected_run(module, hardware).contended_ns
    return expected_run(draft, hardware).contended_ns < own
