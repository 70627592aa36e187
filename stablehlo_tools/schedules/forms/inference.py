"""Finds what a bare list of rows leaves unsaid: the placement, the microbatches, training or not.

A stage belongs to the rank that runs it forward. Where stages run on two ranks and that is how two
opposite pipelines do it, by the parity of the microbatch, the placement is bidirectional. Otherwise
a forward on another rank than most of its stage's is left for the validator to report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.actions import Action, Kind, actions_of
from stablehlo_tools.schedules.forms.checked import checked_table
from stablehlo_tools.schedules.placement import Placement, bidirectional
from stablehlo_tools.schedules.table import Row, Table

_OF_TRAINING = {
    *(Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
    *(Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}


class _Standing(NamedTuple):
    """An action and the rank in whose row it stands."""

    rank: int
    action: Action


def inferred_table(name: str, rows: Sequence[Row], placement: Placement | None = None) -> Table:
    """The table of these rows, by a placement that is given or by the one they follow.

    Raises ToolError for rows without actions, for stages that nobody or that several ranks run, and
    for rows that are not as many as the placement has ranks.
    """
    standing = [
        _Standing(rank, action) for rank, row in enumerate(rows) for action in actions_of(row)
    ]
    if not standing:
        raise ToolError("no rank does anything: there is no action in any row")
    _check_count(standing, "microbatch")
    if placement is None:
        _check_count(standing, "stage")
        placement = _placement(len(rows), standing)
    microbatches = 1 + max(each.action.microbatch for each in standing)
    training = any(each.action.kind in _OF_TRAINING for each in standing)
    return checked_table(name, placement, microbatches, rows, training)


def _check_count(standing: Sequence[_Standing], what: str) -> None:
    """Refuses a number that no table so small can have, before anything is sized by it."""
    rank, action = max(standing, key=lambda each: getattr(each.action, what))
    if getattr(action, what) >= len(standing):
        raise ToolError(
            f"rank {rank}: {action}: there is no {what} {getattr(action, what)} among "
            f"{len(standing)} actions; stages and microbatches count from 0 without gaps"
        )


def _placement(ranks: int, standing: Sequence[_Standing]) -> Placement:
    votes = _votes(standing)
    forwards = [each for each in standing if each.action.kind is Kind.FORWARD]
    most = [max(counts, key=lambda rank: (counts[rank], -rank)) for counts in votes]
    alone = Placement(ranks, (tuple(most),))
    opposite = bidirectional(ranks)
    if opposite.stages == len(votes) and _followed(opposite, forwards) > _followed(alone, forwards):
        return opposite
    for stage, counts in enumerate(votes):
        if 2 * counts[most[stage]] <= counts.total():
            ranks_of_stage = " and ".join(map(str, sorted(counts)))
            raise ToolError(
                f"stage {stage} runs on ranks {ranks_of_stage}, none of which runs most of it, and "
                "not as two opposite pipelines do: the placement cannot be told; give the table "
                "as JSON, which names it"
            )
    return alone


def _votes(standing: Sequence[_Standing]) -> list[Counter[int]]:
    """For each stage, how many of its forwards each rank runs; any phases where it has none."""
    stages = 1 + max(each.action.stage for each in standing)
    forwards: list[Counter[int]] = [Counter() for _ in range(stages)]
    phases: list[Counter[int]] = [Counter() for _ in range(stages)]
    for rank, action in standing:
        if action.kind is Kind.FORWARD:
            forwards[action.stage][rank] += 1
        if action.kind.is_compute:
            phases[action.stage][rank] += 1
    found = [one or other for one, other in zip(forwards, phases, strict=True)]
    missing = next((stage for stage, counts in enumerate(found) if not counts), None)
    if missing is not None:
        raise ToolError(f"no rank runs stage {missing}, and there are stages up to {stages - 1}")
    return found


def _followed(placement: Placement, forwards: Sequence[_Standing]) -> int:
    """How many forwards stand where a placement has them."""
    return sum(
        placement.rank_of(action.stage, action.microbatch) == rank for rank, action in forwards
    )
