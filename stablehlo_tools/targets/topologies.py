"""The machines that a compiler is told about: a target and a number of devices. Pure Python."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stablehlo_tools.diagnostics import ToolError

GPU_CONFIG = Path(__file__).with_name("h100.txtpb")
DEVICES_PER_HOST = 8  # of an HGX H100
_MOST_DEVICES = 256
_V5E_SLICES = {
    1: "1x1",
    2: "1x2",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}


class Target(enum.Enum):
    """One of XLA's compilers."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"

    @property
    def title(self) -> str:
        """`XLA:CPU` …"""
        return f"XLA:{self.name}"

    @property
    def platform(self) -> str:
        """The name that jax.export gives the platform."""
        return "cuda" if self is Target.GPU else self.value


@dataclass(frozen=True)
class Topology:
    """A described machine; `name` is what its compiler calls the arrangement of the devices."""

    target: Target
    devices: int
    name: str

    def describe(self) -> str:
        """`8 H100 (1x1x8)`, `8 TPU v5e (v5e:2x4)`, `8 virtual CPU devices`."""
        if self.target is Target.CPU:
            return f"{self.devices} virtual CPU device{'s' if self.devices > 1 else ''}"
        chip = "H100" if self.target is Target.GPU else "TPU v5e"
        return f"{self.devices} {chip} ({self.name})"


def topology(target: Target, devices: int) -> Topology:
    """The arrangement to compile for. Raises ToolError where there is none of that size.

    H100: one host of up to eight, or hosts of eight; other numbers count as one host. v5e: the
    shapes of its slices; libtpu routes few others.
    """
    if devices < 1 or devices > _MOST_DEVICES:
        raise ToolError(
            f"{target.title}: the program runs on {devices} devices; from 1 to {_MOST_DEVICES} "
            "can be compiled for"
        )
    if target is Target.CPU:
        return Topology(target, devices, "host")
    if target is Target.GPU:
        hosts, rest = divmod(devices, DEVICES_PER_HOST)
        whole = hosts > 1 and not rest
        name = f"1x{hosts}x{DEVICES_PER_HOST}" if whole else f"1x1x{devices}"
        return Topology(target, devices, name)
    if devices not in _V5E_SLICES:
        raise ToolError(
            f"XLA:TPU: no TPU v5e slice has {devices} chips, only "
            f"{', '.join(map(str, _V5E_SLICES))}: use --target gpu or cpu"
        )
    return Topology(target, devices, f"v5e:{_V5E_SLICES[devices]}")


def environment(machine: Topology, inherited: Mapping[str, str], dump: Path) -> dict[str, str]:
    """The environment of the process that compiles; `XLA_FLAGS` that are set are kept.

    jax itself always runs on its CPU backend there, so an accelerator that is present stays free.
    """
    flags = [inherited.get("XLA_FLAGS", "")]
    added = {"JAX_PLATFORMS": "cpu"}
    if machine.target is Target.CPU:
        flags.append(f"--xla_force_host_platform_device_count={machine.devices}")
    elif machine.target is Target.GPU:
        flags.append("--xla_gpu_autotune_level=0")  # measuring needs a GPU
    else:
        flags += [
            f"--xla_dump_to={dump}",
            "--xla_dump_hlo_as_text",
            "--xla_dump_hlo_pass_re=.*combiner.*",  # for `tagging.read_combined`
        ]
        added |= {
            "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened: compilers may run side by side
        }
    added["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
    return {**inherited, **added}


def missing_package(target: Target) -> str | None:
    """The package that a target's compiler comes in, where it is not installed."""
    for module, package in _PACKAGES[target]:
        if importlib.util.find_spec(module) is None:
            return package
    return None


def compiler_version(target: Target) -> str:
    """`XLA:TPU of libtpu 0.0.51`."""
    _, package = _PACKAGES[target][-1]
    return f"{target.title} of {package} {importlib.metadata.version(package)}"


# The modules and the packages they come in; the compiler is in the last.
_PACKAGES = {
    Target.CPU: (("jaxlib", "jaxlib"),),
    Target.GPU: (
        ("jax_cuda13_plugin", "jax-cuda13-plugin"),
        ("jax_plugins.xla_cuda13", "jax-cuda13-pjrt"),
    ),
    Target.TPU: (("libtpu", "libtpu"),),
}
