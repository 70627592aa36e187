"""The chips that compilers can compile for without a device. Pure Python.

A chip has the name of its hardware profile. Any other profile names its substitute chip in
`compile_as`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError


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
class Gpu:
    """XLA:GPU's description of a device; memory and L2 in bytes, bandwidth in bytes per second.

    A host has `host` devices, and NVLink joins `domain` devices.
    """

    device: str  # the name that its driver reports
    capability: int  # major; the minor is always 0
    cores: int  # streaming multiprocessors
    fp32_units: int  # per core
    clock_ghz: float
    memory: int
    bandwidth: int
    l2: int
    shared_memory: int  # bytes per core
    links: int  # of NVLink
    host: int = 8
    domain: int = 8


@dataclass(frozen=True)
class Tpu:
    """libtpu's description of a device: the prefix of its topologies' names, and its torus.

    `devices` are libtpu's names for it (listed in jax/_src/tpu_info.py).
    """

    generation: str
    devices: tuple[str, ...]
    dimensions: int
    most: int  # chips of one slice


@dataclass(frozen=True)
class Chip:
    """A chip: `name` is that of its profile, `title` is for messages."""

    name: str
    title: str
    kind: Gpu | Tpu

    @property
    def devices(self) -> tuple[str, ...]:
        """The names that its driver may report: jax's `device_kind`."""
        return (self.kind.device,) if isinstance(self.kind, Gpu) else self.kind.devices

    @property
    def target(self) -> Target:
        """The compiler that compiles for it."""
        return Target.GPU if isinstance(self.kind, Gpu) else Target.TPU


# Figures as XLA itself ships them, read from the drivers (openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200,gb200}.txtpb), except H100's
# memory: the part of 80 GiB that a driver leaves. Hosts and domains: DGX A100, H100 and B200 user
# guides, eight GPUs on one NVSwitch; https://www.nvidia.com/en-us/data-center/gb200-nvl72/: 18
# trays of four GPUs on one NVLink domain.
# Shapes of slices: https://docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e}.
_H100 = Gpu(
    device="NVIDIA H100 80GB HBM3",
    capability=9,
    cores=132,
    fp32_units=128,
    clock_ghz=1.98,
    memory=84_929_347_584,
    bandwidth=3_352_320_000_000,
    l2=52_428_800,
    shared_memory=233_472,
    links=18,
)
_ALL = (
    Chip(
        "a100",
        "A100",
        Gpu(
            device="NVIDIA A100-SXM4-80GB",
            capability=8,
            cores=108,
            fp32_units=64,
            clock_ghz=1.41,
            memory=85_100_068_864,
            bandwidth=2_039_040_000_000,
            l2=41_943_040,
            shared_memory=167_936,
            links=12,
        ),
    ),
    Chip("h100", "H100", _H100),
    Chip(
        "h200",
        "H200",
        replace(
            _H100,
            device="NVIDIA H200 141GB HBM3e",
            memory=151_397_597_184,
            bandwidth=4_800_000_000_000,
        ),
    ),
    Chip(
        "b200",
        "B200",
        Gpu(
            device="NVIDIA B200",
            capability=10,
            cores=148,
            fp32_units=128,
            clock_ghz=1.965,
            memory=191_514_411_008,
            bandwidth=7_672_320_000_000,
            l2=132_644_864,
            shared_memory=233_472,
            links=18,
        ),
    ),
    Chip(
        "gb200",
        "GB200",
        Gpu(
            device="NVIDIA GB200",
            capability=10,
            cores=152,
            fp32_units=128,
            clock_ghz=2.062,
            memory=197_897_748_480,
            bandwidth=7_928_064_000_000,
            l2=135_528_448,
            shared_memory=233_472,
            links=18,
            host=4,
            domain=72,
        ),
    ),
    Chip("tpu-v5e", "TPU v5e", Tpu("v5e", ("TPU v5 lite", "TPU v5e"), dimensions=2, most=256)),
    Chip("tpu-v5p", "TPU v5p", Tpu("v5p", ("TPU v5", "TPU v5p"), dimensions=3, most=6144)),
    Chip("tpu-v6e", "TPU v6e", Tpu("v6e", ("TPU v6 lite", "TPU v6e"), dimensions=2, most=256)),
)
CHIPS = {chip.name: chip for chip in _ALL}
DEFAULTS = {Target.GPU: CHIPS["h100"], Target.TPU: CHIPS["tpu-v5e"]}
# The same by the names of the command line.
DEFAULT_HARDWARE = {target.value: chip.name for target, chip in DEFAULTS.items()}

_CONFIG = """\
platform_name: "CUDA"
device_description_str: "{gpu.device}"
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  name: "{gpu.device}"
  cuda_compute_capability {{ major: {gpu.capability} minor: 0 feature_extension: {extension} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fp32_units}
  clock_rate_ghz: {gpu.clock_ghz}
  memory_bandwidth: {gpu.bandwidth}
  device_memory_size: {gpu.memory}
  l2_cache_size: {gpu.l2}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {optin}
  shared_memory_per_core: {gpu.shared_memory}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
"""
_RESERVED = 1024  # bytes of shared memory in each block that the driver keeps
_HOPPER = 9  # the first capability with architecture-specific instructions (sm_90a)


def gpu_config(gpu: Gpu) -> str:
    """Returns the GpuTargetConfigProto of a GPU, in text form, for XLA:GPU.

    The constants come from "Compute Capabilities" in the CUDA C++ Programming Guide.
    """
    extension = "ACCELERATED_FEATURES" if gpu.capability >= _HOPPER else "NONE"
    return _CONFIG.format(gpu=gpu, extension=extension, optin=gpu.shared_memory - _RESERVED)


def chip_called(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind`; None if it is unknown."""
    return next((chip for chip in _ALL if device_kind in chip.devices), None)


def target_of(hardware: Hardware) -> Target | None:
    """Returns the target of the hardware's compiler; None if its profile does not state it."""
    chip = CHIPS.get(hardware.compile_as or "")
    return chip.target if chip is not None else None


def chip_for(target: Target, hardware: Hardware | None) -> tuple[Chip | None, str]:
    """Returns the chip to compile for, and a remark if it is only a substitute for the hardware.

    The remark is "" if the chip is the hardware's own. The chip is None for XLA:CPU. Raises
    ToolError if the hardware belongs to another target.
    """
    if target is Target.CPU:
        return None, _standing_in("XLA:CPU", hardware) if hardware is not None else ""
    if hardware is None:
        return DEFAULTS[target], ""
    if hardware.compile_as is None:
        chip = DEFAULTS[target]
        why = "; `compile_as` in its profile names another"
        return chip, _standing_in(chip.title, hardware) + why
    chip = CHIPS.get(hardware.compile_as)
    if chip is None:
        raise ToolError(
            f"hardware {hardware.name} has compile_as = {hardware.compile_as!r}; known chips: "
            f"{', '.join(CHIPS)}"
        )
    if chip.target is not target:
        able = ", ".join(name for name, other in CHIPS.items() if other.target is target)
        raise ToolError(
            f"{target.title} does not compile for {hardware.name} ({hardware.title}): use --target "
            f"{chip.target.value} for it, or hardware that {target.title} compiles for: {able}",
            instead=(target.value, chip.target.value),
        )
    return chip, "" if chip.name == hardware.name else _standing_in(chip.title, hardware)


def _standing_in(title: str, hardware: Hardware) -> str:
    return f"{title} stands in for {hardware.title}"
