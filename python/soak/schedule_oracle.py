"""Decides whether a table is valid as naively as can be: counting, and trying every interleaving.

Shares nothing with the validator but the data types: what must be there is written down as a
multiset, and what can happen is searched state by state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Step,
    Table,
    actions_of,
    parts,
)

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
Standing = tuple[int, Action]  # an action and the rank whose row holds it


def accepts(table: Table, buffers: int = 0) -> bool:
    """Whether a table holds what it has to, and every interleaving of its ranks ends."""
    return well_formed(table) and ends(table, buffers)


def well_formed(table: Table) -> bool:
    """Whether every rank has exactly the actions it should have, in whatever order."""
    if len(table.rows) != table.ranks:
        return False
    pairs = [step for row in table.rows for step in row if isinstance(step, ActionPair)]
    if any((pair.forward.kind, pair.backward.kind) != (F, B) for pair in pairs):
        return False
    standing = [(rank, one) for rank, row in enumerate(table.rows) for one in actions_of(row)]
    computes = [one for one in standing if one[1].kind.is_compute]
    copies = [one for one in standing if one[1].kind.is_copy]
    transfers = Counter(one for one in standing if one not in computes and one not in copies)
    if transfers not in ({}, _expected_transfers(table)) or not _copies_right(table, copies):
        return False
    return _computes_right(table, computes)


def _copies_right(table: Table, copies: list[Standing]) -> bool:
    """Whether each copy to the host has one back, both once and on the rank of the stage."""
    here = {ActionKind.OFFLOAD: set[Standing](), ActionKind.RELOAD: set[Standing]()}
    for rank, action in copies:
        here[action.kind].add((rank, action._replace(kind=ActionKind.FORWARD)))
        inside = 0 <= action.stage < table.stages and 0 <= action.microbatch < table.microbatches
        if not inside or table.placement.rank_of(action.stage, action.microbatch) != rank:
            return False
    away, back = here.values()
    return away == back and len(copies) == 2 * len(away)


def _computes_right(table: Table, computes: list[Standing]) -> bool:
    found: dict[tuple[int, int], list[tuple[int, str]]] = {
        (stage, microbatch): []
        for stage in range(table.stages)
        for microbatch in range(table.microbatches)
    }
    for rank, (kind, stage, microbatch) in computes:
        if (stage, microbatch) not in found:
            return False
        found[stage, microbatch].append((rank, kind.value))
    forms = ("BF", "FIW") if table.training else ("F",)
    for (stage, microbatch), phases in found.items():
        rank = table.placement.rank_of(stage, microbatch)
        if sorted(phases) not in [[(rank, phase) for phase in form] for form in forms]:
            return False
    return True


def _expected_transfers(table: Table) -> Counter[Standing]:
    expected: Counter[Standing] = Counter()
    for microbatch in range(table.microbatches):
        for stage in range(table.stages - 1):
            here = table.placement.rank_of(stage, microbatch)
            there = table.placement.rank_of(stage + 1, microbatch)
            if here == there:
                continue
            expected[here, Action(ActionKind.SEND_FORWARD, stage, microbatch)] += 1
            expected[there, Action(ActionKind.RECEIVE_FORWARD, stage + 1, microbatch)] += 1
            if table.training:
                expected[there, Action(ActionKind.SEND_BACKWARD, stage + 1, microbatch)] += 1
                expected[here, Action(ActionKind.RECEIVE_BACKWARD, stage, microbatch)] += 1
    return expected


class State(NamedTuple):
    """How far each rank is, and what waits in each channel, by sender and receiver."""

    at: tuple[int, ...]
    channels: tuple[tuple[tuple[int, int], tuple[str, ...]], ...]


def ends(table: Table, buffers: int) -> bool:
    """Whether all interleavings end; fails where some do and some do not."""
    search = _Search(table, buffers)
    end = tuple(map(len, table.rows))
    seen = {State((0,) * table.ranks, ())}
    stack, finals = list(seen), set[bool]()
    while stack:
        state = stack.pop()
        following = set(search.following(state))
        if not following:
            finals.add(state.at == end)
        stack += following - seen
        seen |= following
    assert len(finals) == 1, f"the order in which ranks of {table} move decides whether it ends"
    return finals.pop()


class _Search:
    """What can happen next in a state. A datum is its name: `A2.0`, the activation of stage 2."""

    def __init__(self, table: Table, buffers: int) -> None:
        self._table = table
        self._buffers = buffers
        self._explicit = any(
            not (action.kind.is_compute or action.kind.is_copy)
            for row in table.rows
            for action in actions_of(row)
        )
        self._away = {
            action[1:] for row in table.rows for action in actions_of(row) if action.kind.is_copy
        }
        self._gained = [
            [
                frozenset[str]().union(*(_gains(step) for step in row[:at]))
                for at in range(len(row) + 1)
            ]
            for row in table.rows
        ]

    def following(self, state: State) -> Iterator[State]:
        """Every state that one step, or one meeting of a send and a receive, leads to."""
        for rank, at in enumerate(state.at):
            if at < len(self._table.rows[rank]):
                yield from self._moves(state, rank, self._table.rows[rank][at])

    def _moves(self, state: State, rank: int, step: Step | None) -> Iterator[State]:
        if not isinstance(step, Action) or step.kind.is_compute or step.kind.is_copy:
            needs = (*_needs(self._table, step), *self._copied(step))
            if all(need in self._held(state, rank) for need in needs):
                yield self._moved(state, (rank,))
        elif step.kind.is_send and _datum(step) in self._gained[rank][state.at[rank]]:
            yield from self._sent(state, rank, step)
        elif not step.kind.is_send and self._buffers:
            channels = dict(state.channels)
            channel = (self._peer(step), rank)
            if channels.get(channel, ())[:1] == (_datum(step),):
                channels[channel] = channels[channel][1:]
                yield self._moved(state, (rank,), channels)

    def _copied(self, step: Step | None) -> Iterator[str]:
        """What has to be back from the host for a step."""
        for kind, stage, microbatch in () if step is None else parts(step):
            if kind in (B, I) and (stage, microbatch) in self._away:
                yield f"R{stage}.{microbatch}"

    def _sent(self, state: State, rank: int, send: Action) -> Iterator[State]:
        peer = self._peer(send)
        if self._buffers:
            channels = dict(state.channels)
            waiting = channels.get((rank, peer), ())
            if len(waiting) < self._buffers:
                channels[rank, peer] = (*waiting, _datum(send))
                yield self._moved(state, (rank,), channels)
            return
        row, at = self._table.rows[peer], state.at[peer]
        other = row[at] if at < len(row) else None
        if not isinstance(other, Action) or not other.kind.value.startswith("RECV"):
            return
        if self._peer(other) == rank and _datum(other) == _datum(send):
            yield self._moved(state, (rank, peer))

    def _held(self, state: State, rank: int) -> frozenset[str]:
        own = [self._gained[one][at] for one, at in enumerate(state.at)]
        return own[rank] if self._explicit else frozenset[str]().union(*own)

    def _peer(self, end: Action) -> int:
        upward = end.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)
        return self._table.placement.rank_of(end.stage + (1 if upward else -1), end.microbatch)

    def _moved(
        self,
        state: State,
        ranks: tuple[int, ...],
        channels: dict[tuple[int, int], tuple[str, ...]] | None = None,
    ) -> State:
        at = tuple(one + (rank in ranks) for rank, one in enumerate(state.at))
        if channels is None:
            return State(at, state.channels)
        return State(at, tuple(sorted((key, kept) for key, kept in channels.items() if kept)))


def _gains(step: Step | None) -> frozenset[str]:
    """The data that a rank has after a step and had not before."""
    if step is None:
        return frozenset()
    return frozenset(
        _datum(one) for one in parts(step) if one.kind is not W and not one.kind.is_send
    )


def _datum(action: Action) -> str:
    """What a phase makes or a transfer carries, named by the stage that makes it."""
    kind, stage, microbatch = action
    if kind.is_copy:
        return f"{'H' if kind is ActionKind.OFFLOAD else 'R'}{stage}.{microbatch}"
    source = stage - (kind is ActionKind.RECEIVE_FORWARD) + (kind is ActionKind.RECEIVE_BACKWARD)
    gradient = kind in (B, I, ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD)
    return f"{'G' if gradient else 'A'}{source}.{microbatch}"


def _needs(table: Table, step: Step | None) -> Iterator[str]:
    for kind, stage, microbatch in () if step is None else parts(step):
        if kind is F and stage:
            yield f"A{stage - 1}.{microbatch}"
        if kind in (B, I):
            yield f"A{stage}.{microbatch}"
        if kind in (B, I) and stage + 1 < table.stages:
            yield f"G{stage + 1}.{microbatch}"
        if kind is W:
            yield f"G{stage}.{microbatch}"
        if kind is ActionKind.OFFLOAD:
            yield f"A{stage}.{microbatch}"
        if kind is ActionKind.RELOAD:
            yield f"H{stage}.{microbatch}"
        if kind is F and microbatch % table.sequence_slices:
            yield f"A{stage}.{microbatch - 1}"
        if kind in (B, I) and (microbatch + 1) % table.sequence_slices:
            yield f"G{stage}.{microbatch + 1}"
