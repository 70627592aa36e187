"""The share of a device that a collective in flight uses, and the slowdown of compute beside it.

A library's kernel holds compute units (NCCL: one for each of its channels), and the transfer reads
and writes device memory. While both run, a kernel that alone would take

    o ns for its operations and m ns for its bytes        takes    max(o / (1 - u), m / (1 - w))

    u = compute units that the collective holds / all of the device
        units = channels, but no more than its bytes / channel_bytes
    w = traffic · bytes that the device sends / time of the collective / bandwidth of the memory

Copy engines and the DMAs of a TPU hold no units. The model ignores that products run in whole waves
and that both share caches and power; a product of a single wave needs up to twice its time
(https://forums.developer.nvidia.com/t/337991). The slowdown of the collective is not modelled
either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Hardware, Network
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.dialect.communication_kinds import PAIRWISE

_MOST = 0.9  # cap: on every device, collectives leave some units and bandwidth to compute


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares, 0 to 1, of a device's compute units and of its memory's bandwidth."""

    units: float = 0.0
    memory: float = 0.0


NONE = Contention()


def together(taken: Iterable[Contention]) -> Contention:
    """Returns the sum of the shares of concurrent collectives, capped at 0.9 each."""
    units = memory = 0.0
    for each in taken:
        units += each.units
        memory += each.memory
    return Contention(min(units, _MOST), min(memory, _MOST))


def slowdown(operations: float, memory: float, taken: Contention) -> float:
    """Returns the factor, 1 or more, by which a kernel slows down beside collectives.

    `operations` and `memory` are `KernelTime.shares` of the kernel alone.
    """
    return max(1.0, operations / (1 - taken.units), memory / (1 - taken.memory))


def contention(transfer: DeviceTransfer, time: TransferTime, hardware: Hardware) -> Contention:
    """Returns the share of each device that a collective uses; 0 if the profile has no figures."""
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


def _sent_bytes(transfer: DeviceTransfer, algorithm: str) -> float:
    """Returns the bytes that one device sends; it receives as many."""
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
