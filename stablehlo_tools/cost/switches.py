"""Collectives on switches: NVLink, Infinity Fabric, InfiniBand, a data centre's network.

Device d is in domain d // devices of each network, which a program fills evenly; a group is timed
by what it has to cross of them. Sizes are NCCL's, and so are the volumes: its bus bandwidth is
defined by them (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A ring is
laid so that it enters every domain once. Where several members of a group share a domain, NCCL lays
as many rings as they have ports, so the ports add up. Latencies are a start and hops of each
network, as in NCCL's own model (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.cost.transfers import TransferTime, quickest, slowest
from stablehlo_tools.diagnostics import ToolError

_TREE_SHARE = 0.9  # of a ring's bandwidth that trees reach, says NCCL's tuning.cc


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
            crossed.append(
                Crossing(
                    network=network,
                    level=level,
                    most=max(map(len, domains.values())),
                    hops=len(parts) - len(domains),
                    streams=min(map(len, parts.values())),
                    away=max(
                        sum(map(len, joined)) - len(part)
                        for joined in domains.values()
                        for part in joined
                    ),
                )
            )
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


def even_share(number: int, most: int) -> int:
    """The largest equal share of `number` things that is no larger than `most`."""
    return next(share for share in range(min(number, most), 0, -1) if number % share == 0)


def filled_evenly(networks: Sequence[Network], devices: int) -> tuple[Network, ...]:
    """Networks as a program uses them that does not fill its last domain: of 128 devices on domains
    of 72, each of two has 64. The outermost has to join them all."""
    filled = [networks[-1]]
    for network in reversed(networks[:-1]):
        most = network.devices
        if network.kind == "torus" or most is None or most >= devices:
            filled.insert(0, network)
        else:
            devices = even_share(devices, most)
            filled.insert(0, replace(network, devices=devices))
    return tuple(filled)


def domain(network: Network, device: int) -> int:
    """The number of the domain that `device` is in."""
    return 0 if network.devices is None else device // network.devices


def group_on_switches(
    kind: str, size: float, members: int, crossed: Sequence[Crossing]
) -> TransferTime:
    """The quickest algorithm for one group of `members`, which crosses `crossed`."""
    if kind == "all_to_all":
        # Each member sends 1/n of its bytes to every other, over all networks at once.
        #
        # A message to another domain goes through the member there of the same rank (NCCL's PXN),
        # so the number of messages is that of domains, not of devices.
        ns = max(
            size * step.away / members / _reached(step.network, step.most - 1) for step in crossed
        )
        hops = sum((step.most - 1) * step.network.latency_ns for step in crossed)
        return _time("pairwise", ns, hops, crossed)
    if kind == "collective_broadcast":
        return _time("pipelined ring", size / _ring_rate(crossed), _ring_hops(crossed), crossed)
    if kind == "all_reduce":
        return quickest((_ring(size, members, crossed, passes=2), *_trees(size, members, crossed)))
    return _ring(size, members, crossed, passes=1)


def _ring(size: float, members: int, crossed: Sequence[Crossing], passes: int) -> TransferTime:
    """Each member passes (n-1)/n of the bytes on; an all_reduce does so twice.

    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
    """
    volume = passes * size * (members - 1) / members
    return _time("ring", volume / _ring_rate(crossed), passes * _ring_hops(crossed), crossed)


def _trees(size: float, members: int, crossed: Sequence[Crossing]) -> list[TransferTime]:
    """All_reduces by a switch that reduces (NVLink SHARP), and by NCCL's double binary trees.

    The trees join domains; inside of one NCCL lays chains, which gain nothing over a ring. A member
    reduces its share of the bytes with the members of its domain, sends that up one tree and down
    again, and gathers: all levels at once, chunk by chunk.
    """
    speed_ups = [_in_network_speed_up(step) for step in crossed]
    if crossed[-1].level == 0:
        if speed_ups[0] == 1:
            return []
        volume = 2 * size * (members - 1) / members
        rate = _ring_rate(crossed) * speed_ups[0]
        return [_time("in-network", volume / rate, 2 * _ring_hops(crossed), crossed)]
    ns = max(
        2 * size * (step.most - 1) / step.most / (_rate(step) * speed_up * _TREE_SHARE)
        for step, speed_up in zip(crossed, speed_ups, strict=True)
    )
    hops = sum(
        (math.ceil(math.log2(step.most)) if step.level else step.most - 1) * step.network.latency_ns
        for step in crossed
    )
    name = "tree" if max(speed_ups) == 1 else "in-network tree"
    return [_time(name, ns, 2 * hops, crossed)]


def pairs_on_switches(
    size: float, pairs: Sequence[tuple[int, int]], networks: Sequence[Network]
) -> TransferTime:
    """Each source sends all of its bytes to its target; a port's sends and receives add up."""
    by_crossing: dict[tuple[Crossing, ...], list[tuple[int, int]]] = {}
    for pair in pairs:
        by_crossing.setdefault(crossings(networks, pair), []).append(pair)
    times: list[TransferTime] = []
    for (step, *_), alike in by_crossing.items():
        sent = Counter(source for source, _ in alike)
        received = Counter(target for _, target in alike)
        messages = max(*sent.values(), *received.values())
        ns = messages * size / _reached(step.network, 1)
        times.append(_time("direct", ns, step.network.latency_ns, (step,)))
    return slowest(times)


def _ring_rate(crossed: Sequence[Crossing]) -> float:
    return min(_rate(step) for step in crossed)


def _ring_hops(crossed: Sequence[Crossing]) -> float:
    return sum(step.hops * step.network.latency_ns for step in crossed)


def _rate(step: Crossing) -> float:
    """Bytes/ns that the members of one part send over this network together."""
    return step.streams * _reached(step.network, step.most - 1)


def _reached(network: Network, peers: int) -> float:
    """Bytes/ns of large messages from one device to so many others."""
    if network.pair_bandwidth is None:
        return network.bandwidth * network.efficiency
    return min(network.bandwidth, peers * network.pair_bandwidth) * network.efficiency


def _in_network_speed_up(step: Crossing) -> float:
    """What a reducing switch gains for this many members; the profile's figure is a whole domain's.

    Each of n members sends its bytes and, of the result, the share that it reduces: (n+1)/n of the
    bytes, where a ring sends 2(n-1)/n. So the gain goes with (n-1)/(n+1).
    """
    network = step.network
    if network.in_network_reduction is None or step.level or network.devices is None:
        return 1.0
    whole = (network.devices - 1) / (network.devices + 1)
    return max(1.0, network.in_network_reduction * (step.most - 1) / (step.most + 1) / whole)


def _time(
    algorithm: str, bytes_ns: float, hops_ns: float, crossed: Sequence[Crossing]
) -> TransferTime:
    latency = crossed[-1].network.start_ns + hops_ns
    links = tuple(step.network.name for step in reversed(crossed))
    return TransferTime(latency + bytes_ns, latency, algorithm, links)
