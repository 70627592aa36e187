"""Whether a table's sends and receives match (C10 to C13), and whether it runs to its end (C14).

C10 to C13 are asked of tables that name any transfer, once C1 to C9 hold: then every transfer that
the table names stands on its stage's rank, and no more than once. For C14 the table is run; where
that stops, the ranks that wait are named with what they wait for, those in a deadlock first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.schedules.costs import unit_costs
from stablehlo_tools.schedules.simulator import RENDEZVOUS, execute
from stablehlo_tools.schedules.table import Action, Kind, Step, Table, parts
from stablehlo_tools.schedules.validation.rules import Findings, Rule, Violation
from stablehlo_tools.schedules.validation.structure import MISSING, Lane, Positions, lanes

Channel = tuple[int, int]  # the rank that sends and the rank that receives


class _End(NamedTuple):
    """One end of a transfer: the kind of the other end, and how far its stage is."""

    other: Kind
    away: int


_FORWARDS = {
    Kind.SEND_FORWARD: _End(Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: _End(Kind.SEND_FORWARD, -1),
}
_BACKWARDS = {
    Kind.SEND_BACKWARD: _End(Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: _End(Kind.SEND_BACKWARD, 1),
}
_ENDS = _FORWARDS | _BACKWARDS


def other_end(end: Action) -> Action:
    """The receive of a send, the send of a receive."""
    other, away = _ENDS[end.kind]
    return Action(other, end.stage + away, end.microbatch)


def channel_of(table: Table, rank: int, end: Action) -> Channel:
    """The channel of a send or receive of a rank."""
    peer = table.placement.rank_of(end.stage + _ENDS[end.kind].away, end.microbatch)
    return (rank, peer) if end.kind.is_send else (peer, rank)


def named(at: Positions) -> bool:
    """Whether the table names any transfer."""
    return any(max(at[kind]) != MISSING for kind in _ENDS)


def check_transfers(table: Table, at: Positions, findings: Findings) -> None:
    """C10 to C12."""
    for kind, lane, peer in _ends(table):
        if peer is None or peer == lane.rank:
            _check_none(table, kind, lane, at, findings)
        else:
            _check_each(table, kind, lane, at, findings)


def _ends(table: Table) -> Iterator[tuple[Kind, Lane, int | None]]:
    """Every kind of end that every stage might have, and the rank of the other end, if any."""
    for kind in _ENDS if table.training else _FORWARDS:
        for lane in lanes(table):
            yield kind, lane, lane.behind if _ENDS[kind].away > 0 else lane.before


def _check_none(table: Table, kind: Kind, lane: Lane, at: Positions, findings: Findings) -> None:
    """C10: nothing goes from this stage, or comes to it, in this direction."""
    for microbatch, step in zip(lane.microbatches, at[kind][lane.cells], strict=True):
        if step == MISSING:
            continue
        end = Action(kind, lane.stage, microbatch)
        other = other_end(end).stage
        exists = 0 <= other < table.stages
        why = f"is on rank {lane.rank} as well" if exists else "does not exist"
        message = f"transfers nothing between ranks: stage {other} {why}"
        findings.add(Violation(lane.rank, step, str(end), Rule.NO_TRANSFER, message))


def _check_each(table: Table, kind: Kind, lane: Lane, at: Positions, findings: Findings) -> None:
    """C11 and C12: each is there, behind the phase that makes it or before the one that reads."""
    sends = kind.is_send
    row = table.rows[lane.rank]
    phases = _phases(kind, lane, at)
    ends = zip(lane.microbatches, at[kind][lane.cells], phases, strict=True)
    for microbatch, step, phase in ends:
        if MISSING < phase < step if sends else MISSING < step < phase:
            continue
        end = Action(kind, lane.stage, microbatch)
        if step == MISSING:
            message = f"{end} is missing: {_transferred(table, lane.rank, end)}"
            findings.add(Violation(lane.rank, len(row), "", Rule.TRANSFER, message))
            continue
        side = "makes what it sends" if sends else "needs what it receives"
        message = (
            f"comes {'before' if sends else 'behind'} {row[phase]}, step {phase}, which {side}"
        )
        findings.add(Violation(lane.rank, step, str(end), Rule.TRANSFER_ORDER, message))


def _transferred(table: Table, rank: int, end: Action) -> str:
    sender, receiver = channel_of(table, rank, end)
    what = "an activation" if end.kind in _FORWARDS else "a gradient"
    return f"{what} goes from rank {sender} to rank {receiver} here"


def _phases(kind: Kind, lane: Lane, at: Positions) -> list[int]:
    """Where the phase stands that makes what is sent, or reads what is received."""
    if kind in _FORWARDS:
        return at[Kind.FORWARD][lane.cells]
    full, split = at[Kind.BACKWARD][lane.cells], at[Kind.INPUT_GRADIENT][lane.cells]
    return list(map(max, full, split))  # one of the two is MISSING


def check_channels(table: Table, at: Positions, findings: Findings) -> None:
    """C13, once C1 to C12 hold: the first receive of each channel that is out of order."""
    for (sender, receiver), messages in _messages(table, at).items():
        messages.sort()
        received = sorted(step for _, step in messages)
        for number, ((sent, expected), step) in enumerate(zip(messages, received, strict=True)):
            if step == expected:
                continue
            message = (
                f"is receive {number} from rank {sender}, whose send {number} is "
                f"{table.rows[sender][sent]}, step {sent}; between two ranks they match in order"
            )
            action = str(table.rows[receiver][step])
            findings.add(Violation(receiver, step, action, Rule.CHANNEL, message))
            break


def _messages(table: Table, at: Positions) -> dict[Channel, list[tuple[int, int]]]:
    """The steps of the send and of the receive of every message, by channel."""
    steps: defaultdict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for kind, lane, peer in _ends(table):
        if not kind.is_send or peer is None or peer == lane.rank:
            continue
        other, away = _ENDS[kind]
        shift, cells = away * table.microbatches, lane.cells
        there = slice(cells.start + shift, cells.stop + shift, cells.step)
        steps[lane.rank, peer] += zip(at[kind][cells], at[other][there], strict=True)
    return steps


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
