"""Which rank holds which stage of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The rank of every stage, for the microbatches of each route.

    Microbatch i takes `routes[i % len(routes)]`, which names a rank for each stage in order. There
    is one route but where two pipelines run through the same ranks in opposite directions.
    """

    ranks: int
    routes: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of the model, each with parameters of its own."""
        return len(self.routes[0])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes a stage for a microbatch."""
        return self.routes[microbatch % len(self.routes)][stage]

    def crosses(self, stage: int, microbatch: int) -> bool:
        """Whether what `stage` hands to the next stage leaves the rank."""
        route = self.routes[microbatch % len(self.routes)]
        return route[stage] != route[stage + 1]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose parameters each rank holds, in order."""
        stages: list[set[int]] = [set() for _ in range(self.ranks)]
        for route in self.routes:
            for stage, rank in enumerate(route):
                stages[rank].add(stage)
        return tuple(tuple(sorted(own)) for own in stages)

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(map(len, self.held))

    @cached_property
    def form(self) -> str:
        """`loop`, `v`, `bidirectional`, or `custom`."""
        chunks, rest = divmod(self.stages, self.ranks)
        if not rest and self == loop(self.ranks, chunks):
            return "loop"
        if not rest and self == v_shape(self.ranks, chunks):
            return "v"
        return "bidirectional" if self == bidirectional(self.ranks) else "custom"


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Stage s on rank s mod p: from the last rank back to the first."""
    return Placement(ranks, (tuple(stage % ranks for stage in range(ranks * chunks)),))


def v_shape(ranks: int, chunks: int = 2) -> Placement:
    """Down the ranks and up again: with two chunks, rank 0 holds the first and the last stage."""
    down = tuple(range(ranks))
    turns = (down if chunk % 2 == 0 else down[::-1] for chunk in range(chunks))
    return Placement(ranks, (_joined(turns),))


def bidirectional(ranks: int) -> Placement:
    """Even microbatches go down the ranks, odd ones up; each rank holds two stages' parameters."""
    return Placement(ranks, (tuple(range(ranks)), tuple(reversed(range(ranks)))))


def _joined(turns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(rank for turn in turns for rank in turn)
