"""Task graphs and schedules in the neutral JSON form of the overlap peers.

{"nodes": [...], "storages": [bytes, ...], "cost_model": {"GROUP_lat": seconds, ...}}

A node has id, kind, ns, deps, storages and allocs. A collective_start also has group and
coll_bytes, a wait its start, an input its persistent. Ids count from 0 in a legal order.

{"order": [every task id once], "buckets": [[collective starts], ...]}

The starts of a bucket are consecutive in the order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.json_text import read_json
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind

_REDUCTIONS = {"ag": "all_gather", "rs": "reduce_scatter", "ar": "all_reduce", "a2a": "all_to_all"}


def read_graph(path: str | Path) -> TaskGraph:
    """Reads the graph in a .json or .json.gz file. Raises ToolError naming node and field."""
    with naming(str(path)):
        return to_graph(read_json(path))


def to_graph(content: Any) -> TaskGraph:
    """Reads the graph from parsed JSON. Raises ToolError naming the node and the field."""
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        raise ToolError("a task graph must be an object with a list of nodes")
    sizes, model = content.get("storages", []), content.get("cost_model", {})
    if not isinstance(sizes, list) or not isinstance(model, dict):
        raise ToolError("the storages of a task graph must be a list, and its cost_model an object")
    storages = [_amount(b, f"storage {i}") for i, b in enumerate(sizes)]
    nodes: list[Any] = content["nodes"]
    tasks = [_task(i, node, model, len(storages)) for i, node in enumerate(nodes)]
    for wait, start in [(task.id, task.start) for task in tasks if task.start is not None]:
        if not 0 <= start < wait or tasks[start].kind is not TaskKind.COLLECTIVE_START:
            raise ToolError(f"node {wait}: start {start} is not an earlier collective_start")
    return TaskGraph(tasks, storages)


def _task(number: int, node: Any, model: Mapping[str, Any], storages: int) -> Task:
    where = f"node {number}"
    if not isinstance(node, dict):
        raise ToolError(f"{where} is not an object")
    if node.get("id") != number:
        raise ToolError(f"{where} has id {node.get('id')!r}: ids count from 0 in the file's order")
    try:
        kind = TaskKind(node.get("kind"))
    except ValueError:
        raise ToolError(f"{where}: unknown kind {node.get('kind')!r}") from None
    if kind is TaskKind.LOOP:
        raise ToolError(f"{where}: graphs in files are flat and cannot have kind 'loop'")
    start = node.get("start") if kind is TaskKind.WAIT else None
    if kind is TaskKind.WAIT and type(start) is not int:
        raise ToolError(f"{where}: a wait needs the id of its start")
    name = str(node.get("name", ""))
    return Task(
        id=number,
        kind=kind,
        ns=_amount(node.get("ns", 0.0), f"{where}: ns"),
        deps=_numbers(node, "deps", number, where),
        storages=_numbers(node, "storages", storages, where),
        allocs=_numbers(node, "allocs", storages, where),
        start=start,
        persistent=bool(node.get("persistent", False)),
        communication=(
            _communication(node, model, where) if kind is TaskKind.COLLECTIVE_START else None
        ),
        name=name,
        op=str(node.get("op", name)),
    )


def _communication(node: Mapping[str, Any], model: Mapping[str, Any], where: str) -> Communication:
    group = node.get("group")
    if not isinstance(group, str):
        raise ToolError(f"{where}: a collective_start needs its group")
    latency = model.get(f"{group}_lat", 0.0)
    return Communication(
        kind=_REDUCTIONS.get(str(node.get("coll")), str(node.get("coll", "collective"))),
        stream=group,
        bytes=_amount(node.get("coll_bytes", 0.0), f"{where}: coll_bytes"),
        latency_ns=_amount(latency, f"cost_model: {group}_lat") * 1e9,
        dtype=str(node.get("dtype", "")),
        reduction=node.get("reduce_op"),
    )


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{where} is not a number: {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ToolError(f"{where} is {value}: it must be finite and at least 0")
    return value


def _numbers(node: Mapping[str, Any], key: str, limit: int, where: str) -> tuple[int, ...]:
    values = node.get(key, [])
    if not isinstance(values, list):
        raise ToolError(f"{where}: {key} is not a list")
    for value in values:
        if type(value) is not int or not 0 <= value < limit:
            what = "an earlier node" if key == "deps" else "a storage"
            raise ToolError(f"{where}: {key} names {value!r}, which is not {what}")
    return tuple(values)


def encode_schedule(order: Sequence[int], buckets: Sequence[Sequence[int]]) -> bytes:
    """The bytes of a schedule's file."""
    content = {"order": list(order), "buckets": [list(bucket) for bucket in buckets]}
    return json.dumps(content).encode() + b"\n"
