"""Parses GSPMD's shardings (`mhlo.sharding`), and finds one mesh that expresses several of them.

A tiled sharding gives each dimension of a value a number of tiles, and each tile a device:
`{devices=[4,2]<=[8]}` in row-major order, `<=[2,4]T(1,0)` in that of a transposed array, `0,2,1,3`
as a list. The last tile dimensions may be subgroups instead of dimensions of the value. Along a
subgroup, each device has a copy (`last_tile_dim_replicate`), a program of its own (`manual`) or a
part of a sum (`unreduced`).

Shardy names the axes of a mesh instead. The tile that a device holds is computed from its position
in the device order by digits in a mixed radix. The axes of the mesh are the common factors of all
these digits.

Source: XLA, `hlo_sharding.h`, `tile_assignment.h` and the text form of `hlo_parser.cc`.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stablehlo_tools import bindings

MANUAL, REPLICATED, UNREDUCED = "manual", "replicated", "unreduced"

# `shard_as 3` (False) or `shard_like 3` (True): same sharding as the others of the group.
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
    """The sharding of one array.

    `tiles` has the number of tiles along each dimension, then along each of `subgroups`. `devices`
    has one device for each tile, row-major.
    """

    kind: str  # "tiled", "maximal", "replicated", "manual", "unreduced" or "unknown"
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    subgroups: tuple[str, ...] = ()
    group: Group | None = None

    @property
    def rank(self) -> int | None:
        """The rank of the array; None if the sharding fits any rank."""
        return len(self.tiles) - len(self.subgroups) if self.kind == "tiled" else None

    def coordinates(self, dim: int) -> np.ndarray:
        """Returns the index of each device's tile along dimension `dim` of `tiles`."""
        held = np.empty(len(self.devices), dtype=np.int64)
        held[list(self.devices)] = np.indices(self.tiles)[dim].ravel()
        return held


@lru_cache(maxsize=4096)
def parse_hlo_sharding(data: bytes) -> tuple[HloSharding, ...]:
    """Parses the shardings of an op's results: text, or a serialized OpSharding from older jax.

    Raises ValueError for an invalid sharding.
    """
    return tuple(map(_parse_one, split_hlo_shardings(data)))


def split_hlo_shardings(data: bytes) -> list[str]:
    """Returns the texts of a tuple's shardings, or the only one. Raises ValueError if invalid."""
    if not data.startswith(b"{"):
        data = bindings.hlo_sharding_text(data).encode()
    text = _METADATA.sub("", data.decode(errors="replace")).strip()
    if not re.fullmatch(r"\{\s*(\{.*\})?\s*\}", text):
        return [text]
    inner = text[1:-1].strip()
    return re.split(r"(?<=\})\s*,\s*(?=\{)", inner) if inner else []


def _parse_one(text: str) -> HloSharding:
    match = _ONE.fullmatch(text)
    if match is None or not text[1:-1].strip():
        raise ValueError(f"unknown sharding {text}")
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
            raise ValueError(
                f"{text}: T({match['order']}) is not a permutation of {len(shape)} dimensions"
            )
        ids = np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel().tolist()
    else:
        ids = list(_numbers(match["listed"]))
    if math.prod(tiles) != len(ids) or sorted(ids) != list(range(len(ids))):
        raise ValueError(f"{text} does not assign a device to each of its {math.prod(tiles)} tiles")
    subgroups = ("replicated",) if match["last"] else ()
    if match["subgroups"] is not None:
        subgroups = tuple(re.findall(r"\w+", match["subgroups"]))
    if not {MANUAL, REPLICATED, UNREDUCED}.issuperset(subgroups) or len(subgroups) > len(tiles):
        raise ValueError(f"{text}: unknown last_tile_dims")
    return HloSharding("tiled", tiles, tuple(ids), subgroups, group)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


type Digit = tuple[int, int, int]  # stride in positions, size, weight
type Axis = tuple[str, int]  # name and size


@dataclass(frozen=True)
class TileMesh:
    """A mesh with its axes, major first; `device_ids` is empty if they are in default order.

    `divided` maps each tiled sharding to the axes that divide each of its tile dimensions.
    """

    axes: tuple[Axis, ...]
    device_ids: tuple[int, ...]
    divided: Mapping[HloSharding, tuple[tuple[str, ...], ...]]


def mesh_of_tiles(
    shardings: Sequence[HloSharding], devices: int, known: Sequence[Axis] = ()
) -> TileMesh | None:
    """Returns one mesh over `devices` whose axes express all tiled shardings; None without one.

    It is the known mesh if that expresses them. Its device order is 0, 1, 2, … or the order in
    which one of the shardings lists the devices.
    """
    counted = tuple(range(devices))
    known_cuts = {1, *itertools.accumulate((size for _, size in reversed(known)), operator.mul)}
    for order in dict.fromkeys([counted, *(each.devices for each in shardings)]):
        digits = {each: _all_digits(each, order) for each in shardings}
        found = {each: dims for each, dims in digits.items() if dims is not None}
        if len(found) < len(digits):
            continue
        # The strides at which axes begin and end, so that every digit is a product of axes.
        cuts = {1, devices}
        for stride, size, _ in itertools.chain.from_iterable(itertools.chain(*found.values())):
            cuts |= {stride, stride * size}
        # There are no such axes for example for digits of sizes 2 and 3 at the same stride.
        if any(after % before for before, after in itertools.pairwise(sorted(cuts))):
            continue
        axes = known
        if order != counted or not cuts <= known_cuts:
            ends = itertools.pairwise(sorted(cuts, reverse=True))
            axes = [(f"axis_{i}", after // before) for i, (after, before) in enumerate(ends)]
        divided = {
            each: tuple(tuple(_axes(digits, axes)) for digits in dims)
            for each, dims in found.items()
        }
        return TileMesh(tuple(axes), () if order == counted else order, divided)
    return None


def _axes(digits: Sequence[Digit], axes: Sequence[Axis]) -> list[str]:
    """Returns the axes whose product is these digits, major first."""
    strides = [math.prod(size for _, size in axes[number + 1 :]) for number in range(len(axes))]
    return [
        name
        for stride, size, _ in sorted(digits, key=lambda digit: -digit[2])
        for (name, extent), begin in zip(axes, strides, strict=True)
        if extent > 1 and stride <= begin < stride * size
    ]


def _all_digits(sharding: HloSharding, order: Sequence[int]) -> list[list[Digit]] | None:
    """Returns the digits of each tile dimension; None if one is not expressible in digits."""
    all_digits: list[list[Digit]] = []
    names = [""] * (len(sharding.tiles) - len(sharding.subgroups)) + list(sharding.subgroups)
    for dim, (tiles, name) in enumerate(zip(sharding.tiles, names, strict=True)):
        # Devices with copies may be in any order, so that replicated subgroups need no digits.
        held = sharding.coordinates(dim)[list(order)]
        digits = [] if tiles == 1 or name == REPLICATED else _digits(held)
        if digits is None:
            return None
        all_digits.append(digits)
    return all_digits


def _digits(held: np.ndarray) -> list[Digit] | None:
    """Returns the digits of `held`, minor first.

    None unless `held[position]` is `sum(position // stride % size * weight)` over digits.
    """
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
