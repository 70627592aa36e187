"""Devices and what connects them: the figures of a profile, read from TOML and checked.

A profile is a file of `profiles/`, or one that the user names. Every figure is a table with its
`value` and its `source`: a public address, or how it was derived from figures that have one.

    name = "h100"
    title = "NVIDIA H100 SXM5 80 GB"

    [chip]
    memory            = { value = 80, source = "https://…" }        # GiB
    memory_bandwidth  = { value = 3350, source = "https://…" }      # GB/s
    memory_efficiency = { value = 0.88, source = "…" }              # share that a copy reaches
    launch            = { value = 3.0, source = "…" }               # us, least time of a kernel
    vector            = { value = 66.9, source = "…" }              # TFLOP/s outside matrix units

    [chip.matmul]                                                   # dense TFLOP/s by element type
    bf16 = { value = 989.4, source = "…" }

    [chip.matmul_model]
    efficiency = { value = 0.82, source = "…" }   # share of the peak that a huge product reaches
    tile_m     = { value = 128, source = "…" }    # a product is computed in such tiles …
    tile_n     = { value = 128, source = "…" }
    units      = { value = 132, source = "…" }    # … by so many units at once
    half_depth = { value = 384, source = "…" }    # k at which half of that share is reached

    [[network]]                                                     # innermost first
    name      = "NVLink"
    kind      = "switch"                          # or "torus"
    devices   = { value = 8, source = "…" }       # of one domain; left out: without limit
    bandwidth = { value = 450, source = "…" }     # GB/s a device sends in one direction; of a
                                                  # torus, that one link carries in one direction
    efficiency = { value = 0.82, source = "…" }   # share that large messages reach
    latency   = { value = 1.9, source = "…" }     # us, of one hop of an algorithm
    start     = { value = 14.0, source = "…" }    # us, of a collective without bytes and hops
    in_network_reduction = { value = 1.3, source = "…" }  # optional, of a switch: the speed-up of
                                                  # an all_reduce of a whole domain
    pair_bandwidth = { value = 320, source = "…" }        # optional, of a switch: GB/s that one
                                                  # device sends to one other, before efficiency
    dimensions = { value = 2, source = "…" }      # of a torus, up to 3
    wraps_from = { value = 16, source = "…" }     # of a torus: an axis so long is a ring; of three
                                                  # dimensions, all have to be multiples of it

A file may begin with another's figures, `extends = "h100"` or a path beside it, and give only those
that differ. A `[[network]]` of a name that the other has changes that one; a new one is outermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stablehlo_tools.cost.profile_files import (
    Allowed,
    Table,
    known_hardware,
    locate,
    networks_of,
    read_figures,
    read_profile,
    refuse_unknown,
    subtable,
    text,
)
from stablehlo_tools.diagnostics import ToolError, naming

__all__ = ["Hardware", "MatmulModel", "Network", "known_hardware", "load_hardware"]

# What a type without a figure of its own is widened to, in order.
_WIDENED = {
    "f16": ("bf16",),
    "f32_high": ("f32",),
    "f32_highest": ("f32_high", "f32"),
    "bf16": ("f16",),
    "i8": ("bf16",),
    **dict.fromkeys(("i1", "i2", "i4", "ui2", "ui4", "ui8"), ("i8", "bf16")),
}
_WIDENED_FLOATS = ("f8E4M3FN", "bf16")  # of every f8E…, f6E… and f4E…

_CHIP = {
    "memory": Allowed.POSITIVE,
    "memory_bandwidth": Allowed.POSITIVE,
    "memory_efficiency": Allowed.SHARE,
    "launch": Allowed.DURATION,
    "vector": Allowed.POSITIVE,
}
_MATMUL: dict[str, Allowed] = dict.fromkeys(
    (
        "bf16",
        "f16",
        "f32",
        "f32_high",
        "f32_highest",
        "f64",
        "f8E4M3FN",
        "f8E5M2",
        "f4E2M1FN",
        "i8",
        "i4",
    ),
    Allowed.POSITIVE,
)
_MODEL = {
    "efficiency": Allowed.SHARE,
    "tile_m": Allowed.COUNT,
    "tile_n": Allowed.COUNT,
    "units": Allowed.COUNT,
    "half_depth": Allowed.DURATION,
}
_NETWORK = {
    "bandwidth": Allowed.POSITIVE,
    "efficiency": Allowed.SHARE,
    "latency": Allowed.DURATION,
    "start": Allowed.DURATION,
}
_EVERY_NETWORK = {**_NETWORK, "devices": Allowed.COUNT}
_SWITCH = {"pair_bandwidth": Allowed.POSITIVE, "in_network_reduction": Allowed.SPEED_UP}
_TORUS = {"dimensions": Allowed.DIMENSIONS, "wraps_from": Allowed.COUNT}


@dataclass(frozen=True)
class MatmulModel:
    """How near to its peak a device multiplies matrices: `kernels` has the formula."""

    efficiency: float
    tile_m: int
    tile_n: int
    units: int
    half_depth: float


@dataclass(frozen=True)
class Network:
    """What connects `devices` devices (None: any number of them), in nanoseconds and bytes/ns.

    `bandwidth` is what a device of a switch sends in one direction, or a link of a torus carries.
    """

    name: str
    kind: str  # "switch" or "torus"
    bandwidth: float
    efficiency: float
    latency_ns: float
    start_ns: float
    devices: int | None = None
    pair_bandwidth: float | None = None
    in_network_reduction: float | None = None
    dimensions: int = 0
    wraps_from: int = 0


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its networks: bytes, ns, bytes/ns (GB/s), operations/ns."""

    name: str
    title: str
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    launch_ns: float
    vector_flops: float
    matmul_flops: Mapping[str, float]
    matmul_model: MatmulModel
    networks: tuple[Network, ...]  # innermost first
    sources: Mapping[str, str]  # of "chip.memory", "chip.matmul.bf16", "NVLink.latency"

    @property
    def memory_rate(self) -> float:
        """Bytes/ns that kernels read and write."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def is_torus(self) -> bool:
        """Whether devices are linked as a torus, as TPUs are."""
        return any(network.kind == "torus" for network in self.networks)

    def peak(self, dtype: str) -> float:
        """Matrix operations/ns on elements of `dtype`, in StableHLO's spelling.

        A type without a figure has that of the type it is widened to: 8 bits and fewer f8E4M3FN's
        or i8's, else bf16's; f16 and bf16 each other's. `f32_high` and `f32_highest` are f32 at
        those precisions, and f32 where they have no figure. Of the rest, a complex type has a
        quarter of its parts' figure, for four products make one, any other the vector units'.
        """
        if dtype.startswith("complex<"):
            return self.peak(dtype.removeprefix("complex<").removesuffix(">")) / 4
        widened = _WIDENED_FLOATS if dtype.startswith(("f8E", "f6E", "f4E")) else ()
        for name in (dtype, *_WIDENED.get(dtype, widened)):
            if name in self.matmul_flops:
                return self.matmul_flops[name]
        return self.vector_flops


def load_hardware(name_or_path: str) -> Hardware:
    """The profile of that name, or of that file where it ends in .toml or has a slash.

    Raises ToolError, naming file and figure, for what is missing, unknown or out of range.
    """
    path = locate(name_or_path)
    with naming(str(path)):
        return _hardware(read_profile(path))


def _hardware(table: Table) -> Hardware:
    refuse_unknown(table, ("name", "title", "extends", "chip", "network"), "")
    chip = subtable(table, "chip", "[chip]")
    figures, sources = read_figures(chip, "chip.", _CHIP, _CHIP, beside=("matmul", "matmul_model"))
    matmul = subtable(chip, "matmul", "[chip.matmul]")
    peaks, peak_sources = read_figures(matmul, "chip.matmul.", _MATMUL, ("bf16",))
    model = subtable(chip, "matmul_model", "[chip.matmul_model]")
    shape, shape_sources = read_figures(model, "chip.matmul_model.", _MODEL, _MODEL)
    networks, network_sources = _checked_networks(table)
    return Hardware(
        name=text(table, "name", ""),
        title=text(table, "title", ""),
        memory_bytes=figures["memory"] * 2**30,
        memory_bandwidth=figures["memory_bandwidth"],
        memory_efficiency=figures["memory_efficiency"],
        launch_ns=figures["launch"] * 1e3,
        vector_flops=figures["vector"] * 1e3,
        matmul_flops={dtype: value * 1e3 for dtype, value in peaks.items()},
        matmul_model=MatmulModel(
            efficiency=shape["efficiency"],
            tile_m=int(shape["tile_m"]),
            tile_n=int(shape["tile_n"]),
            units=int(shape["units"]),
            half_depth=shape["half_depth"],
        ),
        networks=networks,
        sources={**sources, **peak_sources, **shape_sources, **network_sources},
    )


def _checked_networks(table: Table) -> tuple[tuple[Network, ...], dict[str, str]]:
    """The networks, none of which another hides: only the outermost may be without limit."""
    networks: list[Network] = []
    sources: dict[str, str] = {}
    for position, entry in enumerate(networks_of(table)):
        network, said = _network(entry, position)
        if any(network.name == inner.name for inner in networks):
            raise ToolError(f"two networks are called {network.name!r}")
        if networks and network.kind == "torus":
            raise ToolError(f"{network.name!r} is a torus; only the innermost network can be one")
        if networks and (networks[-1].devices or math.inf) >= (network.devices or math.inf):
            raise ToolError(
                f"network {network.name!r} reaches no device that {networks[-1].name!r} inside of "
                f"it does not; give {networks[-1].name!r} a smaller `devices`"
            )
        networks.append(network)
        sources |= said
    if not networks:
        raise ToolError("no [[network]]: a profile needs one at least, however many devices run")
    return tuple(networks), sources


def _network(entry: Table, position: int) -> tuple[Network, dict[str, str]]:
    name = text(entry, "name", f"network[{position}].")
    kind = text(entry, "kind", f"{name}.")
    if kind not in ("switch", "torus"):
        raise ToolError(f"{name}.kind is {kind!r}, and must be 'switch' or 'torus'")
    torus = _EVERY_NETWORK | _TORUS
    allowed, required = (torus, torus) if kind == "torus" else (_EVERY_NETWORK | _SWITCH, _NETWORK)
    figures, sources = read_figures(entry, f"{name}.", allowed, required, beside=("name", "kind"))
    network = Network(
        name=name,
        kind=kind,
        bandwidth=figures["bandwidth"],
        efficiency=figures["efficiency"],
        latency_ns=figures["latency"] * 1e3,
        start_ns=figures["start"] * 1e3,
        devices=int(figures["devices"]) if "devices" in figures else None,
        pair_bandwidth=figures.get("pair_bandwidth"),
        in_network_reduction=figures.get("in_network_reduction"),
        dimensions=int(figures.get("dimensions", 0)),
        wraps_from=int(figures.get("wraps_from", 0)),
    )
    return network, sources
