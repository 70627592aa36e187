"""What a schedule is asked for: ranks, microbatches, and a model with its costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.costs import Costs, resliced
from stablehlo_tools.schedules.table import Placement

_ROUNDING = 1e-9  # of the limit
_MOST_FORWARDS = 4_000_000  # with their backwards, what some gigabytes of memory hold


@dataclass(frozen=True)
class Setting:
    """Ranks, microbatches, chunks a rank, and the costs of the model's equal slices.

    `slices` has the figures of any number of equal slices of the model, in order, each for one
    microbatch; one slice a rank is usual. A schedule of more stages cuts them, one of fewer joins
    them. `limit` is the most bytes that a rank may hold, weights and activations. `chunks` None
    leaves the number of stages a rank to the schedule.
    """

    ranks: int
    microbatches: int
    slices: Costs
    chunks: int | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        """Raises ToolError for counts below 1, tables of enormous size, and a limit below 0."""
        check_counts(self.ranks, self.microbatches, self.chunks)
        if self.limit is not None and not self.limit >= 0:
            raise ToolError(f"the memory limit is {self.limit}: it takes an amount from 0 up")

    def costs(self, stages: int) -> Costs:
        """The costs where the model is cut into so many stages."""
        return _resliced(self.slices, stages)

    def can_be_cut(self, chunks: int) -> bool:
        """Whether the slices give costs for so many chunks a rank."""
        try:
            self.costs(self.ranks * chunks)
        except ToolError:
            return False
        return True

    def room(self, placement: Placement) -> list[float]:
        """The bytes that the limit leaves each rank for activations; negative without any."""
        limit = float("inf") if self.limit is None else self.limit
        weights = self.costs(placement.stages).weights
        return [limit - sum(weights[stage] for stage in own) for own in placement.held]

    def fits(self, held: float) -> bool:
        """Whether a rank may hold so many bytes; sums that are over by rounding alone count."""
        return self.limit is None or held <= self.limit * (1 + _ROUNDING)


def check_counts(ranks: int, microbatches: int, chunks: int | None) -> None:
    """Raises ToolError for counts below 1, and for tables of enormous size."""
    _at_least_one("ranks", ranks)
    _at_least_one("microbatches", microbatches)
    if chunks is not None:
        _at_least_one("chunks a rank", chunks)
    forwards = ranks * microbatches * (chunks or 1)
    if forwards > _MOST_FORWARDS:
        raise ToolError(
            f"ranks x microbatches x chunks are {forwards:,}; a table of more than "
            f"{_MOST_FORWARDS:,} forwards is not written"
        )


@cache
def _resliced(slices: Costs, stages: int) -> Costs:
    return replace(
        slices,
        forward=resliced(slices.forward, stages),
        input_gradient=resliced(slices.input_gradient, stages),
        weight_gradient=resliced(slices.weight_gradient, stages),
        backward=resliced(slices.backward, stages),
        activation=resliced(slices.activation, stages),
        kept=resliced(slices.kept, stages),
        weights=resliced(slices.weights, stages),
    )


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise ToolError(f"{what}: {count}; it takes 1 or more")
