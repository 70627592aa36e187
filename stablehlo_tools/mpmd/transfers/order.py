"""One order of all transfers of a set, found by running the ranks against each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.mpmd.manifest import Transfer

Round = tuple[Transfer, ...]  # of one type, between different ranks: one permute


def rounds_of(rows: Sequence[Sequence[Transfer]]) -> list[Round]:
    """The transfers in an order that is each rank's own, those that are ready together as one.

    `rows[r]` are those of rank r in its order. Raises ToolError where ranks wait for each other for
    ever.
    """
    left = [deque(row) for row in rows]
    rounds: list[Round] = []
    while any(left):
        ready = _ready(left)
        if not ready:
            raise _stuck(left)
        by_type: dict[str, list[Transfer]] = {}
        for transfer in ready:
            by_type.setdefault(transfer.type, []).append(transfer)
            left[transfer.source].popleft()
            left[transfer.target].popleft()
        rounds += map(tuple, by_type.values())
    return rounds


def _ready(left: Sequence[deque[Transfer]]) -> list[Transfer]:
    """The transfers that are next on both their ranks, which are different ranks for each."""
    return [
        row[0]
        for rank, row in enumerate(left)
        if row
        and row[0].source == rank
        and left[row[0].target]
        and left[row[0].target][0] == row[0]
    ]


def _stuck(left: Sequence[deque[Transfer]]) -> ToolError:
    notes = tuple(
        note(
            f"rank {rank} waits for channel {row[0].channel} ({row[0].action}) from rank "
            f"{row[0].source} to rank {row[0].target}"
        )
        for rank, row in enumerate(left)
        if row
    )
    return ToolError("the ranks wait for each other for ever", notes=notes)
