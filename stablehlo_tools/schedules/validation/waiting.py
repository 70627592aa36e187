"""Whether a table runs to its end, and who waits for whom where it does not: C14."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.schedules.actions import Action, Kind, Step, parts
from stablehlo_tools.schedules.costs import unit_costs
from stablehlo_tools.schedules.execution import RENDEZVOUS, execute
from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.validation.rules import Findings, Rule, Violation
from stablehlo_tools.schedules.validation.structure import MISSING, Positions
from stablehlo_tools.schedules.validation.transfers import channel_of, other_end


def runs(table: Table, buffers: int) -> bool:
    """Whether a table that keeps C1 to C13 comes to an end; times change nothing about that."""
    return not execute(table, unit_costs(table.stages), buffers).stuck


class _Wait(NamedTuple):
    """A rank that waits at a step of its row for an action that another step is to take."""

    rank: int
    step: int
    awaited: Action
    holder: int  # the rank of the awaited action
    holder_step: int


def check_run(table: Table, at: Positions, buffers: int, findings: Findings) -> None:
    """C14, once C1 to C13 hold. One violation for each rank that waits, those in cycles first."""
    done = [len(ends) for ends in execute(table, unit_costs(table.stages), buffers).ends]
    waits = {
        rank: _wait(table, at, done, rank, buffers)
        for rank, row in enumerate(table.rows)
        if done[rank] < len(row)
    }
    cycles = _cycles(waits)
    for cycle in cycles:
        for number, wait in enumerate(cycle):
            message = _message(table, wait)
            if number == 0 and len(cycle) > 1:
                message += f"; deadlock: {_round(table, cycle)}"
            findings.add(_violation(table, wait, message))
    in_cycles = {wait.rank for cycle in cycles for wait in cycle}
    for rank in sorted(waits.keys() - in_cycles):
        message = f"{_message(table, waits[rank])}, which is stuck as well"
        findings.add(_violation(table, waits[rank], message))


def _wait(table: Table, at: Positions, done: list[int], rank: int, buffers: int) -> _Wait:
    """What the step that a rank is stuck at waits for: the first such thing."""
    here = done[rank]
    step = table.rows[rank][here]
    assert step is not None, "an idle cell never waits"
    for awaited in _needs(table, at, rank, step, buffers):
        holder = table.placement.rank_of(awaited.stage, awaited.microbatch)
        there = _position(table, at, awaited)
        if there >= done[holder]:
            return _Wait(rank, here, awaited, holder, there)
    raise AssertionError(f"rank {rank} stopped at {step}, all that it needs being there")


def _position(table: Table, at: Positions, action: Action) -> int:
    return at[action.kind][action.stage * table.microbatches + action.microbatch]


def _needs(table: Table, at: Positions, rank: int, step: Step, buffers: int) -> Iterator[Action]:
    """What a step may have to wait for."""
    for action in parts(step):
        if action.kind.is_compute:
            yield from _inputs(table, at, action)
        elif action.kind.is_send and buffers != RENDEZVOUS:
            yield from _room(table, at, rank, action, buffers)
        else:
            yield other_end(action)


def _inputs(table: Table, at: Positions, action: Action) -> Iterator[Action]:
    """What makes the inputs of a phase; of the same stage is earlier in the row, by C9."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD and stage > 0:
        yield Action(Kind.FORWARD, stage - 1, microbatch)
    if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage + 1 < table.stages:
        full = Action(Kind.BACKWARD, stage + 1, microbatch)
        split = Action(Kind.INPUT_GRADIENT, stage + 1, microbatch)
        yield split if _position(table, at, full) == MISSING else full


def _room(table: Table, at: Positions, rank: int, send: Action, buffers: int) -> Iterator[Action]:
    """The receive that makes room for a send: of the message `buffers` before it."""
    channel = channel_of(table, rank, send)
    sends = [
        step
        for step in table.rows[rank][: _position(table, at, send)]
        if isinstance(step, Action) and step.kind.is_send
        if channel_of(table, rank, step) == channel
    ]
    if len(sends) >= buffers:
        yield other_end(sends[-buffers])


def _cycles(waits: dict[int, _Wait]) -> list[list[_Wait]]:
    """The cycles of ranks that wait for each other, each from its lowest rank on.

    Every rank that waits does so for one that waits too, so there is a cycle where any waits.
    """
    cycles: list[list[_Wait]] = []
    seen: set[int] = set()
    for first in waits:
        path: dict[int, None] = {}
        rank = first
        while rank not in seen:
            seen.add(rank)
            path[rank] = None
            rank = waits[rank].holder
        if rank in path:
            ranks = list(path)
            cycle = ranks[ranks.index(rank) :]
            turn = cycle.index(min(cycle))
            cycles.append([waits[one] for one in cycle[turn:] + cycle[:turn]])
    return cycles


def _round(table: Table, cycle: list[_Wait]) -> str:
    """`rank 0 waits for 1F3 of rank 1, which waits for 0B1 of rank 0`."""
    waits = ", which ".join(f"waits for {wait.awaited} of rank {wait.holder}" for wait in cycle)
    return f"rank {cycle[0].rank} {waits}"


def _message(table: Table, wait: _Wait) -> str:
    if wait.holder == wait.rank:
        return f"waits for {wait.awaited}, which comes behind it, at step {wait.holder_step}"
    return f"waits for {wait.awaited} of rank {wait.holder}, step {wait.holder_step}"


def _violation(table: Table, wait: _Wait, message: str) -> Violation:
    step = str(table.rows[wait.rank][wait.step])
    return Violation(wait.rank, wait.step, step, Rule.DEADLOCK, message)
