"""The order in which blocks travel round a ring of devices, and the work of each device meanwhile.

The devices of a group form a ring. A block is named by its *offset*: on a device, block o belongs
to the device o places further on. So every device runs the same program on other blocks.

    gathering: block 0 is the device's own. Sent forwards, it becomes block -1 of the next device,
    then block -2 of the one after that. Sent backwards, it becomes blocks 1, 2, …

    summing: the terms of all devices for the block of one travel to it. Forwards, a device first
    computes its term of the block that has furthest to go, and sends it on. Then it adds its own
    term to each sum that arrives, last to that of block 0, which stays.

There are three ways round n devices:

    ONE     n - 1 hops forwards; blocks arrive in the order in which sums need them
    BOTH    n / 2 hops in each direction: a block comes from the nearer side, and a sum has one
            part from either side; the block that arrives last is needed first by a sum
    HALVES  each block in two halves, one forwards and one backwards: n - 1 hops of half the bytes
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from stablehlo_tools.analysis.replica_groups import ProcessGroups

FORWARDS, BACKWARDS = 1, -1


class RingDirection(enum.Enum):
    """The directions in which blocks travel."""

    ONE = "one direction"
    BOTH = "both directions"
    HALVES = "both directions by halves"


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A block at an offset, or one of its two halves; `half` is 0 for a whole block."""

    half: int
    offset: int


@dataclass(frozen=True)
class DeviceRing:
    """Groups of devices, each a ring; `cycle` lists positions in a group in the order of the
    ring."""

    groups: ProcessGroups
    cycle: tuple[int, ...]
    way: RingDirection

    @property
    def size(self) -> int:
        """The number of devices in each ring."""
        return len(self.cycle)

    @property
    def halves(self) -> int:
        """The number of parts of a block."""
        return 2 if self.way is RingDirection.HALVES else 1

    def hops(self, half: int) -> dict[int, int]:
        """Returns how many hops a half of a block makes in each direction."""
        most = self.size - 1
        if self.way is RingDirection.BOTH:
            return {FORWARDS: most - most // 2, BACKWARDS: most // 2}
        return {BACKWARDS if half else FORWARDS: most}

    @cached_property
    def arriving(self) -> tuple[BlockPart, ...]:
        """All parts, in the order in which they arrive."""
        return self._nearest_first()

    def _nearest_first(self) -> tuple[BlockPart, ...]:
        return tuple(
            BlockPart(half, -direction * hop)
            for hop in range(self.size)
            for half in range(self.halves)
            for direction, hops in self.hops(half).items()
            if hop <= hops and (hop or direction == next(iter(self.hops(half))))
        )

    @cached_property
    def sums(self) -> list[tuple[int, tuple[BlockPart, ...]]]:
        """For each direction and half, the parts whose sums travel in it, the furthest first."""
        return [
            (direction, tuple(self.part(direction * hop, half) for hop in range(hops, 0, -1)))
            for half in range(self.halves)
            for direction, hops in self.hops(half).items()
            if hops
        ]

    @cached_property
    def summing(self) -> tuple[BlockPart, ...]:
        """All parts, in the order in which sums need them."""
        turns = zip_longest(*(parts for _, parts in self.sums))
        own = (BlockPart(half, 0) for half in range(self.halves))
        return (*(part for turn in turns for part in turn if part is not None), *own)

    def straight(self, part: BlockPart) -> list[ProcessGroups]:
        """Returns the source and target pairs of the hops that send a part directly to its
        device."""
        return [self.pairs(part.offset)]

    def opposite(self, part: BlockPart) -> BlockPart:
        """Returns the part by which the owner of `part` refers to this device."""
        return self.part(-part.offset)

    def part(self, offset: int, half: int = 0) -> BlockPart:
        """Returns the part of `arriving` with this offset, modulo the ring's size."""
        return next(
            part
            for part in self.arriving
            if part.half == half and (part.offset - offset) % self.size == 0
        )

    def pairs(self, direction: int) -> ProcessGroups:
        """Returns the source and target pairs of a hop."""
        return tuple(
            (group[self.cycle[place]], group[self.cycle[(place + direction) % self.size]])
            for group in self.groups
            for place in range(self.size)
        )

    def places(self, devices: int, part: BlockPart) -> list[int]:
        """Returns for each device the index of a part in the split dimension.

        0 for a device that is in no ring.
        """
        table = [0] * devices
        for group in self.groups:
            for place, position in enumerate(self.cycle):
                table[group[position]] = self._owner(place, part) * self.halves + part.half
        return table

    def _owner(self, place: int, part: BlockPart) -> int:
        """Returns the position in its group of the device that owns a part, seen from a place of
        the ring."""
        return self.cycle[(place + part.offset) % self.size]

    @property
    def sends(self) -> list[ProcessGroups]:
        """The source and target pairs of all distinct hops."""
        return [self.pairs(FORWARDS)]


@dataclass(frozen=True)
class Direct(DeviceRing):
    """Groups in which each block is sent directly to its device.

    If it `returns`, its result is sent back directly. Then a near block is first, another near one
    is late, and the device's own is last. So no block is in flight at the end.
    """

    returns: bool = False

    @cached_property
    def arriving(self) -> tuple[BlockPart, ...]:
        """All parts, in the order in which their blocks are used."""
        own, *others = self._nearest_first()
        if not self.returns:
            return (own, *others)
        return (*others[:1], *others[2:], *others[1:2], own)

    @cached_property
    def summing(self) -> tuple[BlockPart, ...]:
        """All parts, in the order in which their results are sent."""
        return self._nearest_first()[::-1]

    @property
    def sends(self) -> list[ProcessGroups]:
        """The source and target pairs of all distinct hops."""
        return [pairs for part in self.arriving if part.offset for pairs in self.straight(part)]


@dataclass(frozen=True)
class Cube(Direct):
    """Groups of 2, 4, 8 … devices, each a hypercube.

    Block o belongs to the device whose position differs in the bits of o, and is sent there bit by
    bit. Used if compute can only run beside hops between numbers that differ in one bit
    (`cost.emitted_collectives`).
    """

    @property
    def exists(self) -> bool:
        """True if a group's size is a power of two, and neighbors' device numbers differ in one
        bit."""
        bits = self.size.bit_length() - 1
        return 1 << bits == self.size and all(
            (source ^ target).bit_count() == 1
            for bit in range(bits)
            for source, target in self._exchange_pairs(1 << bit)
        )

    def _nearest_first(self) -> tuple[BlockPart, ...]:
        return tuple(BlockPart(0, bits) for bits in sorted(range(self.size), key=int.bit_count))

    def straight(self, part: BlockPart) -> list[ProcessGroups]:
        """Returns the source and target pairs of a hop for each bit."""
        bits = (1 << bit for bit in range(self.size.bit_length()))
        return [self._exchange_pairs(bit) for bit in bits if part.offset & bit]

    def opposite(self, part: BlockPart) -> BlockPart:
        """Returns the same part: both differ in the same bits."""
        return part

    def _exchange_pairs(self, bits: int) -> ProcessGroups:
        return tuple(
            (group[place], group[place ^ bits])
            for group in self.groups
            for place in range(self.size)
        )

    def _owner(self, place: int, part: BlockPart) -> int:
        """Returns the position that differs in the part's bits."""
        return place ^ part.offset


def cycles(size: int) -> Iterator[tuple[int, ...]]:
    """Yields cycles through a group of `size` devices.

    The first is in order. For a power of two, the second is a Gray code, in which neighbors differ
    in one bit. Then there is one for each grid of rows that a compiler numbers one after the other.
    It goes along all rows and back along the first column, so neighbors in the cycle are neighbors
    in the grid.
    """
    yield tuple(range(size))
    if size > 2 and not size & (size - 1):
        yield tuple(number ^ number >> 1 for number in range(size))
    for rows in range(2, size // 2 + 1, 2):
        if size % rows == 0:
            columns = size // rows
            there: Sequence[int] = range(1, columns)
            path = [0]
            for row in range(rows):
                path += [row * columns + column for column in there]
                there = there[::-1]
            yield ((*path, *(row * columns for row in range(rows - 1, 0, -1))))
