"""Task graphs of modules written as text, timed with round figures."""

from __future__ import annotations

from tree import LIT_TESTS

from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.artifacts.artifact import parse
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind

ROUND = LIT_TESTS / "Inputs" / "round.toml"
GATHER = (
    "{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, "
    "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids}"
)


def tasks_of(text: str, devices: int = 2, hardware: str = str(ROUND)) -> TaskGraph:
    """The tasks of a module; `GATHER` in the text stands for an all_gather's attributes."""
    clock = Clock(load_hardware(hardware), devices)
    module = f"module attributes {{mhlo.num_partitions = {devices} : i32}} {{{text}}}"
    return module_task_graph(parse(module.replace("GATHER", GATHER).encode()).module, clock, "x")


def of_kind(graph: TaskGraph, kind: TaskKind) -> list[Task]:
    """The tasks of a kind, in order."""
    return [task for task in graph.tasks if task.kind is kind]


def kernels(graph: TaskGraph) -> list[tuple[str, float]]:
    """Name and time of each kernel."""
    return [(task.name, task.ns) for task in of_kind(graph, TaskKind.COMPUTE)]
