"""Where devices stand: in the domains of switches, and at the coordinates of a torus slice.

Device d is in domain d // devices of a switch. On a torus it is at row-major coordinates of the
slice, which for a number of chips has the shape that clouds sell: near to square or to a cube.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.diagnostics import ToolError

AXES = "xyz"

type Coordinates = tuple[int, ...]
type Link = tuple[int, int, Coordinates]  # axis, direction (1 or -1), and where it starts


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a group of devices has to cross of one network.

    A part is a domain of the network inside (of the innermost: a device) with members in it. `most`
    is the largest number of parts that one domain joins, `hops` are parts less domains, `streams`
    the members of the smallest part, each with a port of its own, and `away` the most members that
    one member reaches over this network and none inside.
    """

    network: Network
    level: int  # 0 of the innermost network
    most: int
    hops: int
    streams: int
    away: int


def crossings(networks: Sequence[Network], group: Sequence[int]) -> tuple[Crossing, ...]:
    """What `group` crosses, innermost first. Raises ToolError where no network joins it all."""
    crossed: list[Crossing] = []
    parts = {device: (device,) for device in group}
    for level, network in enumerate(networks):
        domains: dict[int, list[tuple[int, ...]]] = {}
        for members in parts.values():
            domains.setdefault(domain(network, members[0]), []).append(members)
        if len(domains) < len(parts):
            crossed.append(_crossing(network, level, list(domains.values())))
        parts = {
            number: tuple(itertools.chain.from_iterable(joined))
            for number, joined in domains.items()
        }
        if len(parts) == 1:
            return tuple(crossed)
    raise ToolError(
        f"no network of this hardware joins devices {min(group)} and {max(group)}; "
        f"{networks[-1].name!r}, the outermost, joins {networks[-1].devices}"
    )


def domain(network: Network, device: int) -> int:
    """The number of the domain that `device` is in."""
    return 0 if network.devices is None else device // network.devices


def _crossing(network: Network, level: int, domains: list[list[tuple[int, ...]]]) -> Crossing:
    parts = [part for joined in domains for part in joined]
    return Crossing(
        network=network,
        level=level,
        most=max(len(joined) for joined in domains),
        hops=len(parts) - len(domains),
        streams=min(len(part) for part in parts),
        away=max(sum(map(len, joined)) - len(part) for joined in domains for part in joined),
    )


@lru_cache(maxsize=64)
def slice_shape(devices: int, dimensions: int, wraps_from: int) -> Coordinates:
    """The shape of a slice of so many chips, its shortest axis first.

    Of all factorisations the one of the least sum; in three dimensions one whose axes are all
    multiples of `wraps_from`, as slices of whole cubes are, comes before any other.
    """
    shapes = list(_factorisations(devices, dimensions))
    if dimensions > 2:
        cubes = [shape for shape in shapes if all(axis % wraps_from == 0 for axis in shape)]
        shapes = cubes or shapes
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _factorisations(number: int, parts: int, least: int = 1) -> Iterator[Coordinates]:
    """`number` as a product of `parts` factors in rising order."""
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    for factor in range(least, math.isqrt(number) + 1):
        if number % factor == 0:
            for rest in _factorisations(number // factor, parts - 1, factor):
                yield (factor, *rest)


@dataclass(frozen=True, slots=True)
class Torus:
    """A slice: its shape, and which of its axes close to a ring."""

    shape: Coordinates
    wraps: tuple[bool, ...]

    def coordinates(self, device: int) -> Coordinates:
        """Row-major coordinates of a device of the slice."""
        positions: list[int] = []
        for length in reversed(self.shape):
            device, position = divmod(device, length)
            positions.append(position)
        return tuple(reversed(positions))

    def distance(self, source: int, target: int) -> int:
        """Links on the shortest way."""
        return sum(
            min(abs(a - b), length - abs(a - b)) if wrap else abs(a - b)
            for a, b, length, wrap in zip(
                self.coordinates(source),
                self.coordinates(target),
                self.shape,
                self.wraps,
                strict=True,
            )
        )

    def loads(self, flows: Iterable[tuple[int, int, float]]) -> dict[Link, float]:
        """Bytes on each link when (source, target, bytes) go axis by axis, the shorter way round.

        Where both ways round are as long, half goes each way.
        """
        loads: defaultdict[Link, float] = defaultdict(float)
        for source, target, amount in flows:
            here, there = self.coordinates(source), self.coordinates(target)
            for axis in range(len(self.shape)):
                for direction, share in self._ways(axis, here[axis], there[axis]):
                    for link in self._path(axis, direction, here, there[axis]):
                        loads[link] += amount * share
                here = (*here[:axis], there[axis], *here[axis + 1 :])
        return loads

    def _ways(self, axis: int, here: int, there: int) -> tuple[tuple[int, float], ...]:
        if here == there:
            return ()
        ahead = (there - here) % self.shape[axis]
        if not self.wraps[axis]:
            return ((1 if there > here else -1, 1.0),)
        if 2 * ahead == self.shape[axis]:
            return ((1, 0.5), (-1, 0.5))
        return ((1 if 2 * ahead < self.shape[axis] else -1, 1.0),)

    def _path(self, axis: int, direction: int, here: Coordinates, there: int) -> Iterator[Link]:
        position = here[axis]
        while position != there:
            yield axis, direction, (*here[:axis], position, *here[axis + 1 :])
            position = (position + direction) % self.shape[axis]


def torus_of(network: Network, devices: int) -> Torus:
    """The slice of `network` that a program on `devices` devices runs on.

    An axis of at least `wraps_from` chips closes to a ring; in three dimensions, where optical
    switches close the axes of whole cubes, all axes have to be multiples of it.
    """
    chips = devices if network.devices is None else min(devices, network.devices)
    shape = slice_shape(chips, network.dimensions, network.wraps_from)
    if network.dimensions > 2:
        whole = all(length % network.wraps_from == 0 for length in shape)
        return Torus(shape, (whole,) * len(shape))
    return Torus(shape, tuple(length >= network.wraps_from for length in shape))
