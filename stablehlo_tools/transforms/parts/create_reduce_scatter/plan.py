"""Which smaller collectives give each device just the chunk that it takes. Knows no MLIR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stablehlo_tools.analysis.replica_groups import ProcessGroups


@dataclass(frozen=True)
class Chunks:
    """A dimension divided into `count` equal chunks; device d takes chunk `taken[d]`."""

    dimension: int
    count: int
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Scatter:
    """A reduce_scatter of one dimension; member k of each group takes chunk k."""

    dimension: int
    groups: ProcessGroups


@dataclass(frozen=True)
class ScatterPlan:
    """The reduce_scatters, in order, and the all_reduce of what is left to sum over, if any."""

    scatters: tuple[Scatter, ...]
    rest: ProcessGroups | None

    def traffic(self) -> Fraction:
        """Bytes a device sends, in units of the operand, where collectives run as rings."""
        size, sent = Fraction(1), Fraction(0)
        for scatter in self.scatters:
            members = len(scatter.groups[0])
            size /= members
            sent += size * (members - 1)
        return sent + size * all_reduce_traffic(self.rest or ((0,),))


@dataclass(frozen=True)
class GatherPlan:
    """What stands for an all_gather of which each device takes one part.

    All None: the device's own operand. `groups`: an all_gather of smaller groups. `pairs`: a
    collective_permute from the device that holds the part.
    """

    groups: ProcessGroups | None = None
    pairs: ProcessGroups | None = None


def all_reduce_traffic(groups: ProcessGroups) -> Fraction:
    """Bytes a device sends in a ring all_reduce, in units of the operand."""
    return Fraction(2 * (len(groups[0]) - 1), len(groups[0]))


def plan_scatter(
    groups: ProcessGroups, chunks: Sequence[Chunks], devices: int
) -> ScatterPlan | None:
    """The collectives for an all_reduce over `groups` of which each device takes its chunks.

    None unless every chunk is taken by equally many members of each group. The largest cut comes
    first, so that least is sent.
    """
    if not chunks or not _divide_all(groups, devices):
        return None
    scatters: list[Scatter] = []
    for part in sorted(chunks, key=lambda part: (-part.count, part.dimension)):
        takers = [_takers(group, part) for group in groups]
        if any(len({len(members) for members in table}) != 1 for table in takers):
            return None
        scattered = tuple(row for table in takers for row in zip(*table, strict=True))
        groups = tuple(members for table in takers for members in table)
        if not groups[0]:
            return None
        scatters.append(Scatter(part.dimension, scattered))
    return ScatterPlan(tuple(scatters), groups if len(groups[0]) > 1 else None)


def plan_gather(
    groups: ProcessGroups, dimension: int, chunks: Sequence[Chunks], devices: int
) -> GatherPlan | None:
    """What stands for an all_gather along `dimension` of which each device takes its chunk."""
    if len(chunks) != 1 or chunks[0].dimension != dimension or not _divide_all(groups, devices):
        return None
    (part,) = chunks
    members = len(groups[0])
    if members % part.count:
        return None
    held = members // part.count  # operands that make up a chunk
    if all(part.taken[d] == i // held for group in groups for i, d in enumerate(group)):
        if held == 1:
            return GatherPlan()
        starts = range(0, members, held)
        return GatherPlan(groups=tuple(g[start : start + held] for g in groups for start in starts))
    if held > 1 or any(len({part.taken[d] for d in group}) < members for group in groups):
        return None
    return GatherPlan(pairs=tuple((g[part.taken[d]], d) for g in groups for d in g))


def _takers(group: Sequence[int], part: Chunks) -> list[tuple[int, ...]]:
    """The members of a group that take each chunk."""
    return [tuple(d for d in group if part.taken[d] == chunk) for chunk in range(part.count)]


def _divide_all(groups: ProcessGroups, devices: int) -> bool:
    """Whether equally large groups take in every device."""
    return len({len(group) for group in groups}) == 1 and devices == sum(map(len, groups))
