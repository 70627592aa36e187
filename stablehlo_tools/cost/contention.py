"""What a collective takes of a device while it is in flight, and what compute beside it loses.

A library's kernel holds compute units (NCCL: one for each of its channels), and whatever moves the
bytes reads and writes device memory. While both run, a kernel that would take

    o ns for its operations and m ns for its bytes        takes    max(o / (1 - u), m / (1 - w))

    u = compute units that the collective holds / all of the device
        units = channels, but no more than its bytes / channel_bytes
    w = traffic · bytes that the device sends / time of the collective / bandwidth of the memory

Copy engines and the DMAs of a TPU hold no units. That a product runs in whole waves, and that both
share caches and power, makes it worse; those have measured up to 2 for products of a single wave
(docs/hardware.md). What a collective loses to compute is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Hardware, Network
from stablehlo_tools.cost.transfers import Transfer, TransferTime
from stablehlo_tools.dialect.collectives import PAIRWISE

_MOST = 0.9  # that collectives leave nothing at all is what no device does


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares of a device's compute units and of its memory's bandwidth."""

    units: float = 0.0
    memory: float = 0.0


NONE = Contention()


def together(taken: Iterable[Contention]) -> Contention:
    """What several collectives take at the same time."""
    units = memory = 0.0
    for each in taken:
        units += each.units
        memory += each.memory
    return Contention(min(units, _MOST), min(memory, _MOST))


def slowdown(operations: float, memory: float, taken: Contention) -> float:
    """By how much a kernel takes longer, of whose time alone these are the shares that its
    operations and its memory take."""
    return max(1.0, operations / (1 - taken.units), memory / (1 - taken.memory))


def contention(transfer: Transfer, time: TransferTime, hardware: Hardware) -> Contention:
    """What a collective takes of each device; nothing where the profile has no figures for it."""
    crossed = [
        network
        for network in hardware.networks
        if any(f"{link} ".startswith(f"{network.name} ") for link in time.links)
    ]
    if not crossed or time.ns <= 0:
        return NONE
    sent = _sent_bytes(transfer, time.algorithm)
    units = max(_units(network, transfer.kind, time.algorithm, sent) for network in crossed)
    moved = max(network.traffic for network in crossed) * sent / time.ns
    return Contention(
        min(units / hardware.matmul_model.units, _MOST),
        min(moved / hardware.memory_bandwidth, _MOST),
    )


def _sent_bytes(transfer: Transfer, algorithm: str) -> float:
    """Bytes that a device sends, or receives."""
    if transfer.kind in PAIRWISE:
        return transfer.bytes
    members = max((len(group) for group in transfer.groups), default=2)
    if algorithm == "in-network":
        return transfer.bytes * (members + 1) / members
    passes = 2 if transfer.kind == "all_reduce" else 1
    return passes * transfer.bytes * (members - 1) / members


def _units(network: Network, kind: str, algorithm: str, sent: float) -> float:
    if kind in PAIRWISE or "all_to_all" in kind:
        channels = network.pair_channels
    elif algorithm.startswith("in-network"):
        channels = network.in_network_channels
    else:
        channels = network.channels
    if channels is None:
        channels = network.channels
    if not channels or network.channel_bytes is None:
        return channels or 0.0
    return min(channels, math.ceil(sent / network.channel_bytes))
