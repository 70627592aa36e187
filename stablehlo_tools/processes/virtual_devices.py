"""The environment of a child that runs programs on virtual CPU devices."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

_LEAST_SECONDS_TO_MEET = 40.0


def seconds_to_meet(timeout: float) -> float:
    """How long the devices of a collective wait for each other where a run has `timeout` seconds.

    Less than the run, so that XLA says which collective waits for whom before the child is ended.
    """
    return min(timeout, max(_LEAST_SECONDS_TO_MEET, timeout / 4))


def virtual_devices(
    devices: int, timeout: float, flags: Sequence[str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables for so many CPU devices, with `flags` for XLA.

    What the caller has in `XLA_FLAGS` overrules all but the number of devices. Variables of jax are
    not inherited: the child is to run any artifact, and none of them on an accelerator.
    """
    stuck = math.ceil(seconds_to_meet(timeout))
    all_flags = [
        f"--xla_cpu_collective_call_terminate_timeout_seconds={stuck}",
        f"--xla_cpu_collective_timeout_seconds={stuck}",
        *flags,
        inherited.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
    ]
    kept = {name: text for name, text in inherited.items() if not name.startswith("JAX_")}
    return {
        **kept,
        "XLA_FLAGS": " ".join(all_flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
