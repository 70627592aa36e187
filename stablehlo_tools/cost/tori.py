"""Collectives on a torus of links, TPUs' ICI and Trainium's NeuronLink.

A program runs on a slice, whose devices are numbered in row-major order. The shape of a slice
depends only on its number of chips: it is the shape that clouds offer, close to a square or a cube.

Groups that fill boxes of the slice, like the axes of a device mesh, use all axes of their box in
parallel; the bandwidths of the axes add up. An axis that closes to a ring is used in both
directions, so a link's bandwidth counts twice. Groups with a stride share the links between their
members with the groups in between. The formulas are those of "How to Scale Your Model"
(https://jax-ml.github.io/scaling-book/sharding/) with exact counts of members. Any other group is
timed as a ring through its members, routed axis by axis, by the busiest link.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.cost.transfer_sizes import TransferTime, slowest

AXES = "xyz"

type Coordinates = tuple[int, ...]
type _Link = tuple[int, int, Coordinates]  # axis, direction (1 or -1), and where it starts
type _Group = tuple[int, ...]

_PASSES = {"all_reduce": 2}  # a reduce_scatter and an all_gather; any other kind is one pass


@lru_cache(maxsize=64)
def slice_shape(devices: int, dimensions: int, wraps_from: int) -> Coordinates:
    """Returns the shape of a slice of `devices` chips, its shortest axis first.

    Chooses the factorisation with the smallest sum. In three dimensions it prefers shapes whose
    axes are all multiples of `wraps_from`, because those are whole cubes and close to rings.
    """
    shapes = list(_factorisations(devices, dimensions))
    if dimensions > 2:
        cubes = [shape for shape in shapes if all(axis % wraps_from == 0 for axis in shape)]
        shapes = cubes or shapes
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _factorisations(number: int, parts: int, least: int = 1) -> Iterator[Coordinates]:
    """Yields the factorisations of `number` into `parts` factors of at least `least`, ascending."""
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
        """Returns the row-major coordinates of a device of the slice."""
        positions: list[int] = []
        for length in reversed(self.shape):
            device, position = divmod(device, length)
            positions.append(position)
        return tuple(reversed(positions))

    def distance(self, source: int, target: int) -> int:
        """Returns the number of links on the shortest route."""
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

    def loads(self, flows: Iterable[tuple[int, int, float]]) -> dict[_Link, float]:
        """Returns the bytes on each link if each (source, target, bytes) is routed axis by axis.

        Each axis is routed in the shorter direction. If both are equally long, each carries half.
        """
        loads: defaultdict[_Link, float] = defaultdict(float)
        for source, target, amount in flows:
            here, there = self.coordinates(source), self.coordinates(target)
            for axis in range(len(self.shape)):
                for direction, share in self._ways(axis, here[axis], there[axis]):
                    position = here[axis]
                    while position != there[axis]:
                        start = (*here[:axis], position, *here[axis + 1 :])
                        loads[axis, direction, start] += amount * share
                        position = (position + direction) % self.shape[axis]
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


def torus_of(network: Network, devices: int) -> Torus:
    """Returns the slice of `network` that a program on `devices` devices runs on.

    An axis of at least `wraps_from` chips closes to a ring. In three dimensions optical switches
    close the axes of whole cubes, so either all axes are multiples of `wraps_from` or none closes.
    """
    chips = devices if network.devices is None else min(devices, network.devices)
    shape = slice_shape(chips, network.dimensions, network.wraps_from)
    if network.dimensions > 2:
        whole = all(length % network.wraps_from == 0 for length in shape)
        return Torus(shape, (whole,) * len(shape))
    return Torus(shape, tuple(length >= network.wraps_from for length in shape))


@dataclass(frozen=True, slots=True)
class _AxisSpan:
    """The members of a box along one axis.

    `rate` is in units of a link's bandwidth: 2 for a ring that no other group shares. `hops` is the
    number of links between the two most distant members.
    """

    axis: int
    members: int
    closed: bool
    rate: float
    hops: int


def groups_on_torus(
    kind: str, size: float, groups: Sequence[_Group], torus: Torus, network: Network
) -> TransferTime:
    """Times all groups of one collective in parallel; devices are numbered within one slice."""
    boxes: list[_Box] = []
    for group in groups:
        corners = [torus.coordinates(device) for device in group]
        boxes.append(tuple(tuple(sorted(set(each))) for each in zip(*corners, strict=True)))
    # In a box, every combination of the positions is a member.
    counts = [math.prod(map(len, box)) for box in boxes]
    if counts != [len(group) for group in groups]:
        # Groups that fill no box: a ring through the members in order; all_to_all, all the pairs.
        passes = _PASSES.get(kind, 1)
        flows = [flow for group in groups for flow in _flows(kind, size * passes, group)]
        loads = torus.loads(flows)
        steps = 1 if kind == "all_to_all" else passes * max(len(group) // 2 for group in groups)
        hops = steps * max(torus.distance(source, target) for source, target, _ in flows)
        name = "routed pairs" if kind == "all_to_all" else "routed ring"
        return _time(name, max(loads.values()), hops, {axis for axis, _, _ in loads}, network)
    # The number of groups over each link, by axis and the coordinates where it starts.
    shared = Counter(
        (axis, corner)
        for box in boxes
        for axis, positions in enumerate(box)
        if len(positions) > 1
        for corner in _corners(box, axis, _links(positions, torus, axis))
    )
    return slowest(
        _along_axes(kind, size, spans, network)
        for spans in dict.fromkeys(_spans(box, torus, shared) for box in boxes)
    )


def pairs_on_torus(
    size: float, pairs: Sequence[tuple[int, int]], torus: Torus, network: Network
) -> TransferTime:
    """Times pairs in which each source sends all of its bytes; the busiest link decides.

    A link carries both directions at the same time. If all pairs use one direction of an axis, the
    result names only that direction: transfers in the other direction do not share it.
    """
    loads = torus.loads((source, target, size) for source, target in pairs)
    hops = max(torus.distance(source, target) for source, target in pairs)
    axes = sorted({axis for axis, _, _ in loads})
    time = _time("direct", max(loads.values()), hops, set(axes), network)
    links = (
        name + _way([link for link in loads if link[0] == axis], torus)
        for axis, name in zip(axes, time.links, strict=True)
    )
    return replace(time, links=tuple(links))


def _way(links: Sequence[_Link], torus: Torus) -> str:
    """Returns the direction in which these links of one axis are used, as `transfers.ways` reads
    it; "" if some link is used in both."""
    taken: dict[Coordinates, int] = {}  # by the lower end of a link
    for axis, way, start in links:
        length = torus.shape[axis]
        low = start if way > 0 else (*start[:axis], (start[axis] - 1) % length, *start[axis + 1 :])
        if taken.setdefault(low, way) != way:
            return ""
    if len(set(taken.values())) == 1:
        return "+" if 1 in taken.values() else "-"
    return ">" if taken[min(taken)] > 0 else "<"


def _along_axes(
    kind: str, size: float, spans: tuple[_AxisSpan, ...], network: Network
) -> TransferTime:
    """Times one box: an all_to_all by its slowest axis, any other kind by all axes together.

    In an all_to_all of m members on a line, m²/4 messages of 1/m of the bytes cross the middle.
    """
    members = math.prod(span.members for span in spans)
    passes = _PASSES.get(kind, 1)
    if kind == "all_to_all":
        links = max(span.members**2 // 4 / span.members * size / span.rate for span in spans)
    else:
        share = 1.0 if kind == "collective_broadcast" else (members - 1) / members
        links = passes * share * size / sum(span.rate for span in spans)
    closed = {span.closed for span in spans}
    name = (
        "ring and line" if len(closed) > 1 else "bidirectional ring" if True in closed else "line"
    )
    hops = passes * sum(span.hops for span in spans)
    return _time(name, links, hops, {span.axis for span in spans}, network)


def _flows(kind: str, size: float, group: _Group) -> Iterator[tuple[int, int, float]]:
    members = len(group)
    if kind == "all_to_all":
        for source, target in itertools.permutations(group, 2):
            yield source, target, size / members
        return
    # Half of the bytes go around the ring in each direction.
    share = 1.0 if kind == "collective_broadcast" else (members - 1) / members
    for source, target in zip(group, (*group[1:], group[0]), strict=True):
        yield source, target, size * share / 2
        yield target, source, size * share / 2


type _Box = tuple[tuple[int, ...], ...]  # the members' positions on each axis


def _spans(
    box: _Box, torus: Torus, shared: Counter[tuple[int, Coordinates]]
) -> tuple[_AxisSpan, ...]:
    spans: list[_AxisSpan] = []
    for axis, positions in enumerate(box):
        if len(positions) == 1:
            continue
        closed = _closes(positions, torus, axis)
        links = _links(positions, torus, axis)
        groups = max(shared[axis, corner] for corner in _corners(box, axis, links))
        hops = torus.shape[axis] // 2 if closed else len(links)
        spans.append(_AxisSpan(axis, len(positions), closed, (2 if closed else 1) / groups, hops))
    return tuple(spans)


def _corners(box: _Box, axis: int, links: Sequence[int]) -> Iterator[Coordinates]:
    return itertools.product(*box[:axis], links, *box[axis + 1 :])


def _closes(positions: Sequence[int], torus: Torus, axis: int) -> bool:
    """Returns True if the axis is a ring and the members are spread evenly around it."""
    length = torus.shape[axis]
    return torus.wraps[axis] and len(set(_gaps(positions, length))) == 1


def _gaps(positions: Sequence[int], length: int) -> list[int]:
    following = (*positions[1:], positions[0] + length)
    return [after - before for before, after in zip(positions, following, strict=True)]


def _links(positions: Sequence[int], torus: Torus, axis: int) -> list[int]:
    """Returns the first positions of the links that join the members.

    They are all links of a ring with evenly spread members; else all except the widest gap.
    """
    length = torus.shape[axis]
    if _closes(positions, torus, axis):
        return list(range(length))
    if not torus.wraps[axis]:
        return list(range(positions[0], positions[-1]))
    gaps = _gaps(positions, length)
    widest = gaps.index(max(gaps))
    begin = positions[(widest + 1) % len(positions)]
    return [(begin + step) % length for step in range(length - gaps[widest])]


def _time(
    algorithm: str, links: float, hops: int, axes: set[int], network: Network
) -> TransferTime:
    """Builds the time; `links` is the number of bytes on the busiest link in one direction."""
    latency = network.start_ns + hops * network.latency_ns
    bytes_ns = links / (network.bandwidth * network.efficiency)
    names = tuple(f"{network.name} {AXES[axis]}" for axis in sorted(axes))
    return TransferTime(latency + bytes_ns, latency, algorithm, names)
