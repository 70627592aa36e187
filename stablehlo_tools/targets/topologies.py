"""The topologies that compilers compile for: a target and a number of devices. Pure Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stablehlo_tools.cost.switches import even_share
from stablehlo_tools.cost.tori import slice_shape
from stablehlo_tools.diagnostics import ToolError, installing
from stablehlo_tools.targets.chips import DEFAULTS, Chip, Gpu, Target, Tpu, gpu_config

_MOST_DEVICES = 4096
_MOST_CPU_DEVICES = 256  # threads of this machine
_CUBE = 4  # edge of the cubes that form large slices of a three-dimensional torus
_FLAT = {1: "1x1x1", 2: "1x2x1", 4: "2x2x1"}  # slices within a host of 2 x 2 chips


@dataclass(frozen=True)
class Topology:
    """A described machine; `name` is what its compiler calls the arrangement of the devices.

    XLA:GPU: NVLink domains x hosts of each x devices of each host; XLA:TPU: the shape of the slice.
    """

    target: Target
    devices: int
    name: str
    chip: Chip | None = None  # none of XLA:CPU

    @property
    def config(self) -> str:
        """The GpuTargetConfigProto of a GPU, in text form; empty for others."""
        return gpu_config(self.chip.kind) if self.chip and isinstance(self.chip.kind, Gpu) else ""

    def describe(self) -> str:
        """`8 H100 (1x1x8)`, `8 TPU v5e (v5e:2x4)`, `8 virtual CPU devices`."""
        if self.chip is None:
            return f"{self.devices} virtual CPU device{'s' if self.devices > 1 else ''}"
        return f"{self.devices} {self.chip.title} ({self.name})"


def topology(target: Target, devices: int, chip: Chip | None = None) -> Topology:
    """Returns the topology of `devices` devices of a chip (default: the target's usual chip).

    Raises ToolError if there is none of that size.
    """
    most = _MOST_CPU_DEVICES if target is Target.CPU else _MOST_DEVICES
    if not 1 <= devices <= most:
        raise ToolError(
            f"{target.title}: the program runs on {devices} devices, but only 1 to {most} can be "
            "compiled for"
        )
    if target is Target.CPU:
        return Topology(target, devices, "host")
    chip = chip or DEFAULTS[target]
    if not isinstance(chip.kind, Gpu):
        return Topology(target, devices, _slice(chip, devices), chip)
    # `2x1x8`: as few hosts as can share the devices evenly, in as few NVLink domains.
    of_a_host = even_share(devices, chip.kind.host)
    hosts = devices // of_a_host
    of_a_domain = even_share(hosts, chip.kind.domain // chip.kind.host)
    return Topology(target, devices, f"{hosts // of_a_domain}x{of_a_domain}x{of_a_host}", chip)


def _slice(chip: Chip, devices: int) -> str:
    """Returns the slice of so many chips that clouds offer, as `v5e:2x4`; else raises ToolError."""
    assert isinstance(chip.kind, Tpu), "every chip that is no GPU is a TPU"
    sold = [2**power for power in range(13) if 2**power <= chip.kind.most]
    cube = chip.kind.dimensions == 3 and devices % _CUBE**3 == 0 and devices <= chip.kind.most
    if devices not in sold and not cube:
        cubes = f" and multiples of {_CUBE**3}" if chip.kind.dimensions == 3 else ""
        raise ToolError(
            f"XLA:TPU: no {chip.title} slice has {devices} chips; slices have "
            f"{', '.join(map(str, sold))}{cubes}: use --target gpu or cpu"
        )
    if chip.kind.dimensions == 3 and devices in _FLAT:
        return f"{chip.kind.generation}:{_FLAT[devices]}"
    shape = slice_shape(devices, chip.kind.dimensions, _CUBE)
    return f"{chip.kind.generation}:{'x'.join(map(str, shape))}"


def environment(
    machine: Topology, inherited: Mapping[str, str], dump: Path, *, schedule_only: bool = False
) -> dict[str, str]:
    """The environment of the process that compiles; `XLA_FLAGS` that are set are kept.

    `dump` is the directory for dumps: of XLA:TPU's combiners, and of the schedule if
    `schedule_only`.

    jax itself always runs on its CPU backend there, so an accelerator that is present stays free.
    """
    flags = [inherited.get("XLA_FLAGS", "")]
    added = {"JAX_PLATFORMS": "cpu"}
    if machine.target is Target.CPU:
        # After the caller's flags, because XLA uses the last value of a flag.
        flags.append(f"--xla_force_host_platform_device_count={machine.devices}")
    elif machine.target is Target.GPU:
        flags.append("--xla_gpu_autotune_level=0")  # measuring needs a GPU
        if schedule_only:
            flags += [f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
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
    """Returns the package of a target's compiler if it is not installed, else None."""
    missing = (p for module, p in _PACKAGES[target] if importlib.util.find_spec(module) is None)
    return next(missing, None)


def check_installed(target: Target) -> None:
    """Raises ToolError if a target's compiler is not installed; the hint names the extra."""
    missing = missing_package(target)
    if missing is not None:
        raise ToolError(
            f"{target.title} is not installed here: package {missing} is missing",
            hint=installing("aot"),
        )


def compiler_version(target: Target) -> str:
    """`XLA:TPU of libtpu 0.0.51`."""
    _, package = _PACKAGES[target][-1]
    return f"{target.title} of {package} {importlib.metadata.version(package)}"


# The modules that each target needs, with their packages; the compiler is in the last.
_PACKAGES = {
    Target.CPU: (("jaxlib", "jaxlib"),),
    Target.GPU: (
        ("jax_cuda13_plugin", "jax-cuda13-plugin"),
        ("jax_plugins.xla_cuda13", "jax-cuda13-pjrt"),
    ),
    Target.TPU: (("libtpu", "libtpu"),),
}
