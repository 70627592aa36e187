"""Small sets of programs for the order checker: builders, and Hypothesis strategies.

A set is drawn as one master sequence, of which each program gets its projection: what its devices
take part in. Then the projections are changed at random, and order is left away at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from stablehlo_tools.diagnostics import Place
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    Decision,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    Rendezvous,
)

FORMS = (
    CollectiveSignature("all_reduce", ("tensor<4xf32>",), "add"),
    CollectiveSignature("all_reduce", ("tensor<4xf32>",), "add channel 2"),
    CollectiveSignature("all_gather", ("tensor<4xf32>",), "dim 0"),
)
TRANSFERS = (
    CollectiveSignature("transfer", ("tensor<4xf32>",), "channel 1"),
    CollectiveSignature("transfer", ("tensor<4xf32>",), "channel 2"),
)


# Builders, for the tests written by hand as well.


def all_of(*groups: Sequence[int]) -> tuple[Rendezvous, ...]:
    """The rendezvous of a collective with these replica groups."""
    return tuple(Rendezvous(tuple(group), tuple(group)) for group in groups)


def collective(*groups: Sequence[int], form: CollectiveSignature = FORMS[0]) -> CollectiveIssue:
    """A collective with these replica groups."""
    return CollectiveIssue(0, form, all_of(*groups))


def send(source: int, target: int, form: CollectiveSignature = TRANSFERS[0]) -> CollectiveIssue:
    """The sending end of a transfer."""
    return CollectiveIssue(0, form, (Rendezvous((source, target), (source,)),), transfer="send")


def recv(source: int, target: int, form: CollectiveSignature = TRANSFERS[0]) -> CollectiveIssue:
    """The receiving end of a transfer."""
    return CollectiveIssue(0, form, (Rendezvous((source, target), (target,)),), transfer="recv")


def closed(before: Sequence[int]) -> tuple[int, ...]:
    """The order with everything that follows from it."""
    result: list[int] = []
    for bits in before:
        whole = bits
        for earlier, theirs in enumerate(result):
            if bits >> earlier & 1:
                whole |= theirs
        result.append(whole)
    return tuple(result)


def chain(*nodes: Node) -> ProgramBlock:
    """A block whose nodes are in order."""
    return ProgramBlock(nodes, tuple((1 << i) - 1 for i in range(len(nodes))))


def partly(*nodes: Node, pairs: Sequence[tuple[int, int]] = ()) -> ProgramBlock:
    """A block that orders these pairs of nodes, and what follows from them."""
    before = [0] * len(nodes)
    for first, second in pairs:
        before[second] |= 1 << first
    return ProgramBlock(nodes, closed(before))


def same(devices: Sequence[int], value: int) -> Decision:
    """All devices decide alike, and it is known how."""
    values = dict.fromkeys(devices, value)
    return Decision(dict.fromkeys(devices, 0), values, is_constant=True)


def each(values: dict[int, int]) -> Decision:
    """It is known how each device decides."""
    return Decision(dict(values), dict(values))


def repeat(
    devices: Sequence[int], trips: int, body: ProgramBlock, *, is_chained: bool = True
) -> ProgramLoop:
    """A loop of a known trip count, the same on all devices."""
    return ProgramLoop(same(devices, trips), ProgramBlock(), body, is_chained=is_chained)


def program(
    devices: Sequence[int], block: ProgramBlock, dead: Sequence[CollectiveIssue] = ()
) -> CompiledOrder:
    """A program, named after its devices, its collectives numbered and placed in text order."""
    numbers = itertools.count()

    def numbered(node: Node) -> Node:
        if isinstance(node, CollectiveIssue):
            number = next(numbers)
            return replace(node, id=number, place=Place(line=number + 1, column=1))
        if isinstance(node, ProgramLoop):
            return replace(node, condition=inside(node.condition), body=inside(node.body))
        return replace(node, branches=tuple(map(inside, node.branches)))

    def inside(old: ProgramBlock) -> ProgramBlock:
        return ProgramBlock(tuple(map(numbered, old.nodes)), old.before)

    name = "p" + "".join(map(str, devices))
    return CompiledOrder(name, tuple(devices), inside(block), tuple(dead))


# Master sequences.


@dataclass(frozen=True)
class Collective:
    """One op of the master sequence."""

    form: CollectiveSignature
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Transfer:
    """Both ends of a transfer."""

    form: CollectiveSignature
    source: int
    target: int


@dataclass(frozen=True)
class Repeat:
    """A loop. `owner` is the one program that has it, where it is decided at run time."""

    trips: int
    body: tuple[Item, ...]
    condition: tuple[Item, ...] = ()
    owner: int | None = None


@dataclass(frozen=True)
class Choose:
    """A branch; the taken one is known, or only the `owner` has it and decides at run time."""

    taken: int
    branches: tuple[tuple[Item, ...], ...]
    owner: int | None = None


type Item = Collective | Transfer | Repeat | Choose


@dataclass(frozen=True)
class Flavor:
    """What may be drawn."""

    is_ordered: bool = False  # every block in total order
    changes: int = 2  # at most, all programs together
    undecided: bool = True
    overlapping: bool = True
    transfers: bool = True
    pairs: bool = False  # many groups of two, so that cycles of waits are long


@dataclass
class _Drawer:
    draw: st.DrawFn
    flavor: Flavor
    parts: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    budget: int = 7

    def below(self, count: int) -> int:
        return self.draw(st.integers(0, count - 1))

    def rarely(self, of: int) -> bool:
        return self.below(of) == of - 1

    def programs(self) -> list[CompiledOrder]:
        devices = 4 + self.below(2) if self.flavor.pairs else 2 + self.below(4)
        count = 1 + self.below(min(devices, 4))
        owner = [*range(count), *(self.below(count) for _ in range(devices - count))]
        self.parts = [tuple(d for d in range(devices) if owner[d] == p) for p in range(count)]
        everyone = tuple(range(devices))
        length = 3 + self.below(4) if self.flavor.pairs else 1 + self.below(5)
        master = self.items(everyone, length, 0, None)
        projected = [list(_project(master, set(part), p)) for p, part in enumerate(self.parts)]
        for _ in range(self.below(self.flavor.changes + 1)):
            number = self.below(count)
            projected[number] = self.changed(projected[number], self.parts[number])
        return [
            program(part, self.block(items, part, 0))
            for part, items in zip(self.parts, projected, strict=True)
        ]

    def items(
        self, devices: tuple[int, ...], count: int, depth: int, owner: int | None
    ) -> tuple[Item, ...]:
        made: list[Item] = []
        while len(made) < count and self.budget > 0:
            made.append(self.item(devices, depth, owner))
        return tuple(made)

    def item(self, devices: tuple[int, ...], depth: int, owner: int | None) -> Item:
        way = self.below(10) if depth < 2 else self.below(8)
        if way < 8 or self.budget < 2:
            self.budget -= 1
            return self.op(devices, is_transfer=way >= 6)
        inside, only = devices, owner
        if owner is None and self.flavor.undecided and self.rarely(3):
            only = self.below(len(self.parts))
            if len(self.parts[only]) > 1 or self.rarely(3):
                inside = self.parts[only] if not self.rarely(6) else devices
        if way == 8:
            condition = self.items(inside, 1, 2, only) if self.rarely(4) else ()
            body = self.items(inside, 1 + self.below(2), depth + 1, only)
            return Repeat(self.below(4), body, condition, only)
        branches = tuple(self.items(inside, self.below(3), depth + 1, only) for _ in range(2))
        return Choose(self.below(2), branches, only)

    def op(self, devices: tuple[int, ...], *, is_transfer: bool) -> Item:
        if is_transfer and len(devices) > 1 and self.flavor.transfers:
            source, target = self.draw(st.permutations(devices))[:2]
            return Transfer(TRANSFERS[self.below(2)], source, target)
        return Collective(FORMS[self.below(len(FORMS))], self.groups(devices))

    def groups(self, devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        mixed = tuple(self.draw(st.permutations(devices)))
        cut = 2 if self.flavor.pairs else 2 + self.below(max(len(mixed) - 1, 1))
        groups = [mixed[:cut]]
        if len(mixed) - cut > 1 and self.below(2):
            groups.append(mixed[cut:])
        return tuple(tuple(sorted(group)) for group in groups)

    def changed(self, items: Sequence[Item], part: tuple[int, ...]) -> list[Item]:
        """The items of a program with one change, somewhere."""
        listed = list(items)
        if not listed:
            return listed
        at = self.below(len(listed))
        item = listed[at]
        if isinstance(item, Repeat) and self.below(3):
            return [*listed[:at], *self.reshaped(item, part), *listed[at + 1 :]]
        way = self.below(6)
        if way == 0 and at:
            listed[at - 1], listed[at] = listed[at], listed[at - 1]
        elif way == 1:
            del listed[at]
        elif way == 2 and isinstance(item, Collective):
            listed[at] = replace(item, form=FORMS[self.below(len(FORMS))])
        elif way == 3 and isinstance(item, Collective):
            listed[at] = replace(item, groups=self.groups(tuple(range(sum(map(len, self.parts))))))
        elif way == 4:
            listed[at : at + 2] = [Repeat(1 + self.below(2), tuple(listed[at : at + 2]))]
        else:
            listed.insert(self.below(len(listed) + 1), item)
        return listed

    def reshaped(self, loop: Repeat, part: tuple[int, ...]) -> tuple[Item, ...]:
        """The loop unrolled by two, peeled, of another trip count, or with another body."""
        way = self.below(4)
        if way == 0 and loop.trips == 2 and not loop.condition:
            return (*loop.body, *loop.body)
        if way == 1 and loop.trips and not loop.condition:
            return (*loop.body, replace(loop, trips=loop.trips - 1))
        if way == 2:
            return (replace(loop, trips=self.below(4)),)
        return (replace(loop, body=tuple(self.changed(loop.body, part))),)

    def block(self, items: Sequence[Item], part: tuple[int, ...], depth: int) -> ProgramBlock:
        """A program's block, with some order between its nodes."""
        nodes = tuple(node for item in items for node in self.nodes(item, part, depth))
        if self.flavor.is_ordered or self.below(2):
            return chain(*nodes)
        before = [(1 << i) - 1 for i in range(len(nodes))]
        dense = self.below(3)
        for second in range(len(nodes)):
            for first in range(second):
                if dense == 0 or (dense == 1 and self.below(2)) or self.rarely(5):
                    before[second] &= ~(1 << first)
        return ProgramBlock(nodes, closed(before))

    def nodes(self, item: Item, part: tuple[int, ...], depth: int) -> Iterator[Node]:
        if isinstance(item, Collective):
            groups = all_of(*item.groups)
            yield CollectiveIssue(
                0, item.form, tuple(g for g in groups if set(g.members) & set(part))
            )
        elif isinstance(item, Transfer):
            if item.source in part:
                yield send(item.source, item.target, item.form)
            if item.target in part:
                yield recv(item.source, item.target, item.form)
        elif isinstance(item, Repeat):
            condition = self.block(item.condition, part, depth + 1)
            body = self.block(item.body, part, depth + 1)
            trips = self.decision(item.trips, part, item.owner is not None)
            known = trips.values is not None
            free = known and self.flavor.overlapping and not self.flavor.is_ordered
            yield ProgramLoop(trips, condition, body, is_chained=not (free and self.rarely(4)))
        else:
            branches = tuple(self.block(branch, part, depth + 1) for branch in item.branches)
            yield ProgramBranch(self.decision(item.taken, part, item.owner is not None), branches)

    def decision(self, value: int, part: tuple[int, ...], is_open: bool) -> Decision:
        if is_open:
            split = self.rarely(8)
            return Decision({d: i if split else 0 for i, d in enumerate(part)})
        known = same(part, value)
        if not self.flavor.is_ordered and self.rarely(8):
            assert known.values is not None
            other = part[self.below(len(part))]
            return each({**known.values, other: (value + 1) % 2})
        return known


def _project(items: Sequence[Item], part: set[int], number: int) -> Iterator[Item]:
    """What a program has of the items."""
    for item in items:
        if isinstance(item, Collective):
            if any(set(group) & part for group in item.groups):
                yield item
        elif isinstance(item, Transfer):
            if part & {item.source, item.target}:
                yield item
        elif item.owner is not None and item.owner != number:
            continue
        elif isinstance(item, Repeat):
            body = tuple(_project(item.body, part, number))
            condition = tuple(_project(item.condition, part, number))
            if body or condition:
                yield replace(item, body=body, condition=condition)
        else:
            branches = tuple(tuple(_project(branch, part, number)) for branch in item.branches)
            if any(branches):
                yield replace(item, branches=branches)


@st.composite
def program_sets(draw: st.DrawFn, flavor: Flavor = Flavor()) -> list[CompiledOrder]:
    """Small programs that are compiled apart."""
    return _Drawer(draw, flavor).programs()
