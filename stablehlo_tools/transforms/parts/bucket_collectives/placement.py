"""Where one op can stand for several of its block: after all that they need, before all users.

That is where the first of them stands, or behind the last op that another one needs. Users of
results that stand in between move down behind it, and what uses them; ops with effects keep their
order, so those that follow one that moves go along.

    %y = C(%x);  %z = f(%y);  %v = g(%u);  %w = C(%v)
  ==>
    %v = g(%u);  %y, %w = C(%x, %v);  %z = f(%y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import in_block_order, key_of, producer

_LEADS = "one of them leads to another (C9)"
_EFFECT_BETWEEN = "ops with effects between them would change their order (C9)"


@dataclass(frozen=True)
class Place:
    """Behind `behind`, or before the first of the ops where that is None.

    `moved` follow what is written there, in order.
    """

    first: ir.Operation
    behind: ir.Operation | None
    moved: tuple[ir.Operation, ...]

    def insertion_point(self) -> ir.InsertionPoint:
        """Where to write what stands for the ops."""
        if self.behind is None:
            return ir.InsertionPoint(self.first)
        return ir.InsertionPoint.after(self.behind)


def find_place(ops: Sequence[ir.Operation], effects: Effects) -> Place | str:
    """Where one op can stand for `ops`, which are of one block; or why there is no such place."""
    block = ops[0].block
    first = in_block_order(ops)[0]
    found = [_maker_in(block, value) for op in ops for value in op.operands]
    makers = [op for op in found if op is not None]
    later = in_block_order([op for op in makers if first.is_before_in_block(op)])
    if not later:
        return _LEADS if any(op == first for op in makers) else Place(first, None, ())
    moved = _moved(ops, later[-1], effects.in_block(block))
    return (
        moved if isinstance(moved, str) else Place(first, later[-1], tuple(in_block_order(moved)))
    )


def _moved(
    members: Sequence[ir.Operation], last: ir.Operation, effects: Sequence[ir.Operation]
) -> list[ir.Operation] | str:
    """What must follow the members, of the ops up to `last`, or why that is impossible."""
    reached = _Reached(members, last)
    if not reached.add_users([op for op in members if reached.is_near(op)]):
        return _LEADS
    near = [op for op in effects if reached.is_near(op)]
    while followers := reached.followers(near):
        if not reached.add(followers):
            return _EFFECT_BETWEEN
    return list(reached.found.values())


class _Reached:
    """The ops up to `last` that must follow some members, as they are found."""

    def __init__(self, members: Sequence[ir.Operation], last: ir.Operation) -> None:
        self.members = {key_of(op) for op in members}
        self.last = last
        self.found: dict[ir.Value | ir.Operation, ir.Operation] = {}

    def is_near(self, op: ir.Operation) -> bool:
        """Whether an op stands before `last`, or is it."""
        return op == self.last or op.is_before_in_block(self.last)

    def add(self, ops: Sequence[ir.Operation]) -> bool:
        """Takes ops in, and all that uses them; False where a member does."""
        self.found.update({key_of(op): op for op in ops})
        return self.add_users(ops)

    def add_users(self, ops: Sequence[ir.Operation]) -> bool:
        """Takes in all that uses some ops; False where a member does."""
        pending = list(ops)
        while pending:
            for user in _users_in_block(pending.pop()):
                key = key_of(user)
                if key in self.members:
                    return False
                if key not in self.found and self.is_near(user):
                    self.found[key] = user
                    pending.append(user)
        return True

    def followers(self, effects: Sequence[ir.Operation]) -> list[ir.Operation]:
        """The ops with effects that stand behind the first that is taken in, and are not."""
        taken = [key_of(op) in self.found for op in effects]
        behind = effects[taken.index(True) :] if True in taken else ()
        return [op for op in behind if key_of(op) not in self.found]


def _users_in_block(op: ir.Operation) -> list[ir.Operation]:
    """The ops of an op's block that use its results, in their regions too."""
    users: list[ir.Operation] = []
    for result in op.results:
        for use in result.uses:
            user = use.owner.operation
            while user.block != op.block:
                user = parent_of(user)
            users.append(user)
    return users


def parent_of(op: ir.Operation) -> ir.Operation:
    """The op around an op that is not the outermost."""
    parent = op.parent
    assert parent is not None, "an op inside another"
    return parent.operation


def _maker_in(block: ir.Block, value: ir.Value) -> ir.Operation | None:
    maker = producer(value)
    return maker if maker is not None and maker.block == block else None
