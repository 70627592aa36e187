"""Which axes of a mesh the groups of a collective run along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.replica_groups import DeviceMesh


def axes_of(groups: Sequence[Sequence[int]], meshes: Mapping[str, DeviceMesh]) -> tuple[str, ...]:
    """The axes over which the members of each group differ, of the first mesh that fits.

    Empty where a group is no whole set of axes (a permute's pairs name the axes they move along).
    """
    for mesh in meshes.values():
        named = _along(groups, mesh)
        if named is not None:
            return named
    return ()


def _along(groups: Sequence[Sequence[int]], mesh: DeviceMesh) -> tuple[str, ...] | None:
    ids = mesh.device_ids or tuple(range(mesh.size))
    position = {device: place for place, device in enumerate(ids)}
    sizes = [size for _, size in mesh.axes]
    differing: set[int] = set()
    for group in groups:
        if any(device not in position for device in group):
            return None
        coordinates = [_coordinates(position[device], sizes) for device in group]
        for axis, values in enumerate(zip(*coordinates, strict=True)):
            if len(set(values)) > 1:
                differing.add(axis)
    pairs = all(len(group) == 2 for group in groups)
    whole = math.prod(sizes[axis] for axis in differing)
    if not pairs and any(len(group) != whole for group in groups):
        return None
    return tuple(mesh.axes[axis][0] for axis in sorted(differing))


def _coordinates(place: int, sizes: Sequence[int]) -> tuple[int, ...]:
    coordinates: list[int] = []
    for size in reversed(sizes):
        place, rest = divmod(place, size)
        coordinates.append(rest)
    return tuple(reversed(coordinates))
