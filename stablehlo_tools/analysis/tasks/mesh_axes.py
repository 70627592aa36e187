"""Finds the axes of a mesh that the groups of a collective run along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.overlap.task_graph import Task, TaskGraph


def axes_of(groups: Sequence[Sequence[int]], meshes: Mapping[str, DeviceMesh]) -> tuple[str, ...]:
    """Returns the axes over which the members of each group differ, of the first mesh that fits.

    Empty if a group is not a whole set of axes (a permute's pairs name the axes they move along).
    """
    for mesh in meshes.values():
        named = _along(groups, mesh)
        if named is not None:
            return named
    return ()


def with_axes_of(graph: TaskGraph, meshes: Mapping[str, DeviceMesh]) -> TaskGraph:
    """Returns a compiler's task graph with the program's names for mesh axes.

    XLA's partitioner numbers the axes (`axis_0`), and lists the devices of several. Groups that fit
    no mesh keep their axes.
    """

    def name_axes(task: Task) -> Task:
        if task.loop is not None:
            return replace(task, loop=replace(task.loop, body=with_axes_of(task.loop.body, meshes)))
        sent = task.communication
        axes = axes_of(sent.groups, meshes) if sent is not None else ()
        return replace(task, communication=replace(sent, axes=axes)) if sent and axes else task

    return replace(graph, tasks=tuple(map(name_axes, graph.tasks)))


def _along(groups: Sequence[Sequence[int]], mesh: DeviceMesh) -> tuple[str, ...] | None:
    ids = mesh.device_ids or tuple(range(mesh.size))
    sizes = [size for _, size in mesh.axes]
    coordinates = dict(zip(ids, product(*map(range, sizes)), strict=True))
    differing: set[int] = set()
    for group in groups:
        if any(device not in coordinates for device in group):
            return None
        for axis, values in enumerate(zip(*map(coordinates.__getitem__, group), strict=True)):
            if len(set(values)) > 1:
                differing.add(axis)
    pairs = all(len(group) == 2 for group in groups)
    whole = math.prod(sizes[axis] for axis in differing)
    if not pairs and any(len(group) != whole for group in groups):
        return None
    return tuple(mesh.axes[axis][0] for axis in sorted(differing))
