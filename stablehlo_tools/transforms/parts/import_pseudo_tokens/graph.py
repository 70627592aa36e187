"""Where the values that are zero because a root is zero flow: the candidate chain of that root.

    C(x + T)            a link: the collective C takes the token T
    T' = T * C(…)[0]    a maker: T' comes after C
    …, T' = all_reduce(…, T)    a maker that takes T as well

T may be converted and broadcast on the way to each. What else uses a token is an escape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.import_pseudo_tokens.patterns import ALL_REDUCE

Base = ir.Value | None  # the token that a value is made of; None is the constant zero


def is_same(first: Base, second: Base) -> bool:
    """Whether two tokens are one. (A value refuses to be compared with None.)"""
    if first is None or second is None:
        return first is second
    return first == second


@dataclass(frozen=True, eq=False)
class Link:
    """A collective that takes a token: its operand at `position` is `plain` + token."""

    collective: ir.Operation
    position: int
    plain: ir.Value
    base: Base


@dataclass(frozen=True, eq=False)
class Maker:
    """What makes a token that comes after a collective, from the one that came before it.

    `op` is the product, or the all_reduce itself; its operand at `position` is the old token.
    """

    collective: ir.Operation
    op: ir.Operation
    position: int
    base: Base
    token: ir.Value
    path: tuple[ir.Operation, ...] = ()

    @property
    def is_carry(self) -> bool:
        """Whether the token goes through the collective as an operand and a result of its own."""
        return self.op.name == ALL_REDUCE


@dataclass(frozen=True, eq=False)
class Flow:
    """A token handed through a loop, a branch or a call by the operand of `op` at `position`."""

    op: ir.Operation
    position: int
    base: Base
    targets: tuple[ir.Value, ...]


@dataclass(frozen=True, eq=False)
class Escape:
    """A use of a token that is no part of a chain."""

    op: ir.Operation
    position: int
    base: Base


@dataclass(frozen=True, eq=False)
class TokenGraph:
    """The candidate chain of one root: None for the constant zeros of the module.

    To be asked only when it is filled.
    """

    root: Base
    bases: dict[ir.Value, Base] = field(default_factory=dict[ir.Value, Base])
    images: list[ir.Operation] = field(default_factory=list[ir.Operation])
    links: list[Link] = field(default_factory=list[Link])
    makers: list[Maker] = field(default_factory=list[Maker])
    flows: list[Flow] = field(default_factory=list[Flow])
    escapes: list[Escape] = field(default_factory=list[Escape])

    @property
    def is_empty(self) -> bool:
        """Whether no collective takes a token of this root."""
        return not self.links and not any(maker.is_carry for maker in self.makers)

    def collectives(self) -> Iterator[ir.Operation]:
        """The collectives that take a token, with repeats."""
        yield from (link.collective for link in self.links)
        yield from (maker.collective for maker in self.makers if maker.is_carry)

    @cached_property
    def _handed(self) -> dict[Base, list[ir.Value]]:
        targets: dict[Base, list[ir.Value]] = {}
        for flow in self.flows:
            targets.setdefault(flow.base, []).extend(flow.targets)
        return targets

    @cached_property
    def _made(self) -> dict[Base, list[ir.Value]]:
        tokens: dict[Base, list[ir.Value]] = {}
        for maker in self.makers:
            tokens.setdefault(maker.base, []).append(maker.token)
        return tokens

    @cached_property
    def _taken(self) -> set[Base]:
        carries = [maker.base for maker in self.makers if maker.is_carry]
        return {*carries, *(link.base for link in self.links)}

    def downstream(self, base: Base, *, through_makers: bool) -> set[Base]:
        """The tokens that a token becomes by being handed on, or also by being made into others."""
        reached: set[Base] = {base}
        pending: list[Base] = [base]
        while pending:
            token = pending.pop()
            following = list(self._handed.get(token, ()))
            if through_makers:
                following += self._made.get(token, ())
            pending += [target for target in following if target not in reached]
            reached.update(following)
        return reached

    def made_tokens(self) -> set[Base]:
        """The tokens that come after some collective, wherever they are handed."""
        return {
            token
            for maker in self.makers
            for token in self.downstream(maker.token, through_makers=False)
        }

    def feeds(self, token: ir.Value) -> bool:
        """Whether a collective takes this token."""
        return not self._taken.isdisjoint(self.downstream(token, through_makers=False))

    def is_chain(self) -> bool:
        """Whether a token made after one collective is taken by a further one."""
        return any(self.feeds(maker.token) for maker in self.makers)
