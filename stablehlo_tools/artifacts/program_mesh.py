"""The mesh that an exported program names, on given devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.export import Exported
from jax.sharding import Mesh

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.artifacts.artifact import from_exported


def program_mesh(exported: Exported, devices: Sequence[Any]) -> Mesh:
    """The first mesh of the program that takes all devices; of one axis where it has none.

    Arguments without a sharding of their own are placed on it: on any other mesh jax cannot name
    the shardings that the outputs come back with.
    """
    for mesh in ModuleFacts.of(from_exported(exported).module).meshes.values():
        if mesh.size == len(devices) and not mesh.device_ids:
            sizes, names = [size for _, size in mesh.axes], [name for name, _ in mesh.axes]
            types: tuple[Any, ...] | None = None  # Auto, Explicit or Manual, if an argument says so
            stated: list[Any] = list(exported.in_shardings_jax(None))
            for sharding in stated:
                if sharding is not None and list(sharding.mesh.axis_names) == names:
                    types = sharding.mesh.axis_types
                    break
            return Mesh(np.array(devices).reshape(sizes), names, axis_types=types)
    return Mesh(np.array(devices), ("devices",))
