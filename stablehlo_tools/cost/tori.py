"""Collectives on a torus of links, TPUs' ICI and Trainium's NeuronLink.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.cost.topology import AXES, Coordinates, Torus
from stablehlo_tools.cost.transfer_time import TransferTime, slowest

type Group = tuple[int, ...]

_PASSES = {"all_reduce": 2}  # a reduce_scatter and an all_gather; any other kind is one pass


@dataclass(frozen=True, slots=True)
class Span:
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
    kind: str, size: float, groups: Sequence[Group], torus: Torus, network: Network
) -> TransferTime:
    """All groups of one collective, of devices numbered within one slice, side by side."""
    boxes = [_box(group, torus) for group in groups]
    whole = [box for box in boxes if box is not None]
    if len(whole) < len(boxes):
        return _routed(kind, size, groups, torus, network)
    shared = _links_shared(whole, torus)
    return slowest(
        _along_axes(kind, size, spans, network)
        for spans in dict.fromkeys(_spans(box, torus, shared) for box in whole)
    )


def pairs_on_torus(
    size: float, pairs: Sequence[tuple[int, int]], torus: Torus, network: Network
) -> TransferTime:
    """Each source sends all of its bytes to its target: the busiest link decides."""
    loads = torus.loads((source, target, size) for source, target in pairs)
    hops = max(torus.distance(source, target) for source, target in pairs)
    return _time("direct", max(loads.values()), hops, {axis for axis, _, _ in loads}, network)


def _along_axes(kind: str, size: float, spans: tuple[Span, ...], network: Network) -> TransferTime:
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


def _routed(
    kind: str, size: float, groups: Sequence[Group], torus: Torus, network: Network
) -> TransferTime:
    """Groups of any form: a ring through the members in order, or messages between all of them."""
    passes = _PASSES.get(kind, 1)
    flows = [flow for group in groups for flow in _flows(kind, size * passes, group)]
    loads = torus.loads(flows)
    steps = 1 if kind == "all_to_all" else passes * max(len(group) // 2 for group in groups)
    hops = steps * max(torus.distance(source, target) for source, target, _ in flows)
    name = "routed pairs" if kind == "all_to_all" else "routed ring"
    return _time(name, max(loads.values()), hops, {axis for axis, _, _ in loads}, network)


def _flows(kind: str, size: float, group: Group) -> Iterator[tuple[int, int, float]]:
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


def _box(group: Group, torus: Torus) -> _Box | None:
    """The positions whose every combination is a member, or None where the group is no box."""
    corners = [torus.coordinates(device) for device in group]
    box = tuple(tuple(sorted(set(positions))) for positions in zip(*corners, strict=True))
    return box if math.prod(map(len, box)) == len(group) else None


def _spans(box: _Box, torus: Torus, shared: Counter[tuple[int, Coordinates]]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for axis, positions in enumerate(box):
        if len(positions) == 1:
            continue
        closed = _closes(positions, torus, axis)
        links = _links(positions, torus, axis)
        groups = max(shared[axis, corner] for corner in _corners(box, axis, links))
        hops = torus.shape[axis] // 2 if closed else len(links)
        spans.append(Span(axis, len(positions), closed, (2 if closed else 1) / groups, hops))
    return tuple(spans)


def _links_shared(boxes: Iterable[_Box], torus: Torus) -> Counter[tuple[int, Coordinates]]:
    """How many groups run over each link, by axis and the coordinates where it starts."""
    return Counter(
        (axis, corner)
        for box in boxes
        for axis, positions in enumerate(box)
        if len(positions) > 1
        for corner in _corners(box, axis, _links(positions, torus, axis))
    )


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
