"""Plays all ranks of a set against each other: a send ends when its receive does, and not before.

Imported by child processes only.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.running.executables import Parts
from stablehlo_tools.mpmd.running.player import Pairs, Player


def play(manifest: Manifest, players: Sequence[Player]) -> None:
    """Runs every rank to its end.

    Raises ToolError where ranks wait for each other for ever, and where a transfer of the manifest
    did not take place.
    """
    done: set[int] = set()
    while True:
        for player in players:
            player.advance()
        met = _transfers(players)
        if not met and _permute(manifest, players):
            continue
        done.update(met)
        if not met:
            break
    if not all(player.is_done for player in players):
        raise _stuck(players)
    for transfer in manifest.transfers:
        if manifest.form != "permutes" and transfer.channel not in done:
            raise ToolError(
                f"nothing was sent on channel {transfer.channel}, which the manifest has for "
                f"{transfer.action} from rank {transfer.source} to rank {transfer.target}"
            )


def _transfers(players: Sequence[Player]) -> list[int]:
    """Makes each transfer whose two ranks stand at it; their channels."""
    met: list[int] = []
    for sender in players:
        sent = sender.waiting
        if sent is None or sent.transfer is None or not sent.is_send:
            continue
        receiver = players[sent.transfer.target]
        received = receiver.waiting
        if received is None or received.is_send or received.transfer != sent.transfer:
            continue
        parts = sender.parts(sent.op.operands[0])
        sender.pass_by()
        receiver.pass_by(parts)
        met.append(sent.transfer.channel)
    return met


def _permute(manifest: Manifest, players: Sequence[Player]) -> bool:
    """Makes the permute at which all ranks stand."""
    waiting = [player.waiting for player in players]
    first = waiting[0]
    if first is None or any(w is None or w.transfer or w.pairs != first.pairs for w in waiting):
        return False
    size = manifest.devices
    sent = [player.parts(w.op.operands[0]) for player, w in zip(players, waiting, strict=True) if w]
    types = {str(w.op.operands[0].type) for w in waiting if w}
    if len(types) > 1:
        raise ToolError(f"a permute of {' and '.join(sorted(types))}", first.op.location)
    for rank, player in enumerate(players):
        assert player.waiting is not None
        player.pass_by(_received(player, rank, size, first.pairs, sent))
    return True


def _received(player: Player, rank: int, size: int, pairs: Pairs, sent: Sequence[Parts]) -> Parts:
    assert player.waiting is not None
    parts = list(player.zeros(player.waiting.op.results[0]))
    for source, target in pairs:
        if target // size == rank:
            parts[target % size] = sent[source // size][source % size]
    return tuple(parts)


def _stuck(players: Sequence[Player]) -> ToolError:
    """Who waits where, and for whom."""
    notes = [
        note(f"rank {player.rank} waits in {player.waiting}{_for(player)}", waiting.op.location)
        for player in players
        if (waiting := player.waiting) is not None
    ]
    done = [str(player.rank) for player in players if player.is_done]
    if done:
        notes.append(note(f"rank{'s' * (len(done) > 1)} {', '.join(done)} came to the end"))
    return ToolError("the ranks wait for each other for ever", notes=tuple(notes))


def _for(player: Player) -> str:
    assert player.waiting is not None
    transfer = player.waiting.transfer
    if transfer is None:
        return " for all others"
    return f" for rank {transfer.target if player.waiting.is_send else transfer.source}"
