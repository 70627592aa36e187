"""What the sends and receives of a table have to be: C10 to C13.

They are asked of tables that name any transfer, once C1 to C9 hold: then every transfer that the
table names stands on its stage's rank, and no more than once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.schedules.actions import Action, Kind
from stablehlo_tools.schedules.table import Table
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
    found: defaultdict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for kind, lane, peer in _ends(table):
        if not kind.is_send or peer is None or peer == lane.rank:
            continue
        other, away = _ENDS[kind]
        shift, cells = away * table.microbatches, lane.cells
        there = slice(cells.start + shift, cells.stop + shift, cells.step)
        found[lane.rank, peer] += zip(at[kind][cells], at[other][there], strict=True)
    return found
