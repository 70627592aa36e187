"""GSPMD's shardings: what an `mhlo.sharding` says, and one mesh over which several can be said.

A tiled sharding gives each dimension of a value a number of tiles, and each tile a device:
`{devices=[4,2]<=[8]}` in row-major order, `<=[2,4]T(1,0)` in that of a transposed array, `0,2,1,3`
one by one. The last dimensions of tiles may be none of the value's: along them each device holds
the same (`last_tile_dim_replicate`), runs a program of its own (`manual`) or holds a part of a sum
(`unreduced`).

Shardy names the axes of a mesh instead. Which part of a dimension a device holds is, of its
position in the device order, a number of digits in a mixed radix; the axes of the mesh are those
that all such digits are made of.

Source: XLA, `hlo_sharding.h`, `tile_assignment.h` and the text form of `hlo_parser.cc`.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stablehlo_tools import bindings

MANUAL, REPLICATED, UNREDUCED = "manual", "replicated", "unreduced"

# `shard_as 3` (False) or `shard_like 3` (True): sharded like others of the group.
type Group = tuple[int, bool]

_METADATA = re.compile(r"\s*metadata=\{(?:[^{}]|\{[^{}]*\})*\}|/\*.*?\*/")
_ONE = re.compile(
    r"\{\s*(?:(?P<word>replicated|manual|unreduced|unknown)"
    r"|maximal\s+(?:device=)?(?P<device>\d+)"
    r"|devices=\[(?P<tiles>[\d,\s]+)\]\s*"
    r"(?:<=\s*\[(?P<iota>[\d,\s]+)\](?:\s*T\((?P<order>[\d,\s]+)\))?|(?P<listed>\d[\d,\s]*)))?"
    r"(?:\s*(?P<last>last_tile_dim_replicate)|\s*last_tile_dims=\{(?P<subgroups>[\w,\s]*)\})?"
    r"(?:\s*shard_(?P<joins>as|like)\s+(?P<group>\d+))?\s*\}"
)


@dataclass(frozen=True)
class HloSharding:
    """The sharding of one array. `tiles` count those along each of its dimensions, then along what
    `subgroups` names; `devices` has one for each tile, row-major."""

    kind: str  # "tiled", "maximal", "replicated", "manual", "unreduced" or "unknown"
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    subgroups: tuple[str, ...] = ()
    group: Group | None = None

    @property
    def rank(self) -> int | None:
        """Of how many dimensions the array is; None where any will do."""
        return len(self.tiles) - len(self.subgroups) if self.kind == "tiled" else None

    def coordinates(self, dim: int) -> np.ndarray:
        """For each device, which tile along a dimension of tiles it holds."""
        held = np.empty(len(self.devices), dtype=np.int64)
        held[list(self.devices)] = np.indices(self.tiles)[dim].ravel()
        return held


@lru_cache(maxsize=4096)
def parse_hlo_sharding(data: bytes) -> tuple[HloSharding, ...]:
    """The shardings of an op's results: text, or a serialized OpSharding as older jax writes it.

    Raises a ValueError that says what is not understood.
    """
    return tuple(map(_parsed, split_hlo_shardings(data)))


def split_hlo_shardings(data: bytes) -> list[str]:
    """The texts of the shardings of which a tuple's is made, or the one. Raises a ValueError."""
    if not data.startswith(b"{"):
        data = bindings.hlo_sharding_text(data).encode()
    text = _METADATA.sub("", data.decode(errors="replace")).strip()
    if not re.fullmatch(r"\{\s*(\{.*\})?\s*\}", text):
        return [text]
    inner = text[1:-1].strip()
    return re.split(r"(?<=\})\s*,\s*(?=\{)", inner) if inner else []


def _parsed(text: str) -> HloSharding:
    match = _ONE.fullmatch(text)
    if match is None or not text[1:-1].strip():
        raise ValueError(f"{text} is not a sharding that is known here")
    group = (int(match["group"]), match["joins"] == "like") if match["group"] else None
    if match["device"]:
        return HloSharding("maximal", devices=(int(match["device"]),), group=group)
    if match["tiles"] is None:
        return HloSharding(match["word"] or "unknown", group=group)
    tiles = _numbers(match["tiles"])
    if match["iota"]:
        shape = _numbers(match["iota"])
        order = _numbers(match["order"]) if match["order"] else tuple(range(len(shape)))
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"{text}: T({match['order']}) is no order of {len(shape)} dimensions")
        ids = np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel().tolist()
    else:
        ids = list(_numbers(match["listed"]))
    if math.prod(tiles) != len(ids) or sorted(ids) != list(range(len(ids))):
        raise ValueError(f"{text} does not give each of its {math.prod(tiles)} tiles a device")
    subgroups = ("replicated",) if match["last"] else ()
    if match["subgroups"] is not None:
        subgroups = tuple(re.findall(r"\w+", match["subgroups"]))
    if not {MANUAL, REPLICATED, UNREDUCED}.issuperset(subgroups) or len(subgroups) > len(tiles):
        raise ValueError(f"{text}: unknown last_tile_dims")
    return HloSharding("tiled", tiles, tuple(ids), subgroups, group)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


type Digit = tuple[int, int, int]  # stride in positions, size, weight
type Axis = tuple[str, int]  # its name and size


@dataclass(frozen=True)
class TileMesh:
    """A mesh, its axes from major to minor, over devices: by their ids unless those are in order.

    `divided` has, for each tiled sharding and each dimension of its tiles, the axes that divide it.
    """

    axes: tuple[Axis, ...]
    device_ids: tuple[int, ...]
    divided: Mapping[HloSharding, tuple[tuple[str, ...], ...]]


def mesh_of_tiles(
    shardings: Sequence[HloSharding], devices: int, known: Sequence[Axis] = ()
) -> TileMesh | None:
    """One mesh over so many devices by whose axes all tiled shardings divide; None if none does.

    It is the known one where its axes will do. Devices count up from 0, or stand in the order in
    which one of the shardings lists them.
    """
    counted = tuple(range(devices))
    for order in dict.fromkeys([counted, *(each.devices for each in shardings)]):
        digits = {each: _all_digits(each, order) for each in shardings}
        found = {each: dims for each, dims in digits.items() if dims is not None}
        if len(found) < len(digits):
            continue
        cuts = _cuts(found.values(), devices)
        if cuts is None:
            continue
        axes = known if order == counted and cuts <= _cuts_of(known) else _named(sorted(cuts))
        divided = {
            each: tuple(tuple(_axes(digits, axes)) for digits in dims)
            for each, dims in found.items()
        }
        return TileMesh(tuple(axes), () if order == counted else order, divided)
    return None


def _cuts(found: Iterable[Sequence[Sequence[Digit]]], devices: int) -> set[int] | None:
    """The strides at which axes begin and end that all digits are made of; None if there are no
    such axes, as for digits of 2 and of 3 at one place."""
    cuts = {1, devices}
    for dims in found:
        for stride, size, _ in itertools.chain.from_iterable(dims):
            cuts |= {stride, stride * size}
    broken = any(after % before for before, after in itertools.pairwise(sorted(cuts)))
    return None if broken else cuts


def _cuts_of(axes: Sequence[Axis]) -> set[int]:
    sizes = [size for _, size in reversed(axes)]
    return {1, *itertools.accumulate(sizes, operator.mul)}


def _named(cuts: Sequence[int]) -> list[Axis]:
    sizes = [after // before for before, after in itertools.pairwise(cuts)]
    return [(f"axis_{number}", size) for number, size in enumerate(reversed(sizes))]


def _axes(digits: Sequence[Digit], axes: Sequence[Axis]) -> list[str]:
    """The axes that some digits are made of, major first."""
    strides = [math.prod(size for _, size in axes[number + 1 :]) for number in range(len(axes))]
    return [
        name
        for stride, size, _ in sorted(digits, key=lambda digit: -digit[2])
        for (name, extent), begin in zip(axes, strides, strict=True)
        if extent > 1 and stride <= begin < stride * size
    ]


def _all_digits(sharding: HloSharding, order: Sequence[int]) -> list[list[Digit]] | None:
    """For each dimension of tiles the digits that say which of them a device holds."""
    all_digits: list[list[Digit]] = []
    own = len(sharding.tiles) - len(sharding.subgroups)
    for dim, (tiles, name) in enumerate(
        list(zip(sharding.tiles, [*[""] * own, *sharding.subgroups], strict=True))
    ):
        # Who is who among devices that hold the same is nobody's concern.
        held = sharding.coordinates(dim)[list(order)]
        digits = [] if tiles == 1 or name == REPLICATED else _digits(held)
        if digits is None:
            return None
        all_digits.append(digits)
    return all_digits


def _digits(held: np.ndarray) -> list[Digit] | None:
    """The digits of a position that `held[position]` is made of, minor first; None where it is not
    `sum(position // stride % size * weight)`."""
    count, unit = len(held), 1
    digits: list[Digit] = []
    while unit < count:
        ahead = np.flatnonzero(held[unit::unit])
        if not len(ahead):
            break
        stride = unit * (int(ahead[0]) + 1)
        size, weight = 1, int(held[stride])
        while stride * size < count and held[stride * size] == size * weight:
            size += 1
        if size == 1 or count % (stride * size):
            return None
        digits.append((stride, size, weight))
        unit = stride * size
    positions = np.arange(count)
    made = sum((positions // s % size * w for s, size, w in digits), np.zeros_like(positions))
    return digits if np.array_equal(made, held) else None
