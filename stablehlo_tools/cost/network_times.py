"""Times a collective on the networks that its groups cross.

time = latency + bytes / bandwidth; bucketed collectives pay the latency once. Every algorithm of
the hardware's libraries is timed and the quickest chosen: `switches` has the algorithms of a
switch, `tori` those of a torus. A collective that spans slices of a torus runs inside and between
them at the same time, chunk by chunk, so the slower part decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from stablehlo_tools.cost.hardware import Hardware, Network
from stablehlo_tools.cost.switches import (
    NetworkCrossing,
    crossings,
    domain,
    filled_evenly,
    group_on_switches,
    pairs_on_switches,
)
from stablehlo_tools.cost.tori import groups_on_torus, pairs_on_torus, torus_of
from stablehlo_tools.cost.transfer_sizes import NOTHING, DeviceTransfer, TransferTime, slowest
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.communication_kinds import MEETINGS, PAIRWISE, RAGGED_ALL_TO_ALL

# The kind that each is timed as. A ragged exchange is timed with rows of equal size: the real sizes
# are run-time data.
_KINDS = {
    **{kind.replace("-", "_"): kind for kind in MEETINGS},
    **dict.fromkeys(sorted(PAIRWISE), "pairs"),
    "cross_replica_sum": "all_reduce",
    RAGGED_ALL_TO_ALL: "all_to_all",
}

type _Group = tuple[int, ...]


def transfer_time(transfer: DeviceTransfer, hardware: Hardware, devices: int) -> TransferTime:
    """Returns the time of `transfer` in a program on `devices` devices, numbered from 0.

    Groups run in parallel and the slowest decides. Without groups, all devices form one group; a
    send or recv without pairs goes to the next device. Raises ToolError for an unknown kind, a
    device that the program does not have, and devices that no network of the hardware joins.
    """
    return _transfer_time(transfer, filled_evenly(hardware.networks, devices), devices)


@lru_cache(maxsize=1024)  # the layers of a model repeat their collectives
def _transfer_time(
    transfer: DeviceTransfer, networks: tuple[Network, ...], devices: int
) -> TransferTime:
    name = transfer.kind.replace("-", "_")
    kind = _KINDS.get(name)
    if kind is None:
        raise ToolError(f"unknown collective {transfer.kind!r}; known: {', '.join(_KINDS)}")
    groups: Sequence[_Group] = transfer.groups
    if not groups and name in ("send", "recv"):
        groups = [(device, (device + 1) % devices) for device in range(devices)]
    elif not groups and name != "collective_permute":
        groups = [tuple(range(devices))]
    groups = [group for group in groups if len(set(group)) > 1]
    unknown = [number for group in groups for number in group if not 0 <= number < devices]
    if unknown:
        raise ToolError(
            f"{transfer.kind} among {devices} devices names device {unknown[0]}, which is not one "
            "of them"
        )
    if not groups:
        return NOTHING
    if kind == "pairs":
        return _pairs(transfer.bytes, [(pair[0], pair[1]) for pair in groups], networks, devices)
    return _collective(kind, transfer.bytes, groups, networks, devices)


def _pairs(
    size: float, pairs: Sequence[tuple[int, int]], networks: tuple[Network, ...], devices: int
) -> TransferTime:
    inner = networks[0]
    if inner.kind != "torus":
        return pairs_on_switches(size, pairs, networks)
    within = [pair for pair in pairs if domain(inner, pair[0]) == domain(inner, pair[1])]
    across = [pair for pair in pairs if domain(inner, pair[0]) != domain(inner, pair[1])]
    torus = torus_of(inner, devices)
    return slowest(
        [
            *(
                pairs_on_torus(size, [(pair[0], pair[1]) for pair in local], torus, inner)
                for local in _by_slice(within, inner)
            ),
            pairs_on_switches(size, across, networks),
        ]
    )


def _collective(
    kind: str, size: float, groups: Sequence[_Group], networks: tuple[Network, ...], devices: int
) -> TransferTime:
    spread = {group: crossings(networks, group) for group in groups}
    inner = networks[0]
    if inner.kind != "torus":
        return slowest(
            group_on_switches(kind, size, members, crossed)
            for members, crossed in dict.fromkeys((len(g), c) for g, c in spread.items())
        )
    torus = torus_of(inner, devices)
    parts = [part for group in groups for part in _in_slices(group, inner) if len(part) > 1]
    stays = size
    if kind == "all_to_all":
        # Only the bytes for members in the same slice stay on the torus: at most this share.
        stays *= max(
            len(part) / len(group) for group in groups for part in _in_slices(group, inner)
        )
    within = slowest(
        groups_on_torus(kind, stays, local, torus, inner) for local in _by_slice(parts, inner)
    )
    between = slowest(
        _between_slices(kind, size, len(group), crossed) for group, crossed in spread.items()
    )
    if NOTHING in (within, between):
        return within if between == NOTHING else between
    # Chunks move inside and between slices at the same time. Their bytes overlap; the latencies of
    # the first chunk do not.
    latency = within.latency_ns + between.latency_ns
    bytes_ns = max(time.ns - time.latency_ns for time in (within, between))
    return TransferTime(
        ns=latency + bytes_ns,
        latency_ns=latency,
        algorithm=f"hierarchical: {within.algorithm}, {between.algorithm}",
        links=(*between.links, *within.links),
    )


def _by_slice(groups: Sequence[_Group], torus: Network) -> list[tuple[_Group, ...]]:
    """Returns the groups of each slice, renumbered within it; slices with equal groups once."""
    slices: dict[int, list[_Group]] = {}
    for group in groups:
        number = domain(torus, group[0])
        first = number * (torus.devices or 0)
        slices.setdefault(number, []).append(tuple(device - first for device in group))
    return list(dict.fromkeys(tuple(local) for local in slices.values()))


def _in_slices(group: _Group, torus: Network) -> list[_Group]:
    parts: dict[int, list[int]] = {}
    for device in group:
        parts.setdefault(domain(torus, device), []).append(device)
    return [tuple(sorted(part)) for part in parts.values()]  # libraries order members by number


def _between_slices(
    kind: str, size: float, members: int, crossed: Sequence[NetworkCrossing]
) -> TransferTime:
    """Times the part between slices, on switches: each member sends its share of its slice's data.

    Returns NOTHING if the group stays within one slice.
    """
    outer = [step for step in crossed if step.level > 0]
    if not outer:
        return NOTHING
    slices = 1 + sum(step.hops for step in outer)
    if kind == "all_to_all":
        return group_on_switches(kind, size, members, outer)
    return group_on_switches(kind, size, slices, outer)
