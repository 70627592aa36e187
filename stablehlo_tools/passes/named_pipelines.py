"""Named pipelines: flat lists of passes, with the reason for every step's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedStep:
    """One step of a named pipeline, and why it stands there."""

    text: str
    reason: str


NAMED: dict[str, tuple[NamedStep, ...]] = {
    "order-collectives": (
        NamedStep("symbol-dce", "functions nobody calls would be threaded for nothing"),
        NamedStep("thread-tokens", "last: token barriers stop every later merge and move"),
    ),
}
