"""Collectives on a torus of links, TPUs' ICI and Trainium's NeuronLink.

A program runs on a slice: device d is at row-major coordinates of it, and for a number of chips it
has the shape that clouds sell, near to square or to a cube.

Groups that fill boxes of the slice, as the axes of a device mesh do, run along the axes of their
box, on all of them at once: the bytes are divided by what each axis carries. On an axis that closes
to a ring both directions are used, so a link's bandwidth counts twice. Groups with a stride share
the links between their members with the groups in between. The formulas are those of "How to Scale
Your Model" (https://jax-ml.github.io/scaling-book/sharding/) with exact counts of members. Any
other groups are a ring through their members, routed axis by axis, timed by the busiest link.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.cost.transfers import TransferTime, slowest

AXES = "xyz"

type Coordinates = tuple[int, ...]
type _Link = tuple[int, int, Coordinates]  # axis, direction (1 or -1), and where it starts
type _Group = tuple[int, ...]

_PASSES = {"all_reduce": 2}  # a reduce_scatter and an all_gather; any other kind is one pass


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

    def loads(self, flows: Iterable[tuple[int, int, float]]) -> dict[_Link, float]:
        """Bytes on each link when (source, target, bytes) go axis by axis, the shorter way round.

        Where both ways round are as long, half goes each way.
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


@dataclass(frozen=True, slots=True)
class _Span:
    """The members of a box along one axis.

    `rate` is in links' bandwidth, 2 for a ring of its own; `hops` links lie between the members
    furthest apart.
    """

    axis: int
    members: int
    closed: bool
    rate: float
    hops: int


def groups_on_torus(
    kind: str, size: float, groups: Sequence[_Group], torus: Torus, network: Network
) -> TransferTime:
    """All groups of one collective, of devices numbered within one slice, side by side."""
    boxes: list[_Box] = []
    for group in groups:
        corners = [torus.coordinates(device) for device in group]
        boxes.append(tuple(tuple(sorted(set(each))) for each in zip(*corners, strict=True)))
    # In a box, every combination of the positions is a member.
    counts = [math.prod(map(len, box)) for box in boxes]
    if counts != [len(group) for group in groups]:
        # Groups of any form: a ring through the members in order, or messages between all of them.
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
    """Each source sends all of its bytes to its target: the busiest link decides.

    Links carry both ways at once: of an axis along which all go one way, one that goes the other
    way takes nothing.
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
    """Which way these links of one axis are taken, as `ways` reads it; "" where one is taken both
    ways."""
    taken: dict[Coordinates, int] = {}  # by the lower end of a link
    for axis, way, start in links:
        length = torus.shape[axis]
        low = start if way > 0 else (*start[:axis], (start[axis] - 1) % length, *start[axis + 1 :])
        if taken.setdefault(low, way) != way:
            return ""
    if len(set(taken.values())) == 1:
        return "+" if 1 in taken.values() else "-"
    return ">" if taken[min(taken)] > 0 else "<"


def _along_axes(kind: str, size: float, spans: tuple[_Span, ...], network: Network) -> TransferTime:
    """One box: an all_to_all by its slowest axis, any other kind by all of its axes together.

    An all_to_all's bytes cross the middle of a line of m members m²/4 messages of 1/m at a time.
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
    share = 1.0 if kind == "collective_broadcast" else (members - 1) / members
    for source, target in zip(group, (*group[1:], group[0]), strict=True):
        yield source, target, size * share / 2
        yield target, source, size * share / 2


type _Box = tuple[tuple[int, ...], ...]  # the members' positions on each axis


def _spans(box: _Box, torus: Torus, shared: Counter[tuple[int, Coordinates]]) -> tuple[_Span, ...]:
    spans: list[_Span] = []
    for axis, positions in enumerate(box):
        if len(positions) == 1:
            continue
        closed = _closes(positions, torus, axis)
        links = _links(positions, torus, axis)
        groups = max(shared[axis, corner] for corner in _corners(box, axis, links))
        hops = torus.shape[axis] // 2 if closed else len(links)
        spans.append(_Span(axis, len(positions), closed, (2 if closed else 1) / groups, hops))
    return tuple(spans)


def _corners(box: _Box, axis: int, links: Sequence[int]) -> Iterator[Coordinates]:
    return itertools.product(*box[:axis], links, *box[axis + 1 :])


def _closes(positions: Sequence[int], torus: Torus, axis: int) -> bool:
    """Whether members are spread evenly all around a ring."""
    length = torus.shape[axis]
    return torus.wraps[axis] and len(set(_gaps(positions, length))) == 1


def _gaps(positions: Sequence[int], length: int) -> list[int]:
    following = (*positions[1:], positions[0] + length)
    return [after - before for before, after in zip(positions, following, strict=True)]


def _links(positions: Sequence[int], torus: Torus, axis: int) -> list[int]:
    """Where the links begin that join the members: all around, or all but the widest gap."""
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
    """`links` are the bytes on the busiest link in one direction."""
    latency = network.start_ns + hops * network.latency_ns
    bytes_ns = links / (network.bandwidth * network.efficiency)
    names = tuple(f"{network.name} {AXES[axis]}" for axis in sorted(axes))
    return TransferTime(latency + bytes_ns, latency, algorithm, names)
