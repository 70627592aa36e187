"""Compares the order of the collectives in a schedule with their order in the program.

**Definition.** Both sides are read as the set of sequences of ids that they can issue, which is a
regular language. A `while` is condition (body condition)*, an `if` or `case` is any one of its
branches, calls are inlined, and only the start of an async pair counts. The schedule is in the
program's order if every sequence that the schedule can issue is one that the program can issue:

    program    A (B C)* D                       possible schedules in order:
    schedule   A B C B C D                      the loop unrolled, its trip count known
    schedule   A B (C B)* C D                   B pipelined into the iteration before
    schedule   A (B C)* (B C) D                 the last iteration peeled
    schedule   A (C B)* D                       not in order: the program cannot issue C B

First, differences other than the order are removed and reported separately:

- *deleted*: an id that the schedule lacks is dropped from the program. If the schedule has fewer
  copies of an id than the program has places for it (a function called twice, one result unused),
  each of these places may be skipped.
- *merged*: a collective with several ids counts as these ids in the program's order. So merging is
  in order only if no collective that the program issues between them is issued separately.
- *split*: neighbours with the same id count once (the real and the imaginary part of a permute) if
  the program has a single place for it, outside of loops, or the neighbours differ in shape or
  groups (an all-reduce split into reduce-scatter and all-gather).
- *added*: collectives without an id come from XLA and are ignored.

The inclusion is decided on the two automata, so the verdict is exact. It is linear for a chain of
ids. If a function is called thousands of times and XLA deleted some of its collectives, there may
be too many alternatives; the verdict is then *undecided*. Pure Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.targets.scheduled_hlo import (
    CollectiveEvent,
    Conditional,
    HloSchedule,
    Node,
    ScheduledLoop,
)

_STATE_LIMIT = 1_000_000
_WORK_LIMIT = 20_000_000  # states looked at; some ten seconds


@dataclass(frozen=True)
class ScheduledIssue:
    """The program issues the collective with this id."""

    id: int


@dataclass(frozen=True)
class Repeat:
    """A loop: the condition, then any number of times body and condition."""

    condition: tuple[Item, ...]
    body: tuple[Item, ...]


@dataclass(frozen=True)
class ScheduleBranch:
    """One of several alternatives."""

    branches: tuple[tuple[Item, ...], ...]


type Item = ScheduledIssue | Repeat | ScheduleBranch


@dataclass(frozen=True)
class OrderDifference:
    """The first place at which the schedule leaves the program's order.

    After `after` (None: at the start) it issues `issued` (None: it ends, or the loop does), but the
    program issues one of `expected` (empty: the program has ended). `position` is that of the
    schedule's event.
    """

    after: int | None
    issued: int | None
    expected: tuple[int, ...]
    position: int | None


@dataclass(frozen=True)
class OrderReport:
    """The verdict on the order, and the changes to the program's collectives, by id.

    If `undecided`, `same_order` is False and `difference` is None.
    """

    same_order: bool
    undecided: bool
    difference: OrderDifference | None
    deleted: tuple[int, ...]
    merged: tuple[tuple[int, ...], ...]
    split: tuple[int, ...]
    copied: tuple[int, ...]  # more often in the schedule's text than in the program's
    moved: tuple[int, ...]  # nowhere at the program's loop depth
    added: int  # collectives that XLA added
    incomplete: tuple[int, ...]  # first ids of collectives whose other ids XLA dropped


def compare_order(program: Sequence[Item], schedule: HloSchedule) -> OrderReport:
    """Compares a schedule with the program, by the definition above."""
    listed = list(places(program))
    # Reversed, so that the first place of an id is kept.
    rank = {id_: index for index, (id_, _) in reversed(list(enumerate(listed)))}
    in_program = Counter(id_ for id_, _ in listed)
    issued = [event for event in schedule.events if event.issues]
    in_schedule = Counter(id_ for event in issued for id_ in event.ids)
    optional = {id_ for id_ in in_program if in_schedule[id_] < in_program[id_]}
    split = _Split({id_: depth for id_, depth in listed if in_program[id_] == 1})
    difference, undecided = None, False
    try:
        actual = _schedule_automaton(schedule.nodes, rank, split)
        expected = _program_automaton(program, in_schedule, optional)
        difference = _first_difference(actual, expected)
    except _ComparisonTooLongError:
        undecided = True
    return OrderReport(
        same_order=difference is None and not undecided,
        undecided=undecided,
        difference=difference,
        deleted=tuple(id_ for id_ in rank_order(in_program, rank) if not in_schedule[id_]),
        merged=tuple(tuple(rank_order(event.ids, rank)) for event in issued if len(event.ids) > 1),
        split=tuple(rank_order(split.ids, rank)),
        copied=tuple(
            id_
            for id_ in rank_order(in_schedule, rank)
            if in_schedule[id_] > in_program[id_] and id_ not in split.ids
        ),
        moved=tuple(rank_order(_moved_between_loops(listed, issued), rank)),
        added=sum(1 for event in issued if not event.ids),
        incomplete=tuple(event.ids[0] for event in issued if event.partial),
    )


def rank_order(ids: Iterable[int], rank: dict[int, int]) -> list[int]:
    """The ids in the program's order; ids of no place in it (unreachable code) last."""
    return sorted(set(ids), key=lambda id_: (rank.get(id_, len(rank)), id_))


def program_ids(program: Sequence[Item]) -> list[int]:
    """Every id in the program's order, once."""
    return list(dict.fromkeys(id_ for id_, _ in places(program)))


def renumber_ids(program: Sequence[Item], numbers: Mapping[int, int]) -> tuple[Item, ...]:
    """The program with other ids."""

    def renumber_item(item: Item) -> Item:
        if isinstance(item, ScheduledIssue):
            return ScheduledIssue(numbers[item.id])
        if isinstance(item, Repeat):
            return Repeat(renumber_ids(item.condition, numbers), renumber_ids(item.body, numbers))
        return ScheduleBranch(tuple(renumber_ids(branch, numbers) for branch in item.branches))

    return tuple(renumber_item(item) for item in program)


def places(items: Sequence[Item], depth: int = 0) -> Iterator[tuple[int, int]]:
    """Every place of an id with the number of loops around it, in order."""
    for item in items:
        if isinstance(item, ScheduledIssue):
            yield item.id, depth
        elif isinstance(item, Repeat):
            yield from places(item.condition, depth + 1)
            yield from places(item.body, depth + 1)
        else:
            for branch in item.branches:
                yield from places(branch, depth)


def _moved_between_loops(listed: list[tuple[int, int]], issued: list[CollectiveEvent]) -> set[int]:
    depths: dict[int, set[int]] = {}
    for id_, depth in listed:
        depths.setdefault(id_, set()).add(depth)
    issued_depths: dict[int, set[int]] = {}
    for event in issued:
        loops = sum(part.startswith("while") for part in event.nesting)
        for id_ in event.ids:
            issued_depths.setdefault(id_, set()).add(loops)
    return {
        id_ for id_, loops in issued_depths.items() if id_ in depths and not loops & depths[id_]
    }


class _ComparisonTooLongError(Exception):
    """Raised if the comparison would run too long."""


@dataclass
class _Split:
    """Tells the parts of one collective from that collective issued again.

    `once` has the loop depth of the ids that the program has one place for.
    """

    once: dict[int, int]
    ids: set[int] = field(default_factory=set[int])

    def continues(self, previous: CollectiveEvent | None, event: CollectiveEvent) -> bool:
        """Returns True if the event is a further part of `previous`."""
        if previous is None or previous.ids != event.ids or not self.once.keys() >= {*event.ids}:
            return False
        alike = (previous.kind, previous.shape, previous.groups) == (
            event.kind,
            event.shape,
            event.groups,
        )
        if alike and any(self.once[id_] for id_ in event.ids):
            return False  # an unrolled loop may look like this, too
        self.ids.update(event.ids)
        return True


@dataclass(frozen=True)
class _OrderEdge:
    id: int
    target: int
    position: int | None = None


@dataclass
class _Automaton:
    """A nondeterministic automaton over ids, with silent edges; state 0 is the start."""

    edges: list[list[_OrderEdge]] = field(default_factory=list[list[_OrderEdge]])
    silent: list[list[int]] = field(default_factory=list[list[int]])
    accepting: int = 0
    work: int = 0

    def state(self) -> int:
        """A new state."""
        if len(self.edges) >= _STATE_LIMIT:
            raise _ComparisonTooLongError
        self.edges.append([])
        self.silent.append([])
        return len(self.edges) - 1

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """Returns the states reached without issuing an id, except those with only silent edges."""
        seen = set(states)
        pending = list(seen)
        while pending:
            for target in self.silent[pending.pop()]:
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        self.work += len(seen)
        if self.work > _WORK_LIMIT:
            raise _ComparisonTooLongError
        return frozenset(s for s in seen if self.edges[s] or s == self.accepting)


def _program_automaton(
    program: Sequence[Item], present: Counter[int], optional: set[int]
) -> _Automaton:
    automaton = _Automaton()

    def build(items: Sequence[Item], state: int) -> int:
        for item in items:
            if isinstance(item, Repeat):
                state = _loop(automaton, state, (item.condition, item.body), build, once=False)
            elif isinstance(item, ScheduleBranch):
                state = _branch(automaton, state, item.branches, build)
            elif present[item.id]:
                target = automaton.state()
                automaton.edges[state].append(_OrderEdge(item.id, target))
                if item.id in optional:
                    automaton.silent[state].append(target)
                state = target
        return state

    automaton.accepting = build(program, automaton.state())
    return automaton


def _schedule_automaton(nodes: Sequence[Node], rank: dict[int, int], split: _Split) -> _Automaton:
    automaton = _Automaton()

    def build(block: Sequence[Node], state: int) -> int:
        previous: CollectiveEvent | None = None
        for node in block:
            if isinstance(node, ScheduledLoop):
                once = bool(node.trip_count)
                state = _loop(automaton, state, (node.condition, node.body), build, once=once)
            elif isinstance(node, Conditional):
                state = _branch(automaton, state, node.branches, build)
            elif not node.issues or not node.ids:
                continue  # a done, or XLA's own: no place in the order, and no barrier to a split
            elif not split.continues(previous, node):
                for id_ in (i for i in rank_order(node.ids, rank) if i in rank):
                    target = automaton.state()
                    automaton.edges[state].append(_OrderEdge(id_, target, node.position))
                    state = target
            previous = None if isinstance(node, ScheduledLoop | Conditional) else node
        return state

    automaton.accepting = build(nodes, automaton.state())
    return automaton


def _loop[T](
    automaton: _Automaton,
    state: int,
    parts: tuple[Sequence[T], Sequence[T]],
    build: Callable[[Sequence[T], int], int],
    *,
    once: bool,
) -> int:
    """Condition (body condition)*, or at least `once` the body; returns the state after it."""
    condition, body = parts
    if once:
        state = build(body, build(condition, state))
    head = automaton.state()
    automaton.silent[state].append(head)
    tested = build(condition, head)
    first, after = automaton.state(), automaton.state()
    automaton.silent[tested] += [first, after]  # the body first: that is the order of the text
    automaton.silent[build(body, first)].append(head)
    return after


def _branch[T](
    automaton: _Automaton,
    state: int,
    branches: Sequence[Sequence[T]],
    build: Callable[[Sequence[T], int], int],
) -> int:
    """Any one of the branches; returns the state after them."""
    after = automaton.state()
    for branch in branches:
        first = automaton.state()
        automaton.silent[state].append(first)
        automaton.silent[build(branch, first)].append(after)
    return after


def _first_difference(actual: _Automaton, expected: _Automaton) -> OrderDifference | None:
    """Returns the first place at which `actual` issues an id that `expected` cannot.

    Both are walked together, depth first in the order of the schedule's text. So the schedule
    agrees with the program as far as possible before the reported difference.
    """
    pending: list[tuple[int, frozenset[int], int | None]] = [(0, expected.closure([0]), None)]
    seen: set[tuple[int, frozenset[int], bool]] = set()
    while pending:
        state, allowed, after = pending.pop()
        if (state, allowed, after is None) in seen:
            continue
        seen.add((state, allowed, after is None))
        if state == actual.accepting and expected.accepting not in allowed:
            return OrderDifference(after, None, _expected_ids(expected, allowed), None)
        pending += [(target, allowed, after) for target in reversed(actual.silent[state])]
        for edge in actual.edges[state]:
            reached = [e.target for s in allowed for e in expected.edges[s] if e.id == edge.id]
            if not reached:
                return OrderDifference(
                    after, edge.id, _expected_ids(expected, allowed), edge.position
                )
            pending.append((edge.target, expected.closure(reached), edge.id))
    return None


def _expected_ids(expected: _Automaton, allowed: frozenset[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(e.id for state in sorted(allowed) for e in expected.edges[state]))
