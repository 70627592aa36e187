"""Converts replica groups to participants, for every group mode of the StableHLO specification.

A participant is a flattened id: `replica_id * num_partitions + partition_id`. A process group is
the ordered tuple of participants that exchange data with each other; one op has several. Pure
Python: no MLIR here.

Source: StableHLO specification, "Grid of processes", cross_replica … flattened_ids.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stablehlo_tools.diagnostics import ToolError, nearest

if TYPE_CHECKING:
    from stablehlo_tools.bindings import ir

ProcessGroups = tuple[tuple[int, ...], ...]


class GroupMode(enum.Enum):
    """The unit that the ids in `replica_groups` (or `source_target_pairs`) count."""

    CROSS_REPLICA = "cross_replica"
    CROSS_PARTITION = "cross_partition"
    CROSS_REPLICA_AND_PARTITION = "cross_replica_and_partition"
    FLATTENED_IDS = "flattened_ids"


@dataclass(frozen=True)
class ProcessGrid:
    """The numbers of replicas and partitions that a module runs as."""

    num_replicas: int = 1
    num_partitions: int = 1

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.num_replicas * self.num_partitions


@dataclass(frozen=True)
class AxisRef:
    """One axis of a mesh, or the sub-axis `(pre_size)size` of one."""

    name: str
    pre_size: int = 1
    size: int | None = None


# Names that an axis for stages usually has.
STAGE_AXES = frozenset({"stage", "stages", "pipe", "pipeline", "pp"})


@dataclass(frozen=True)
class DeviceMesh:
    """Named axes, major to minor, over device ids (row-major; iota if none are given)."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)


def mesh_with(
    axis: str,
    meshes: Mapping[str, DeviceMesh],
    named_by: str,
    rule: str,
    place: ir.Location | None,
    *,
    for_stages: bool = False,
) -> str:
    """Returns the name of the first mesh in which `axis` has at least two devices.

    `named_by` is the pass and its option for the axis, `expand-pipeline: axis`. `for_stages` says
    that a pipeline runs along it, so that its usual names are suggested. Raises ToolError if there
    is none, with the axes of the meshes and the one that may be meant.
    """
    found = next((name for name, mesh in meshes.items() if dict(mesh.axes).get(axis, 1) > 1), None)
    if found is not None:
        return found
    sizes = {name: size for mesh in meshes.values() for name, size in mesh.axes}
    listed = ", ".join(f"{name} of {size}" for name, size in sizes.items())
    large = [name for name, size in sizes.items() if size > 1]
    near = nearest(axis.lower(), large)
    who, _, option = named_by.rpartition(": ")
    if for_stages:  # never an axis of another use
        near = near or next((name for name in large if name.lower() in STAGE_AXES), "")
        choices = (
            "export the step over a mesh with an axis for the stages, such as "
            f'jax.make_mesh((2, {", ".join(map(str, sizes.values())) or "4"}), ("stage", …))'
        )
    else:
        near = near or (large[0] if len(large) == 1 else "")
        choices = " or ".join(f"{option}={name}" for name in large)
    raise ToolError(
        f"{who}: no mesh of the program has an axis {axis!r} of at least two ranks{rule}: "
        + (f"there are {listed}" if listed else "the program has no mesh; export with one"),
        place,
        hint=choices,
        instead=(f"{option}={axis}", f"{option}={near}") if near else None,
    )


def reduction_group_mode(channel_id: int, use_global_device_ids: bool) -> GroupMode:
    """Returns the mode of all_gather, all_reduce and reduce_scatter.

    Raises ValueError for `use_global_device_ids` without a positive channel id.
    """
    if channel_id > 0:
        if use_global_device_ids:
            return GroupMode.FLATTENED_IDS
        return GroupMode.CROSS_REPLICA_AND_PARTITION
    if use_global_device_ids:
        raise ValueError("use_global_device_ids needs a positive channel id")
    return GroupMode.CROSS_REPLICA


def exchange_group_mode(channel_id: int) -> GroupMode:
    """Returns the mode of all_to_all, collective_broadcast and collective_permute."""
    return GroupMode.CROSS_PARTITION if channel_id > 0 else GroupMode.CROSS_REPLICA


def process_groups(
    groups: Sequence[Sequence[int]], mode: GroupMode, grid: ProcessGrid
) -> ProcessGroups:
    """Returns the process groups of `replica_groups` in dense form.

    `groups` are rows of ids in the mode's own numbering; -1 pads short rows. Without rows, every
    process is in one group. Raises ValueError for an id outside the grid or named twice.
    """
    limit = _id_limit(mode, grid)
    rows = [[int(i) for i in group if i != -1] for group in groups] or [list(range(limit))]
    _check_ids([i for row in rows for i in row], limit, mode)
    partitions = range(grid.num_partitions)
    replicas = range(grid.num_replicas)
    width = grid.num_partitions
    if mode is GroupMode.FLATTENED_IDS:
        return tuple(tuple(row) for row in rows)
    if mode is GroupMode.CROSS_PARTITION:
        return tuple(tuple(r * width + i for i in row) for row in rows for r in replicas)
    if mode is GroupMode.CROSS_REPLICA:
        return tuple(tuple(i * width + p for i in row) for row in rows for p in partitions)
    return tuple(tuple(i * width + p for p in partitions for i in row) for row in rows)


def mesh_axes_groups(mesh: DeviceMesh, axes: Sequence[AxisRef]) -> ProcessGroups:
    """Returns the process groups of the mesh-axes form: devices that differ only along `axes`.

    Group members are ordered by `axes`, the first the slowest. A split axis `(pre)size` has the
    digits between `pre` and `pre * size` of its axis. Raises ValueError for an unknown axis or a
    split that does not divide.
    """
    shape: list[int] = []
    chosen: dict[AxisRef, int] = {}
    for name, size in mesh.axes:
        for ref, extent in _digits(name, size, [axis for axis in axes if axis.name == name]):
            if ref is not None:
                chosen[ref] = len(shape)
            shape.append(extent)
    unknown = [axis.name for axis in axes if axis not in chosen]
    if unknown:
        raise ValueError(f"axis {unknown[0]!r} is not in the mesh, or named twice")
    ids = np.array(mesh.device_ids or range(mesh.size)).reshape(shape or [1])
    inner = [chosen[axis] for axis in axes]
    outer = [digit for digit in range(len(shape)) if digit not in inner]
    width = math.prod(shape[digit] for digit in inner)
    table = ids.transpose(outer + inner).reshape(-1, width) if shape else ids.reshape(1, 1)
    return tuple(tuple(int(i) for i in row) for row in table)


def permute_groups(
    pairs: Sequence[Sequence[int]], mode: GroupMode, grid: ProcessGrid
) -> ProcessGroups:
    """Returns the (source, target) participants of a collective_permute, one pair in each group.

    Raises ValueError for an id outside the grid.
    """
    limit = _id_limit(mode, grid)
    flat = [(int(source), int(target)) for source, target in pairs]
    for source, target in flat:
        _check_ids([source], limit, mode)
        _check_ids([target], limit, mode)
    width = grid.num_partitions
    if mode is GroupMode.CROSS_PARTITION:
        bases = [r * width for r in range(grid.num_replicas)]
        return tuple((base + s, base + t) for s, t in flat for base in bases)
    return tuple((s * width + p, t * width + p) for s, t in flat for p in range(width))


def _id_limit(mode: GroupMode, grid: ProcessGrid) -> int:
    if mode is GroupMode.FLATTENED_IDS:
        return grid.size
    return grid.num_partitions if mode is GroupMode.CROSS_PARTITION else grid.num_replicas


def _check_ids(ids: list[int], limit: int, mode: GroupMode) -> None:
    if len(set(ids)) != len(ids):
        raise ValueError("replica groups overlap: an id appears in two of them")
    outside = [i for i in ids if not 0 <= i < limit]
    if outside:
        raise ValueError(
            f"id {outside[0]} is not one of the {limit} {mode.value} processes of the module"
        )


def _digits(name: str, size: int, refs: list[AxisRef]) -> list[tuple[AxisRef | None, int]]:
    """Splits an axis into consecutive digits, major first, and marks the chosen ones."""
    digits: list[tuple[AxisRef | None, int]] = []
    done = 1
    for ref in sorted(refs, key=lambda ref: ref.pre_size):
        extent = size if ref.size is None else ref.size
        if ref.pre_size % done or size % (ref.pre_size * extent):
            raise ValueError(
                f"axis {name!r} of size {size} is named twice, or its sub-axis "
                f"({ref.pre_size}){extent} does not divide it"
            )
        if ref.pre_size > done:
            digits.append((None, ref.pre_size // done))
        digits.append((ref, extent))
        done = ref.pre_size * extent
    if done < size or not refs:
        digits.append((None, size // done))
    return digits
