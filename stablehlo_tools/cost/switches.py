"""Collectives on switches: NVLink, Infinity Fabric, InfiniBand, a data centre's network.

Device d is in domain d // devices of each network. A program fills the domains evenly. The time of
a group depends on the networks that it crosses. Sizes and volumes are those of NCCL, which define
its bus bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A ring
enters every domain once. If several members of a group share a domain, NCCL builds a ring for each
of their ports, so the ports' bandwidths add up. latency = start + hops of each network, as in
NCCL's own model (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.cost.hardware import Network
from stablehlo_tools.cost.transfer_sizes import TransferTime, quickest, slowest
from stablehlo_tools.diagnostics import ToolError

_TREE_SHARE = 0.9  # share of a ring's bandwidth that trees reach (NCCL's tuning.cc)


@dataclass(frozen=True, slots=True)
class NetworkCrossing:
    """The parts of a group of devices that one network joins.

    A part is a domain of the next network inward that contains members; in the innermost network, a
    part is a device. `most` is the largest number of parts in one domain. `hops` = parts - domains.
    `streams` is the number of members of the smallest part, each with its own port. `away` is the
    largest number of members that one member reaches only over this network.
    """

    network: Network
    level: int  # 0 of the innermost network
    most: int
    hops: int
    streams: int
    away: int


def crossings(networks: Sequence[Network], group: Sequence[int]) -> tuple[NetworkCrossing, ...]:
    """Returns the networks that `group` crosses, innermost first.

    Raises ToolError if no network joins all of its devices.
    """
    crossed: list[NetworkCrossing] = []
    parts = {device: (device,) for device in group}
    for level, network in enumerate(networks):
        domains: dict[int, list[tuple[int, ...]]] = {}
        for members in parts.values():
            domains.setdefault(domain(network, members[0]), []).append(members)
        if len(domains) < len(parts):
            crossed.append(
                NetworkCrossing(
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
        f"no network of this hardware connects devices {min(group)} and {max(group)}; "
        f"{networks[-1].name!r}, the outermost, connects {networks[-1].devices}"
    )


def even_share(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is at most `most`."""
    return next(share for share in range(min(number, most), 0, -1) if number % share == 0)


def filled_evenly(networks: Sequence[Network], devices: int) -> tuple[Network, ...]:
    """Returns the networks with domains reduced so that `devices` devices fill them evenly.

    128 devices on domains of 72 use two domains of 64. The outermost network is kept: it has to
    join all devices.
    """
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
    """Returns the number of the domain that contains `device`."""
    return 0 if network.devices is None else device // network.devices


def group_on_switches(
    kind: str, size: float, members: int, crossed: Sequence[NetworkCrossing]
) -> TransferTime:
    """Times the quickest algorithm for one group of `members` devices that crosses `crossed`."""
    if kind == "all_to_all":
        # Each member sends 1/n of its bytes to every other, over all networks in parallel.
        #
        # A message to another domain first goes to the member of its own domain that has the
        # target's local rank (NCCL's PXN). So there are as many messages as domains, not devices.
        ns = max(
            size * step.away / members / _peer_bandwidth(step.network, step.most - 1)
            for step in crossed
        )
        hops = sum((step.most - 1) * step.network.latency_ns for step in crossed)
        return _time("pairwise", ns, hops, crossed)
    if kind == "collective_broadcast":
        return _time("pipelined ring", size / _ring_rate(crossed), _ring_hops(crossed), crossed)
    if kind == "all_reduce":
        return quickest((_ring(size, members, crossed, passes=2), *_trees(size, members, crossed)))
    return _ring(size, members, crossed, passes=1)


def _ring(
    size: float, members: int, crossed: Sequence[NetworkCrossing], passes: int
) -> TransferTime:
    """Times a ring: each member sends (n-1)/n of the bytes, in an all_reduce twice.

    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
    """
    volume = passes * size * (members - 1) / members
    return _time("ring", volume / _ring_rate(crossed), passes * _ring_hops(crossed), crossed)


def _trees(size: float, members: int, crossed: Sequence[NetworkCrossing]) -> list[TransferTime]:
    """Times an all_reduce by a switch that reduces (NVLink SHARP) and by NCCL's double trees.

    The trees join domains. Inside a domain NCCL uses chains, which are as fast as a ring: then the
    list is empty unless the switch reduces. A member reduces its share of the bytes within its
    domain, sends it up one tree and down again, and gathers. All levels run in parallel, chunk by
    chunk.
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
    """Times pairs in which each source sends all of its bytes to its target.

    The times of all messages that one port sends add up, and those of all that it receives.
    """
    by_crossing: dict[tuple[NetworkCrossing, ...], list[tuple[int, int]]] = {}
    for pair in pairs:
        by_crossing.setdefault(crossings(networks, pair), []).append(pair)
    times: list[TransferTime] = []
    for (step, *_), alike in by_crossing.items():
        sent = Counter(source for source, _ in alike)
        received = Counter(target for _, target in alike)
        messages = max(*sent.values(), *received.values())
        ns = messages * size / _peer_bandwidth(step.network, 1)
        times.append(_time("direct", ns, step.network.latency_ns, (step,)))
    return slowest(times)


def _ring_rate(crossed: Sequence[NetworkCrossing]) -> float:
    return min(_rate(step) for step in crossed)


def _ring_hops(crossed: Sequence[NetworkCrossing]) -> float:
    return sum(step.hops * step.network.latency_ns for step in crossed)


def _rate(step: NetworkCrossing) -> float:
    """Returns the bytes/ns that all members of one part together send over this network."""
    return step.streams * _peer_bandwidth(step.network, step.most - 1)


def _peer_bandwidth(network: Network, peers: int) -> float:
    """Returns the bytes/ns of large messages from one device to `peers` others."""
    if network.pair_bandwidth is None:
        return network.bandwidth * network.efficiency
    return min(network.bandwidth, peers * network.pair_bandwidth) * network.efficiency


def _in_network_speed_up(step: NetworkCrossing) -> float:
    """Returns the speed-up over a ring, 1 or more, of a switch that reduces.

    The profile's figure is that of a whole domain. Each of n members sends its bytes and its share
    of the result, (n+1)/n of the bytes; a ring sends 2(n-1)/n. So the speed-up is proportional to
    (n-1)/(n+1).
    """
    network = step.network
    if network.in_network_reduction is None or step.level or network.devices is None:
        return 1.0
    whole = (network.devices - 1) / (network.devices + 1)
    return max(1.0, network.in_network_reduction * (step.most - 1) / (step.most + 1) / whole)


def _time(
    algorithm: str, bytes_ns: float, hops_ns: float, crossed: Sequence[NetworkCrossing]
) -> TransferTime:
    latency = crossed[-1].network.start_ns + hops_ns
    links = tuple(step.network.name for step in reversed(crossed))
    return TransferTime(latency + bytes_ns, latency, algorithm, links)
