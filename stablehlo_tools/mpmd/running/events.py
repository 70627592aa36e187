"""What a rank did while a set was played."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.mpmd.manifest import Transfer
from stablehlo_tools.schedules.forms import step_of
from stablehlo_tools.schedules.table import Action, Kind

_RECEIVED = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
}


@dataclass(frozen=True)
class Played:
    """What a rank did: its actions in order, and the most bytes of values that it held at once.

    Arguments count all the time, other values from where they are made to their last use, each
    once; temporaries inside a function do not count. `peak_at` is the action that held the most.
    Bytes are those of one device.
    """

    actions: tuple[str, ...]
    peak_bytes: int
    peak_at: str


def end_of(transfer: Transfer, *, is_send: bool) -> str:
    """How a schedule writes an end of a transfer: `1RECV_F5`; `finish` behind the schedule."""
    if is_send or not transfer.is_scheduled:
        return transfer.action
    sent = step_of(transfer.action)
    if not isinstance(sent, Action) or sent.kind not in _RECEIVED:
        return transfer.action
    kind, away = _RECEIVED[sent.kind]
    return str(Action(kind, sent.stage + away, sent.microbatch))
