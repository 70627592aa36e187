"""Orders of forwards and gradients, to be filled with weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.schedules.actions import (
    Action,
    Kind,
    actions_of,
    backward,
    forward,
    input_gradient,
)
from stablehlo_tools.schedules.placement import Placement
from stablehlo_tools.schedules.table import Table, table_of


@dataclass(frozen=True)
class Draft:
    """The forwards and the input (or full) gradients of every rank, in order."""

    placement: Placement
    orders: tuple[tuple[Action, ...], ...]

    @property
    def actions(self) -> int:
        """How many there are: what filling costs."""
        return sum(map(len, self.orders))


def redrafted(table: Table) -> Draft:
    """The order of a table's forwards and gradients, every gradient split."""
    orders = tuple(tuple(_split(actions_of(row))) for row in table.rows)
    return Draft(table.placement, orders)


def one_at_a_time(placement: Placement, microbatches: int) -> Table:
    """Each microbatch forward and backward before the next: the least memory that there can be."""
    route = placement.routes[0]
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for i in range(microbatches):
        for stage, rank in enumerate(route):
            rows[rank].append(forward(stage, i))
        for stage, rank in reversed(list(enumerate(route))):
            rows[rank].append(backward(stage, i))
    return table_of("one at a time", placement, microbatches, rows)


def merged(draft: Draft, microbatches: int, split: int) -> Draft:
    """The draft with full gradients, but for the last `split` microbatches."""
    orders = tuple(
        tuple(toggled(action, action.microbatch < microbatches - split) for action in order)
        for order in draft.orders
    )
    return Draft(draft.placement, orders)


def toggled(action: Action, full: bool) -> Action:
    """The action, with a gradient made full or the input's only."""
    if action.kind is Kind.FORWARD:
        return action
    return Action(Kind.BACKWARD if full else Kind.INPUT_GRADIENT, *action[1:])


def _split(row: Iterator[Action]) -> Iterator[Action]:
    for kind, stage, microbatch in row:
        if kind is Kind.FORWARD:
            yield forward(stage, microbatch)
        elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRADIENT:
            yield input_gradient(stage, microbatch)
