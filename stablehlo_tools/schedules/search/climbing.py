"""Local search: small changes of an order, kept where they shorten what comes of it.

A change moves one step of one rank over some neighbours or, where a full gradient is cheaper than
its halves, makes a gradient full or splits it. Random, from a fixed seed, so that the same setting
always gives the same schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from stablehlo_tools.schedules.actions import Action, Kind
from stablehlo_tools.schedules.search.drafts import Draft, toggled

_FARTHEST = 4  # steps that one step is moved over
_TOGGLES = 0.4  # of the changes, where a full gradient is cheaper
_PATIENCE = 120  # changes in a row that gain nothing, for each rank


def climb(
    draft: Draft, makespan: float, merges: bool, tried: Callable[[Draft], float | None]
) -> None:
    """Changes a draft for as long as `tried` goes on giving makespans, and some of them gain.

    `merges`: whether gradients are made full and split. `tried` gives the makespan of a draft, None
    where it does not run or time is up.
    """
    dice = random.Random(0)
    patience = _PATIENCE * len(draft.orders)
    failed = 0
    while failed < patience:
        change = _toggled if merges and dice.random() < _TOGGLES else _moved
        changed = change(draft, dice)
        found = None if changed is None else tried(changed)
        if changed is None or found is None or found > makespan:
            failed += 1
            continue
        failed = 0 if found < makespan else failed + 1
        draft, makespan = changed, found


def _toggled(draft: Draft, dice: random.Random) -> Draft | None:
    """A draft with one gradient made full or split; None where the step is a forward."""
    rank = dice.randrange(len(draft.orders))
    order = draft.orders[rank]
    at = dice.randrange(max(1, len(order)))
    if at >= len(order) or order[at].kind is Kind.FORWARD:
        return None
    step = toggled(order[at], order[at].kind is Kind.INPUT_GRADIENT)
    orders = (
        *draft.orders[:rank],
        (*order[:at], step, *order[at + 1 :]),
        *draft.orders[rank + 1 :],
    )
    return Draft(draft.placement, orders)


def _moved(draft: Draft, dice: random.Random) -> Draft | None:
    """A draft with one step of one rank moved; None where that breaks the order of a stage."""
    rank = dice.randrange(len(draft.orders))
    order = list(draft.orders[rank])
    if len(order) < 2:
        return None
    start = dice.randrange(len(order))
    end = start + dice.choice((-1, 1)) * dice.randint(1, _FARTHEST)
    if not 0 <= end < len(order):
        return None
    passed = order[end:start] if end < start else order[start + 1 : end + 1]
    if any(_bound(order[start], other) for other in passed):
        return None
    order.insert(end, order.pop(start))
    orders = (*draft.orders[:rank], tuple(order), *draft.orders[rank + 1 :])
    return Draft(draft.placement, orders)


def _bound(one: Action, other: Action) -> bool:
    """Whether two steps of a rank must keep their order: of a stage, or of a microbatch's visit."""
    if one.stage != other.stage:
        return False
    forwards = (one.kind is Kind.FORWARD) + (other.kind is Kind.FORWARD)
    return forwards != 1 or one.microbatch == other.microbatch
