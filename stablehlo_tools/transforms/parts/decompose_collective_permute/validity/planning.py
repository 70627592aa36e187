"""Which edges of a permute run in which iterations of its loop.

The needed windows of the edges cut the iterations into phases. Each phase has one permute with
just its edges, so that an iteration still runs at most one permute, however many windows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stablehlo_tools.analysis.demand import PermuteDemand, Ranges
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import BRANCHES

Strategy = Literal["edges", "whole"]
Edges = frozenset[int]  # positions in the pairs of a permute

MOST_FORMS = 8  # permutes that one is replaced by: each costs a branch and code, once
SYMBOLIC = "its result has a symbolic dimension, of which there are no zeros"
NOT_PLAIN = "its elements are not integers, floats or complex numbers, of which a zero is known"
WRITTEN = "it stands in a branch on the iteration already"
NEVER = "it never runs, or has no pairs"
ALL_NEEDED = "every edge is needed in every iteration"


@dataclass(frozen=True)
class Phase:
    """Iterations from `first` to `last`, and the edges that run in them."""

    first: int
    last: int
    edges: Edges

    @property
    def length(self) -> int:
        """How many iterations."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class ValidityPlan:
    """What becomes of one permute; the phases cover all iterations of its loop."""

    demand: PermuteDemand
    phases: tuple[Phase, ...]

    @property
    def forms(self) -> tuple[Edges, ...]:
        """The different sets of edges, as they first appear."""
        return tuple(dict.fromkeys(phase.edges for phase in self.phases))

    @property
    def before(self) -> int:
        """Transfers of the permute as it was, an edge in an iteration being one."""
        return len(self.demand.pairs) * sum(_lengths(self.demand.executed))

    @property
    def needed(self) -> int:
        """Transfers that something depends on."""
        return sum(sum(_lengths(windows)) for windows in self.demand.needed)

    @property
    def after(self) -> int:
        """Transfers that stay; more than are needed where phases were joined."""
        runs = set(_iterations(self.demand.executed))
        return sum(
            len(phase.edges)
            for phase in self.phases
            for n in range(phase.first, phase.last + 1)
            if n in runs
        )


def plan(
    demand: PermuteDemand, strategy: Strategy = "edges", most_forms: int = MOST_FORMS
) -> ValidityPlan | str:
    """What becomes of a permute, or why it stays as it is.

    `edges`: each edge runs in the iterations that need it, and in further ones where there would
    be more than `most_forms` sets of edges. `whole`: all edges that are ever needed run in the
    iterations that need any.
    """
    reason = demand.reason or _unwritable(demand.op)
    if reason:
        return reason
    if not demand.executed or not demand.pairs:
        return NEVER
    phases = _phases(demand, strategy)
    while len({phase.edges for phase in phases}) > max(most_forms, 1):
        phases = _joined(phases)
    every = frozenset(range(len(demand.pairs)))
    if all(phase.edges == every for phase in phases):
        return ALL_NEEDED
    return ValidityPlan(demand, tuple(phases))


def describe(chosen: ValidityPlan | PermuteDemand) -> str:
    """The windows of the edges, iterations counted from 0: for a note."""
    demand = chosen.demand if isinstance(chosen, ValidityPlan) else chosen
    alike: dict[Ranges, list[str]] = {}
    for (source, target), windows in zip(demand.pairs, demand.needed, strict=True):
        alike.setdefault(windows, []).append(f"{source}>{target}")
    told = [_told(names, windows, demand.trips) for windows, names in alike.items()]
    if not isinstance(chosen, ValidityPlan):
        return "; ".join(told)
    skipped = f"{chosen.before - chosen.after} of {chosen.before} transfers are skipped"
    return "; ".join([*told, skipped])


def _told(names: Sequence[str], windows: Ranges, trips: int) -> str:
    edges = f"edge {names[0]} is" if len(names) == 1 else f"edges {', '.join(names)} are"
    if not windows:
        return f"{edges} never needed"
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in windows]
    iterations = (
        "iteration" if len(windows) == 1 and windows[0][0] == windows[0][1] else "iterations"
    )
    return f"{edges} needed in {iterations} {', '.join(parts)} of {trips}"


def _phases(demand: PermuteDemand, strategy: Strategy) -> list[Phase]:
    """Iterations with equal edges in a row; where the permute does not run, those before it."""
    wanted: list[set[int]] = [set() for _ in range(demand.trips)]
    for edge, windows in enumerate(demand.needed):
        for n in _iterations(windows):
            wanted[n].add(edge)
    if strategy == "whole":
        union = set[int]().union(*wanted)
        wanted = [union if edges else set() for edges in wanted]
    found: list[Phase] = []
    for n in _iterations(demand.executed):
        edges = frozenset(wanted[n])
        if found and found[-1].edges == edges:
            found[-1] = Phase(found[-1].first, n, edges)
        else:
            found.append(Phase(n, n, edges))
    ends = [phase.first - 1 for phase in found[1:]] + [demand.trips - 1]
    starts = [0] + [end + 1 for end in ends[:-1]]
    return [Phase(a, b, p.edges) for a, b, p in zip(starts, ends, found, strict=True)]


def _joined(phases: Sequence[Phase]) -> list[Phase]:
    """The phases with those two neighbours joined for which that adds the fewest transfers."""
    added = [_added(one, two) for one, two in pairwise(phases)]
    at = added.index(min(added))
    one, two = phases[at], phases[at + 1]
    joined = Phase(one.first, two.last, one.edges | two.edges)
    return _merged([*phases[:at], joined, *phases[at + 2 :]])


def _added(one: Phase, two: Phase) -> int:
    both = len(one.edges | two.edges)
    return one.length * (both - len(one.edges)) + two.length * (both - len(two.edges))


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    found: list[Phase] = []
    for phase in phases:
        if found and found[-1].edges == phase.edges:
            found[-1] = Phase(found[-1].first, phase.last, phase.edges)
        else:
            found.append(phase)
    return found


def _unwritable(op: ir.Operation) -> str:
    if _is_written(op):
        return WRITTEN
    kind = ir.RankedTensorType(op.results[0].type)
    if not kind.has_static_shape:
        return SYMBOLIC
    plain = isinstance(kind.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType)
    return "" if plain else NOT_PLAIN


def _is_written(op: ir.Operation) -> bool:
    """Whether all that the regions of the branch around an op hold are permutes and constants."""
    branch = op.parent
    if branch is None or branch.name not in BRANCHES:
        return False
    held = {
        inner.operation.name for region in branch.regions for inner in region.blocks[0].operations
    }
    return held <= {op.name, "stablehlo.constant", "stablehlo.return"}


def _lengths(windows: Ranges) -> list[int]:
    return [last - first + 1 for first, last in windows]


def _iterations(windows: Ranges) -> list[int]:
    return [n for first, last in windows for n in range(first, last + 1)]
