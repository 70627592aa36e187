"""What the searches for a V-shaped schedule are given, and the tables that they give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.actions import Action
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.generators.v_search.blocks import (
    LEGS,
    PHASES,
    Block,
    Place,
    stage_of,
)
from stablehlo_tools.schedules.placement import v_shape
from stablehlo_tools.schedules.table import Table, table_of

_RESOLUTION = 1_000_000  # ticks of the longest phase or hop

Rows = Sequence[Sequence[tuple[int, int]]]  # of each rank: phase and microbatch, in order


@dataclass(frozen=True)
class Problem:
    """A block to start from, times, and limits.

    ticks: of each phase on each rank, a whole number from 1 up: whole, so that a gap is as long as
    what just fits it; from 1 up, so that the order of the times is an order of the dependences.
    hop: the ticks from one rank to another.
    limits: the most activations alive on each rank, no less than those of the block.
    """

    block: Block
    microbatches: int
    ticks: tuple[tuple[int, ...], ...]
    hop: int
    limits: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, p."""
        return self.block.ranks

    @property
    def is_even(self) -> bool:
        """Whether all phases take the same time and hops take none."""
        return not self.hop and len({tick for row in self.ticks for tick in row}) == 1


def problem(block: Block, microbatches: int, limits: tuple[int, ...], costs: Costs) -> Problem:
    """The problem at given costs. Raises ToolError for costs of another number of stages."""
    ranks = block.ranks
    if costs.stages != 2 * ranks:
        raise ToolError(
            f"costs of {costs.stages} stages for a V of {ranks} ranks, which has {2 * ranks}"
        )
    times = [costs.forward] * 2 + [costs.input_gradient] * 2 + [costs.weight_gradient] * 2
    longest = max(costs.communication, *map(max, times)) or 1.0

    def ticks(time: float) -> int:
        return round(time / longest * _RESOLUTION)

    return Problem(
        block,
        microbatches,
        tuple(
            tuple(max(1, ticks(time[stage_of(Place(phase, rank), ranks)])) for rank in range(ranks))
            for phase, time in enumerate(times)
        ),
        ticks(costs.communication),
        limits,
    )


def evened(problem: Problem, weight: int) -> Problem:
    """The problem with no hops and times of 2, of `weight` for weight gradients.

    Where they are longer they fit into fewer gaps, and those are left to what other ranks wait for.
    """
    ticks = (2,) * LEGS + (weight,) * (len(PHASES) - LEGS)
    return replace(problem, ticks=tuple((tick,) * problem.ranks for tick in ticks), hop=0)


def written(name: str, problem: Problem, rows: Rows) -> Table:
    """The table of what a search found."""
    ranks = problem.ranks
    actions: list[list[Action]] = []
    for rank, row in enumerate(rows):
        of = [(kind, stage_of(Place(i, rank), ranks)) for i, (kind, _) in enumerate(PHASES)]
        actions.append([Action(*of[phase], microbatch) for phase, microbatch in row])
    return table_of(name, v_shape(ranks, 2), problem.microbatches, actions)
