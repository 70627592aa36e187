"""What goes where outside of the schedule: in front of it and behind it.

The schedule says what its actions take and send. What `prepare`, the calls of the finish and their
messages take, and what a rank returns, only the one who wrote it knows; so the manifest says it:

    {"@finish_0": ["result 1 of 0B5", "argument 2"], "channel 9": ["result 0 of @finish_0"],
     "return": ["result 1 of @finish_1"]}
"""

from __future__ import annotations

from collections.abc import Collection

from stablehlo_tools.mpmd.reading import Call, Reading

RETURN = "return"


def wiring(reading: Reading, scheduled: Collection[int]) -> dict[str, tuple[str, ...]]:
    """Where the operands come from, of the calls that are no actions, of the sends on channels that
    are not `scheduled`, and of what `main` returns."""
    sources: dict[str, tuple[str, ...]] = {}
    for event in reading.events:
        if isinstance(event, Call):
            if event.action is None:
                sources[f"@{event.function}"] = tuple(map(reading.described, event.operands))
        elif event.is_send and event.channel not in scheduled:
            sources[f"channel {event.channel}"] = tuple(map(reading.described, event.operands))
    sources[RETURN] = tuple(map(reading.described, reading.returned))
    return sources
