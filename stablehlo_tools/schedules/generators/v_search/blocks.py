"""Building blocks of V-shaped schedules: in which slot a rank does each phase of one microbatch.

A rank has six phases for each microbatch, so a block repeats every six slots, and fits where no
rank does two of them in one slot. For how long an activation lives in a block says how many are
alive at once (arXiv 2405.15362, "Pipeline Parallelism with Controllable Memory").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from stablehlo_tools.schedules.actions import Kind

# The phases of a microbatch on a rank: kind, and whether of the rank's first or second stage. The
# first four follow each other: down the ranks, up, down and up again.
PHASES = (
    (Kind.FORWARD, 0),
    (Kind.FORWARD, 1),
    (Kind.INPUT_GRADIENT, 1),
    (Kind.INPUT_GRADIENT, 0),
    (Kind.WEIGHT_GRADIENT, 1),
    (Kind.WEIGHT_GRADIENT, 0),
)
PERIOD = len(PHASES)
FORWARDS = 2  # the first two phases are forwards,
LEGS = 4  # and the first four are the legs of the way

_LIVES = ((0, 5), (1, 4))  # of each stage: the forward, and the weight gradient that frees it


class Place(NamedTuple):
    """A phase of a microbatch on a rank."""

    phase: int
    rank: int


def before(place: Place, ranks: int) -> Place | None:
    """What a phase waits for; None for the first of all."""
    phase, rank = place
    if phase >= LEGS:
        return Place(phase - 2, rank)
    last, step = (ranks - 1, 1) if phase % 2 else (0, -1)
    if rank != last:
        return Place(phase, rank + step)
    return Place(phase - 1, rank) if phase else None


def stage_of(place: Place, ranks: int) -> int:
    """The stage whose phase it is: rank r holds stages r and 2p - 1 - r."""
    second = PHASES[place.phase][1]
    return 2 * ranks - 1 - place.rank if second else place.rank


@dataclass(frozen=True)
class Block:
    """The slot of each phase of microbatch 0, by rank; microbatch i is 6i slots later."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, p."""
        return len(self.slots)

    @cached_property
    def peak(self) -> int:
        """The most activations alive on a rank."""
        return max(sum(_alive(row, row[at])) for row in self.slots for at in range(FORWARDS))

    @cached_property
    def peaks(self) -> tuple[tuple[int, int], ...]:
        """The most alive of each rank's first stage, and the same of its second."""
        return tuple((_alive(row, row[0])[0], _alive(row, row[1])[1]) for row in self.slots)

    def in_order(self, microbatches: int) -> Iterator[tuple[Place, int]]:
        """Every phase of every microbatch, slot by slot."""
        turns: list[list[tuple[Place, int]]] = [[] for _ in range(PERIOD)]
        for rank, row in enumerate(self.slots):
            for phase, slot in enumerate(row):
                turns[slot % PERIOD].append((Place(phase, rank), slot))
        for slot in range(max(map(max, self.slots)) + PERIOD * microbatches):
            for place, first in turns[slot % PERIOD]:
                microbatch = (slot - first) // PERIOD
                if 0 <= microbatch < microbatches:
                    yield place, microbatch


def block(ranks: int, strides: tuple[int, ...], pauses: tuple[int, ...]) -> Block:
    """The block of four legs.

    On each leg a microbatch is `strides` slots later on the next rank, and between two legs it
    waits for `pauses` slots on the rank where they meet. The weight gradients take the two slots
    that are left, so that neither comes later than it must.
    """
    slots: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for leg, (stride, pause) in enumerate(zip(strides, (*pauses, 0), strict=True)):
        for step in range(ranks):
            rank = ranks - 1 - step if leg % 2 else step
            slots[rank].append(start + stride * step)
        start += stride * (ranks - 1) + pause
    return Block(tuple(_with_weights(row) for row in slots))


def _alive(row: tuple[int, ...], slot: int) -> list[int]:
    """The activations of each stage that are alive after a slot of the steady state."""
    return [(slot - row[first]) // PERIOD - (slot - row[last]) // PERIOD for first, last in _LIVES]


def _with_weights(legs: list[int]) -> tuple[int, ...]:
    gradients = legs[FORWARDS:]
    free = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in legs})
    lags = [
        [(turn - slot) % PERIOD for turn, slot in zip(turns, gradients, strict=True)]
        for turns in permutations(free)
    ]
    best = min(lags, key=lambda lag: (max(lag), sum(lag)))
    return (*legs, *(slot + late for slot, late in zip(gradients, best, strict=True)))
