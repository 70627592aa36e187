"""Devices and their networks: the figures of a profile, read from TOML and checked.

A profile is a file of `profiles/`, or one that the user names. Every figure is a table with its
`value` and its `source`: a public address, or how it was derived from figures that have one.

    name = "h100"
    title = "NVIDIA H100 SXM5 80 GB"
    compile_as = "h100"     # optional: the chip that XLA is told to compile for, `targets.chips`

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
    sustained  = { value = 0.70, source = "…" }   # share that the power limit allows; or left out

    [host]                                        # optional: the link to the host's memory
    to_host   = { value = 52, source = "…" }      # GB/s that large copies to the host reach, and
    to_device = { value = 52, source = "…" }      # GB/s from the host

    [[network]]                                                     # innermost first
    name      = "NVLink"
    kind      = "switch"                          # or "torus"
    devices   = { value = 8, source = "…" }       # of one domain; unlimited if left out
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
                                                  # the next five are optional (`contention`):
    traffic   = { value = 3, source = "…" }       # memory bytes moved for each byte sent
    channels  = { value = 24, source = "…" }      # compute units that a large collective holds
    pair_channels = { value = 32, source = "…" }          # the same for all_to_all and permutes,
    in_network_channels = { value = 16, source = "…" }    # and for an all_reduce by the switch
    channel_bytes = { value = 32768, source = "…" }       # the least bytes that each unit sends
    any_permute_to = { value = 16, source = "…" } # optional, of a torus: the most chips of a slice
                                                  # in which any permute overlaps with compute;
                                                  # unlimited if left out (`as_compiled`)
    wraps_from = { value = 16, source = "…" }     # of a torus: the least length of an axis that is
                                                  # a ring; in three dimensions all axes have to be
                                                  # multiples of it

A file may extend another profile, `extends = "h100"` or a path relative to it, and give only the
figures that differ. A figure replaces that of the same name. Tables of figures are merged, and so
are networks of the same name. A new network is outermost.

    extends = "h100"                                    h100's tables, with another bandwidth of
    [[network]]                              ==>        its network InfiniBand
    name = "InfiniBand"
    bandwidth = { value = 25, source = "…" }
"""

from __future__ import annotations

import enum
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stablehlo_tools.diagnostics import ToolError, did_you_mean, naming, nearest
from stablehlo_tools.files.json_text import read_bounded

# A type without a figure has that of the first of these types that has one.
_WIDENED = {
    "f16": ("bf16",),
    "f32_high": ("f32",),
    "f32_highest": ("f32_high", "f32"),
    "bf16": ("f16",),
    "i8": ("bf16",),
    **dict.fromkeys(("i1", "i2", "i4", "ui2", "ui4", "ui8"), ("i8", "bf16")),
}
_WIDENED_FLOATS = ("f8E4M3FN", "bf16")  # of every f8E…, f6E… and f4E…


@dataclass(frozen=True)
class MatmulModel:
    """The share of its peak at which a device multiplies matrices; the formula is in `kernels`."""

    efficiency: float
    tile_m: int
    tile_n: int
    units: int
    half_depth: float
    sustained: float = 1.0


@dataclass(frozen=True)
class HostLink:
    """Bytes/ns that large copies to the host's memory reach, and those from it."""

    to_host: float
    to_device: float


@dataclass(frozen=True)
class Network:
    """A network that connects `devices` devices (None: any number), in ns and bytes/ns.

    `bandwidth` is in one direction: of a switch that of a device, of a torus that of a link.
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
    any_permute_to: int | None = None
    traffic: float = 0.0
    channels: float | None = None
    pair_channels: float | None = None
    in_network_channels: float | None = None
    channel_bytes: float | None = None


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
    compile_as: str | None = None  # the chip that compilers compile for instead
    host: HostLink | None = None

    @property
    def memory_rate(self) -> float:
        """The bytes/ns at which kernels read and write device memory."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def is_torus(self) -> bool:
        """True if devices are linked as a torus, as TPUs are."""
        return any(network.kind == "torus" for network in self.networks)

    def peak(self, dtype: str) -> float:
        """Returns matrix operations/ns on elements of `dtype`, in StableHLO's spelling.

        A type without a figure has that of the type it is widened to. Types of 8 bits or fewer
        widen to f8E4M3FN or i8, else to bf16; f16 and bf16 to each other. `f32_high` and
        `f32_highest` are f32 at those precisions, and widen to f32. A complex type has a quarter
        of its parts' figure, because a complex product is four real ones. Any other type has the
        figure of the vector units.
        """
        if dtype.startswith("complex<"):
            return self.peak(dtype.removeprefix("complex<").removesuffix(">")) / 4
        widened = _WIDENED_FLOATS if dtype.startswith(("f8E", "f6E", "f4E")) else ()
        for name in (dtype, *_WIDENED.get(dtype, widened)):
            if name in self.matmul_flops:
                return self.matmul_flops[name]
        return self.vector_flops


def known_hardware() -> tuple[str, ...]:
    """Returns the names of the profiles in the package, sorted."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def load_hardware(name_or_path: str) -> Hardware:
    """Reads the profile of that name, or that file if it ends in .toml or has a slash.

    Raises ToolError, naming file and figure, if a figure is missing, unknown or out of range.
    """
    path = _locate(name_or_path)
    with naming(str(path)):
        return _hardware(_with_base(path, ()))


def is_file(name_or_path: str) -> bool:
    """Returns True for the path of a profile: it ends in .toml or has a slash."""
    return name_or_path.endswith(".toml") or "/" in name_or_path


_PROFILES = Path(__file__).parent / "profiles"
_MOST = 1e300  # larger whole numbers cannot become floats
type _Table = dict[str, object]


class _Allowed(enum.Enum):
    """The range of a figure; the value is the text of the error message."""

    POSITIVE = "a number above 0"
    SHARE = "a share, above 0 and at most 1"
    COUNT = "a whole number above 0"
    DURATION = "a number of 0 or more"
    SPEED_UP = "a number of 1 or more"
    DIMENSIONS = "1, 2 or 3"

    def holds(self, value: object) -> bool:
        """Returns True if `value` is a number in this range; bool, nan and inf never are."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not abs(value) < _MOST:  # nor is NaN
            return False
        match self:
            case _Allowed.POSITIVE:
                return value > 0
            case _Allowed.SHARE:
                return 0 < value <= 1
            case _Allowed.COUNT:
                return value > 0 and value == int(value)
            case _Allowed.DURATION:
                return value >= 0
            case _Allowed.SPEED_UP:
                return value >= 1
            case _Allowed.DIMENSIONS:
                return value in (1, 2, 3)


_CHIP = {
    "memory": _Allowed.POSITIVE,
    "memory_bandwidth": _Allowed.POSITIVE,
    "memory_efficiency": _Allowed.SHARE,
    "launch": _Allowed.DURATION,
    "vector": _Allowed.POSITIVE,
}
_MATMUL: dict[str, _Allowed] = dict.fromkeys(
    (
        *("bf16", "f16", "f32", "f32_high", "f32_highest", "f64"),
        *("f8E4M3FN", "f8E5M2", "f4E2M1FN", "i8", "i4"),
    ),
    _Allowed.POSITIVE,
)
_MODEL = {
    "efficiency": _Allowed.SHARE,
    "tile_m": _Allowed.COUNT,
    "tile_n": _Allowed.COUNT,
    "units": _Allowed.COUNT,
    "half_depth": _Allowed.DURATION,
}
_LIMITED_MODEL = {**_MODEL, "sustained": _Allowed.SHARE}
_HOST = {"to_host": _Allowed.POSITIVE, "to_device": _Allowed.POSITIVE}
_NETWORK = {
    "bandwidth": _Allowed.POSITIVE,
    "efficiency": _Allowed.SHARE,
    "latency": _Allowed.DURATION,
    "start": _Allowed.DURATION,
}
_CONTENTION = {
    "traffic": _Allowed.DURATION,
    "channels": _Allowed.COUNT,
    "pair_channels": _Allowed.COUNT,
    "in_network_channels": _Allowed.COUNT,
    "channel_bytes": _Allowed.POSITIVE,
}
_EVERY_NETWORK = {**_NETWORK, **_CONTENTION, "devices": _Allowed.COUNT}
_SWITCH = {"pair_bandwidth": _Allowed.POSITIVE, "in_network_reduction": _Allowed.SPEED_UP}
_TORUS = {"dimensions": _Allowed.DIMENSIONS, "wraps_from": _Allowed.COUNT}
_LIMITED_TORUS = {**_TORUS, "any_permute_to": _Allowed.COUNT}


def _hardware(table: _Table) -> Hardware:
    _refuse_unknown(
        table, ("name", "title", "extends", "compile_as", "chip", "host", "network"), ""
    )
    chip = _subtable(table, "chip", "[chip]")
    figures, sources = _read_figures(chip, "chip.", _CHIP, _CHIP, beside=("matmul", "matmul_model"))
    matmul = _subtable(chip, "matmul", "[chip.matmul]")
    peaks, peak_sources = _read_figures(matmul, "chip.matmul.", _MATMUL, ("bf16",))
    model = _subtable(chip, "matmul_model", "[chip.matmul_model]")
    shape, shape_sources = _read_figures(model, "chip.matmul_model.", _LIMITED_MODEL, _MODEL)
    networks, network_sources = _checked_networks(table)
    link, link_sources = _read_figures(
        _subtable(table, "host", "[host]"), "host.", _HOST, _HOST if "host" in table else ()
    )
    return Hardware(
        name=_text(table, "name", ""),
        title=_text(table, "title", ""),
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
            sustained=shape.get("sustained", 1.0),
        ),
        networks=networks,
        sources={**sources, **peak_sources, **shape_sources, **link_sources, **network_sources},
        compile_as=_text(table, "compile_as", "") if "compile_as" in table else None,
        host=HostLink(**link) if link else None,
    )


def _checked_networks(table: _Table) -> tuple[tuple[Network, ...], dict[str, str]]:
    """Returns the networks, innermost first, and the sources of their figures.

    Raises ToolError unless each network joins more devices than the one inside it. So only the
    outermost may be without limit.
    """
    networks: list[Network] = []
    sources: dict[str, str] = {}
    for position, entry in enumerate(_networks_of(table)):
        network, said = _network(entry, position)
        if any(network.name == inner.name for inner in networks):
            raise ToolError(f"two networks are called {network.name!r}")
        if networks and network.kind == "torus":
            raise ToolError(f"{network.name!r} is a torus; only the innermost network can be one")
        if networks and (networks[-1].devices or math.inf) >= (network.devices or math.inf):
            raise ToolError(
                f"network {network.name!r} must reach more devices than {networks[-1].name!r} "
                f"inside it; give {networks[-1].name!r} a smaller `devices`"
            )
        networks.append(network)
        sources |= said
    if not networks:
        raise ToolError("no [[network]]: a profile needs at least one, for any number of devices")
    return tuple(networks), sources


def _networks_of(table: _Table) -> list[_Table]:
    """Returns the `[[network]]` tables, innermost first. Raises ToolError for any other form."""
    networks = table.get("network", [])
    if not isinstance(networks, list) or not all(isinstance(entry, dict) for entry in networks):
        raise ToolError("networks must be tables, each under [[network]]")
    return cast("list[_Table]", networks)


def _network(entry: _Table, position: int) -> tuple[Network, dict[str, str]]:
    name = _text(entry, "name", f"network[{position}].")
    kind = _text(entry, "kind", f"{name}.")
    if kind not in ("switch", "torus"):
        raise ToolError(f"{name}.kind is {kind!r}, but must be 'switch' or 'torus'")
    if kind == "torus":
        allowed, required = _EVERY_NETWORK | _LIMITED_TORUS, {**_NETWORK, **_TORUS, "devices": 0}
    else:
        allowed, required = _EVERY_NETWORK | _SWITCH, _NETWORK
    figures, sources = _read_figures(entry, f"{name}.", allowed, required, beside=("name", "kind"))
    values: dict[str, Any] = dict(figures)
    for key in ("latency", "start"):  # in microseconds
        values[f"{key}_ns"] = values.pop(key) * 1e3
    for key in ("devices", "dimensions", "wraps_from", "any_permute_to"):
        if key in values:
            values[key] = int(values[key])
    return Network(name, kind, **values), sources


def _subtable(table: _Table, key: str, where: str) -> _Table:
    """Returns the table `key`, or an empty one if absent: its figures are then reported missing."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ToolError(f"{where} must be a table, not {value!r}")
    return cast("_Table", value)


def _text(table: _Table, key: str, where: str) -> str:
    """Returns a required string. Raises ToolError if it is absent or something else."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ToolError(f"{where}{key} is {_shown(value)}, but must be a string with text")
    return value


def _refuse_unknown(table: _Table, known: Iterable[str], where: str) -> None:
    """Raises ToolError for the first key that is not among `known`."""
    names = list(known)
    for key in table:
        if key not in names:
            hint = did_you_mean(key, names) or f"known here: {', '.join(names)}"
            raise ToolError(f"{where}{key} is not known; {hint}")


def _read_figures(
    table: _Table,
    where: str,
    allowed: Mapping[str, _Allowed],
    required: Iterable[str],
    beside: Iterable[str] = (),
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the numbers of the `allowed` figures that `table` has, and their sources.

    `where` is the prefix of each name in messages and in the sources. `beside` are keys of the
    table that are not figures. Raises ToolError for any other key, a missing required figure, a
    value out of range, and a figure without a source.
    """
    _refuse_unknown(table, (*allowed, *beside), where)
    for name in required:
        if name not in table:
            raise ToolError(f"{where}{name} is missing")
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, rule in allowed.items():
        if name in table:
            values[name], sources[where + name] = _figure(table[name], where + name, rule)
    return values, sources


def _figure(entry: object, name: str, rule: _Allowed) -> tuple[float, str]:
    if not isinstance(entry, dict):
        raise ToolError(
            f"{name} is {entry!r} without a source; "
            f'write {name.rpartition(".")[2]} = {{ value = {entry}, source = "…" }}'
        )
    table = cast("_Table", entry)
    _refuse_unknown(table, ("value", "source"), f"{name}.")
    value = table.get("value")
    if not rule.holds(value):
        raise ToolError(f"{name} is {_shown(value)}, but must be {rule.value}")
    source = table.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ToolError(f"{name} has no source; say where the figure is published or derived from")
    return float(cast("float", value)), source


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


def _locate(name_or_path: str, beside: Path = Path()) -> Path:
    """Returns the file of a known name, or the path itself."""
    if is_file(name_or_path):
        return beside / name_or_path
    known, name = known_hardware(), name_or_path.lower()
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {near!r}? " if near else ""
        raise ToolError(
            f"no hardware profile {name_or_path!r}; {meant}known: {', '.join(known)}, "
            "or the path of a .toml file",
            instead=(name_or_path, near) if near else None,
        )
    return _PROFILES / f"{name}.toml"


def _with_base(path: Path, below: tuple[Path, ...]) -> _Table:
    """Returns the tables of a file, merged over those of the file that it extends."""
    if path in below:
        raise ToolError(f"extends itself through {below[-1]}")
    table = _read_toml(path)
    if "extends" not in table:
        return table
    base = _with_base(_locate(_text(table, "extends", ""), path.parent), (*below, path))
    return _merge_tables(base, {key: value for key, value in table.items() if key != "extends"})


def _merge_tables(base: _Table, over: _Table) -> _Table:
    """Merges the tables of `over` into those of the base; figures replace the base's."""
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        if key == "network":
            changed = {entry.get("name"): entry for entry in _networks_of(over)}
            kept = _networks_of(base)
            names = [entry.get("name") for entry in kept]
            merged[key] = [
                *(_merge_tables(entry, changed.get(entry.get("name"), {})) for entry in kept),
                *(entry for entry in _networks_of(over) if entry.get("name") not in names),
            ]
        elif isinstance(value, dict) and isinstance(known, dict) and "value" not in value:
            merged[key] = _merge_tables(cast("_Table", known), cast("_Table", value))
        else:
            merged[key] = value
    return merged


def _read_toml(path: Path) -> _Table:
    """Reads the tables of a TOML file. Raises ToolError if it is unreadable or not TOML."""
    try:
        return tomllib.loads(read_bounded(path).decode())
    except UnicodeDecodeError:
        raise ToolError("not TOML: this profile is not UTF-8 text") from None
    except RecursionError:
        raise ToolError("not TOML: this profile nests lists or tables too deeply") from None
    except ValueError as error:  # TOMLDecodeError is one, as is that of thousands of digits
        raise ToolError(f"not TOML: {error}") from None
