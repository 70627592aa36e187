"""Buffers for a schedule whose ranks advance together: as few as the overlap of their uses allows.

A direction is given by its times (lockstep_times.py), ranks and chunks numbered along the flow: an
item goes from a rank to the next one, and from the last rank to the first one's next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from stablehlo_tools.schedules.lockstep_times import Times

NONE = -1


class Received(NamedTuple):
    """Where the data of a direction lie between the tick they arrive in and the one that reads."""

    sources: list[list[int]]  # [rank][item]: the slot it is read from; NONE for the first stage
    deliveries: list[list[int]]  # [rank][tick]: the slot for what arrives at the end of the tick
    slots: int


def received(times: Times, ticks: int, microbatches: int) -> Received:
    """Receive slots for a direction, the same number on each rank and at least one.

    The intervals of a rank are coloured in the order of their starts, which needs no more colours
    than overlap at once. What nobody reads overlaps with nothing but what lies there already.
    """
    sources: list[list[int]] = []
    deliveries: list[list[int]] = []
    slots = 1
    for rank, own in enumerate(times):
        step = 0 if rank else microbatches  # back at the first rank the next chunk begins
        arriving = [NONE] * ticks
        for item, tick in enumerate(times[rank - 1][: len(own) - step], step):
            arriving[tick] = item
        source, delivery, used = _received_by(own, arriving)
        sources.append(source)
        deliveries.append(delivery)
        slots = max(slots, used)
    return Received(sources, deliveries, slots)


def _received_by(own: Sequence[int], arriving: Sequence[int]) -> tuple[list[int], list[int], int]:
    """The source of each item and the slot for each arrival of one rank, and how many it uses."""
    reading = _by_tick(own, len(arriving))
    source = [NONE] * len(own)
    delivery: list[int] = []
    pool = _Pool()
    for read, arrived in zip(reading, arriving, strict=True):
        if read != NONE and source[read] != NONE:
            pool.give_back(source[read])
        slot = pool.take()
        delivery.append(slot)
        if arrived == NONE:
            pool.give_back(slot)
        else:
            source[arrived] = slot
    return source, delivery, pool.size


def kept(forward: Times, backward: Times, ticks: int) -> tuple[list[list[int]], int]:
    """The slot that holds each item of each rank from its forward to its backward, and how many.

    Both directions number ranks and chunks as the forward does. A tick runs its forward before its
    backward, so that a slot read in a tick is free for the forward of the next.
    """
    slots: list[list[int]] = []
    most = 0
    for ahead, back in zip(forward, backward, strict=True):
        own = [NONE] * len(ahead)
        pool = _Pool()
        for written, read in zip(_by_tick(ahead, ticks), _by_tick(back, ticks), strict=True):
            if written != NONE:
                own[written] = pool.take()
            if read != NONE:
                pool.give_back(own[read])
        slots.append(own)
        most = max(most, pool.size)
    return slots, most


def _by_tick(times: Sequence[int], ticks: int) -> list[int]:
    """The item of each tick, NONE where there is none."""
    items = [NONE] * ticks
    for item, tick in enumerate(times):
        items[tick] = item
    return items


class _Pool:
    """Hands out the lowest free slot, a new one only where none is free."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self.size += 1
        return self.size - 1

    def give_back(self, slot: int) -> None:
        heappush(self._free, slot)
