"""The mesh of an exported program on given devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.export import Exported
from jax.sharding import Mesh

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.artifacts.artifact import from_exported


def program_mesh(exported: Exported, devices: Sequence[Any]) -> Mesh:
    """Returns the program's first mesh that covers all devices; a mesh of one axis if it has none.

    Arguments without a sharding are placed on it. On any other mesh, jax cannot name the shardings
    of the outputs.
    """
    for mesh in ModuleFacts.from_module(from_exported(exported).module).meshes.values():
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
