"""The order in which blocks go round a ring of devices, and what each device does on their way.

Devices of a group stand in a ring. A block goes by its *offset*: on a device, block o is that of
the device o places further on, so that every device runs the same program on other blocks.

    gathering: block 0 is the device's own. It is handed on forwards, which makes it block -1 of the
    next device, then block -2 of the one behind; or backwards, as blocks 1, 2, …

    summing: what all devices add to the block of one travels to it. Forwards, a device first makes
    its term of the block that has furthest to go, sends it on, and adds its own term to each sum
    that comes in; last to that of block 0, which stays.

Three ways to go round n devices:

    ONE     n - 1 hops forwards; blocks arrive in the order in which sums need them
    BOTH    n / 2 hops in each direction: a block comes from the nearer side, and a sum is made of
            one from either side; the block that arrives last is the one that a sum begins with
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


class Way(enum.Enum):
    """How blocks go round."""

    ONE = "one direction"
    BOTH = "both directions"
    HALVES = "both directions by halves"


@dataclass(frozen=True, slots=True)
class Part:
    """One of two halves of a block, or with `half` 0 of one all of it, at an offset."""

    half: int
    offset: int


@dataclass(frozen=True)
class Ring:
    """Groups of devices, each a ring: `cycle` are the positions in a group one after the other."""

    groups: ProcessGroups
    cycle: tuple[int, ...]
    way: Way

    @property
    def size(self) -> int:
        """Devices in each ring."""
        return len(self.cycle)

    @property
    def halves(self) -> int:
        """Into how many parts a block is cut."""
        return 2 if self.way is Way.HALVES else 1

    def hops(self, half: int) -> dict[int, int]:
        """How many hops a half of a block makes in each direction."""
        most = self.size - 1
        if self.way is Way.BOTH:
            return {FORWARDS: most - most // 2, BACKWARDS: most // 2}
        return {BACKWARDS if half else FORWARDS: most}

    @cached_property
    def arriving(self) -> tuple[Part, ...]:
        """All parts, in the order in which they arrive."""
        return self._nearest_first()

    def _nearest_first(self) -> tuple[Part, ...]:
        return tuple(
            Part(half, -direction * hop)
            for hop in range(self.size)
            for half in range(self.halves)
            for direction, hops in self.hops(half).items()
            if hop <= hops and (hop or direction == next(iter(self.hops(half))))
        )

    @cached_property
    def sums(self) -> list[tuple[int, tuple[Part, ...]]]:
        """For each direction and half the parts whose sums travel so, the furthest first."""
        return [
            (direction, tuple(self.part(direction * hop, half) for hop in range(hops, 0, -1)))
            for half in range(self.halves)
            for direction, hops in self.hops(half).items()
            if hops
        ]

    @cached_property
    def summing(self) -> tuple[Part, ...]:
        """All parts, in the order in which sums need them."""
        turns = zip_longest(*(parts for _, parts in self.sums))
        own = (Part(half, 0) for half in range(self.halves))
        return (*(part for turn in turns for part in turn if part is not None), *own)

    def straight(self, part: Part) -> list[ProcessGroups]:
        """From whom to whom what is of a part goes, to the device that it is of, in one hop or
        more."""
        return [self.pairs(part.offset)]

    def opposite(self, part: Part) -> Part:
        """The part of this device that has it as another's."""
        return self.part(-part.offset)

    def part(self, offset: int, half: int = 0) -> Part:
        """A part as `arriving` has it."""
        return next(
            part
            for part in self.arriving
            if part.half == half and (part.offset - offset) % self.size == 0
        )

    def pairs(self, direction: int) -> ProcessGroups:
        """From whom to whom a hop goes."""
        return tuple(
            (group[self.cycle[place]], group[self.cycle[(place + direction) % self.size]])
            for group in self.groups
            for place in range(self.size)
        )

    def places(self, devices: int, part: Part) -> list[int]:
        """For each device the place of a part among all that a dimension is cut into; 0 for a
        device in no ring."""
        table = [0] * devices
        for group in self.groups:
            for place, position in enumerate(self.cycle):
                table[group[position]] = self._owner(place, part) * self.halves + part.half
        return table

    def _owner(self, place: int, part: Part) -> int:
        """The position in its group of whom a part is that is seen from a place of the ring."""
        return self.cycle[(place + part.offset) % self.size]

    @property
    def sends(self) -> list[ProcessGroups]:
        """From whom to whom blocks are sent, one way round."""
        return [self.pairs(FORWARDS)]


@dataclass(frozen=True)
class Direct(Ring):
    """Groups in which each block goes straight to the device that it is of, and what is made of it
    straight back if it `returns`: then a near one comes first and another near one late, and the
    device's own last, so that nothing is left on its way when all is made."""

    returns: bool = False

    @cached_property
    def arriving(self) -> tuple[Part, ...]:
        """All parts, in the order in which they are taken."""
        own, *others = self._nearest_first()
        if not self.returns:
            return (own, *others)
        return (*others[:1], *others[2:], *others[1:2], own)

    @cached_property
    def summing(self) -> tuple[Part, ...]:
        """All parts, in the order in which they are given."""
        return self._nearest_first()[::-1]

    @property
    def sends(self) -> list[ProcessGroups]:
        """From whom to whom blocks are sent."""
        return [pairs for part in self.arriving if part.offset for pairs in self.straight(part)]


@dataclass(frozen=True)
class Cube(Direct):
    """Groups of 2, 4, 8 … devices, each a hypercube: block o is that of the device whose position
    differs in the bits of o, and goes there bit by bit.

    Where compute can only run beside hops to numbers that differ in one bit (`cost.as_compiled`).
    """

    @property
    def exists(self) -> bool:
        """Whether the positions in a group have bits, and neighbours numbers that differ in one."""
        bits = self.size.bit_length() - 1
        return 1 << bits == self.size and all(
            (source ^ target).bit_count() == 1
            for bit in range(bits)
            for source, target in self._flipped(1 << bit)
        )

    def _nearest_first(self) -> tuple[Part, ...]:
        return tuple(Part(0, bits) for bits in sorted(range(self.size), key=int.bit_count))

    def straight(self, part: Part) -> list[ProcessGroups]:
        """A hop for each bit."""
        bits = (1 << bit for bit in range(self.size.bit_length()))
        return [self._flipped(bit) for bit in bits if part.offset & bit]

    def opposite(self, part: Part) -> Part:
        """The same: the other's bits differ in the same places."""
        return part

    def _flipped(self, bits: int) -> ProcessGroups:
        return tuple(
            (group[place], group[place ^ bits])
            for group in self.groups
            for place in range(self.size)
        )

    def _owner(self, place: int, part: Part) -> int:
        """The position that differs in the part's bits."""
        return place ^ part.offset


def cycles(size: int) -> Iterator[tuple[int, ...]]:
    """Ways round a group: in its order; in that of a Gray code, from one number to the next of
    which one bit changes; and if it is a grid of rows that a compiler numbers one after the other,
    down along all rows and back along the first column, so that neighbours are neighbours."""
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
