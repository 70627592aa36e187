"""Scheduled HLO text for tests, its task graph, and what is asked of the graph."""

from __future__ import annotations

import re

from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind, TaskLoop
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

DEVICES = 8
GPU, TPU = load_hardware("h100"), load_hardware("tpu-v5e")
PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, channel_id=1"
ADD = """add: %a = f32[] parameter(0)
    %b = f32[] parameter(1)
    ROOT %s = f32[] add(%a, %b)"""
NETWORK = {
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
}


def hlo(entry: str, *computations: str, header: str = "", tables: str = "") -> str:
    """A scheduled module; each computation is `name: instructions`, one a line."""
    text = f"HloModule jit_step, is_scheduled=true, num_partitions=8{header}\n\n{tables}\n"
    for part in computations:
        name, _, body = part.partition(":")
        text += f"\n%{name.strip()} (q: f32[4]) -> f32[4] {{\n{_indented(body)}\n}}\n"
    return f"{text}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{_indented(entry)}\n}}\n"


def _indented(body: str) -> str:
    """Instructions one a line; a line that begins with `..` goes on from the one before."""
    whole = re.sub(r"\s*\n\s*\.\.\s*", " ", body.strip())
    return "\n".join(f"  {line.strip()}" for line in whole.splitlines())


def graph(entry: str, *computations: str, header: str = "", tables: str = "") -> TaskGraph:
    return hlo_task_graph(hlo(entry, *computations, header=header, tables=tables), GPU, DEVICES)


def shown(found: TaskGraph) -> list[str]:
    """The tasks that are no views and no memory of a result, as `kind name`, a wait with the start
    it waits for."""
    lines: list[str] = []
    for task in found.tasks:
        waits = f" of {found.tasks[task.start].name}" if task.start is not None else ""
        if task.kind is not TaskKind.VIEW and task.op != "result":
            lines.append(f"{task.kind.value} {task.name}{waits}")
    return lines


def named(found: TaskGraph, name: str) -> Task:
    return next(task for task in found.tasks if task.name == name)


def sent(found: TaskGraph, name: str) -> Communication:
    communication = named(found, name).communication
    assert communication is not None
    return communication


def body_of(task: Task) -> TaskLoop:
    assert task.loop is not None
    return task.loop
