"""Which layers lie on which rank.

The layers are cut into `ranks * repeats` chunks of consecutive ones; chunk p lies on rank p mod
`ranks`. Where the layers do not divide evenly, the first chunks have one more, and the others end
in a row of zeros that is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

RANK_DIMENSION = 1  # of a stack that is spread over the ranks: [repeats, ranks, …]


@dataclass(frozen=True)
class Chunks:
    """How `trips` iterations of a layer loop lie on the ranks."""

    ranks: int
    repeats: int
    trips: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The iterations of each chunk."""
        count = self.ranks * self.repeats
        return tuple(self.trips // count + (p < self.trips % count) for p in range(count))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first iteration of each chunk."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def longest(self) -> int:
        """The iterations of the largest chunk."""
        return self.sizes[0]

    @property
    def is_even(self) -> bool:
        """Whether all chunks have as many."""
        return self.sizes[0] == self.sizes[-1]

    def order(self) -> list[int]:
        """The iterations in the order in which the ranks hold them: rank 0's first.

        For uneven chunks, -1 stands for a row that fills a chunk up.
        """
        rows: list[int] = []
        for rank in range(self.ranks):
            for chunk in range(self.repeats):
                p = chunk * self.ranks + rank
                taken = range(self.firsts[p], self.firsts[p] + self.sizes[p])
                rows += [*taken, *[-1] * (self.longest - self.sizes[p])]
        return rows
