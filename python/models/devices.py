"""The virtual CPU devices that the models are exported for. Import this before jax.

    from models.devices import mesh  # sets XLA_FLAGS and JAX_PLATFORMS
    import jax

JAX fixes the number of its devices when it starts, hence the order.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"

if "jax" not in sys.modules:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if _FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}".lstrip()


def mesh(**axes: int) -> Mesh:
    """A mesh of virtual CPU devices, axis name to size: `mesh(fsdp=4, model=2)`.

    Raises RuntimeError when JAX runs with fewer devices than that.
    """
    import jax
    import numpy as np

    sizes = tuple(axes.values())
    needed = int(np.prod(sizes))
    devices = jax.devices("cpu")
    if len(devices) < needed:
        raise RuntimeError(
            f"the mesh {axes} needs {needed} devices and JAX has {len(devices)}: import "
            f"models.devices before jax, or start with XLA_FLAGS={_FLAG}={DEVICES}"
        )
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(sizes), tuple(axes))
