"""ZB-1p and ZB-2p: the zero-bubble schedule that is best within a memory limit (arXiv 2401.10241).

What there is to choose: the order of forwards and input gradients, in turns after a warm-up or as
they come, and where the weight gradients go. The shortest longest span wins, then the makespan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.generators.one_loop import zb_h1, zb_h2
from stablehlo_tools.schedules.search.filling import POLICIES, SCOUTS, Policy, fill
from stablehlo_tools.schedules.search.orders import Greedy, Turns, greedies, turns
from stablehlo_tools.schedules.simulator import peak_bytes, simulate
from stablehlo_tools.schedules.table import Table, loop, table_of

_STEADY = 3  # times p: so many microbatches show which choice is best for more,
_SHOWN = 2048  # and so many forwards of all ranks


class _Choice(NamedTuple):
    """An order and a policy, and what comes of them."""

    span: float
    makespan: float
    order: Turns | Greedy
    policy: Policy


def best_within(
    name: str, ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> Table:
    """The best schedule of one stage a rank whose activations fit `room` bytes on each rank.

    Raises ToolError, naming the rank and its least, where a rank cannot hold even one microbatch.
    """
    for rank, (of_rank, least) in enumerate(zip(room, costs.activation, strict=True)):
        if of_rank < least:
            raise ToolError(
                f"{name}: rank {rank} has room for {max(0.0, of_rank):g} of activations, and one "
                f"microbatch takes {least:g}"
            )
    few = min(microbatches, max(_STEADY * ranks, _SHOWN // ranks))
    choices = _choices(ranks, few, costs, room)
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        draft = choice.order.draft(microbatches)
        if draft is None:
            continue
        filled = fill(draft, microbatches, costs, room, choice.policy)
        if filled is not None:
            table = table_of(name, loop(ranks), microbatches, filled.rows)
            return _best([table, *_by_hand(name, ranks, microbatches, costs, room)], costs)
    raise AssertionError("one microbatch at a time always fits")


def _by_hand(
    name: str, ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> Iterator[Table]:
    """ZB-H1 and ZB-H2, where they fit."""
    for table in (zb_h1(ranks, microbatches), zb_h2(ranks, microbatches)):
        held = peak_bytes(table, replace(costs, weights=(0.0,) * ranks))
        if all(part <= most * (1 + 1e-9) for part, most in zip(held, room, strict=True)):
            yield replace(table, name=name)


def _best(tables: Sequence[Table], costs: Costs) -> Table:
    timelines = (simulate(table, costs) for table in tables)
    return min(timelines, key=lambda one: (round(one.span, 9), one.makespan)).table


def _choices(
    ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> Iterator[_Choice]:
    """All orders with the scouting policies, and all policies with the best of them."""
    orders = (
        *turns(ranks, microbatches, 1, costs, room),
        *greedies(loop(ranks), costs, room),
    )
    scouted = [*_filled(orders, SCOUTS, microbatches, costs, room)]
    yield from scouted
    best = min(scouted, key=lambda choice: choice[:2])
    yield from _filled([best.order], POLICIES, microbatches, costs, room)


def _filled(
    orders: Sequence[Turns | Greedy],
    policies: Sequence[Policy],
    microbatches: int,
    costs: Costs,
    room: Sequence[float],
) -> Iterator[_Choice]:
    drafts = ((order, order.draft(microbatches)) for order in orders)
    for (order, draft), policy in product(drafts, policies):
        filled = None if draft is None else fill(draft, microbatches, costs, room, policy)
        if filled is not None:
            yield _Choice(filled.span, filled.makespan, order, policy)
