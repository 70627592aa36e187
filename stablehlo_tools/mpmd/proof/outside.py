"""Whether what stands outside of the schedule takes what the manifest says: M12.

The schedule tells what its actions take. Of `prepare`, the rounds of the finish, their messages and
what `main` returns the manifest tells it (`mpmd/wiring.py`), for ranks that it knows it of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.proof.findings import Findings, Rule
from stablehlo_tools.mpmd.reading import Call, Reading
from stablehlo_tools.mpmd.wiring import RETURN, wiring


def check_outside(manifest: Manifest, reading: Reading, findings: Findings) -> None:
    """M12 of one rank."""
    expected = manifest.ranks[reading.rank].wiring
    if not expected:
        return
    scheduled = {transfer.channel for transfer in manifest.transfers if transfer.is_scheduled}
    found = wiring(reading, scheduled)
    places = _places(reading)
    for name in dict.fromkeys((*expected, *found)):
        said = _difference(name, found.get(name), expected.get(name))
        if said:
            findings.add(Rule.OUTSIDE, said, reading, places.get(name, reading.main))


def _places(reading: Reading) -> dict[str, ir.Operation]:
    return {
        f"@{event.function}" if isinstance(event, Call) else f"channel {event.channel}": event.op
        for event in reading.events
    }


def _difference(name: str, found: Sequence[str] | None, expected: Sequence[str] | None) -> str:
    if found is None:
        return f"{name} is missing, which the manifest has outside of the schedule"
    if expected is None:
        return f"{name} stands outside of the schedule, where the manifest has none"
    for number, (there, wanted) in enumerate(zip_longest(found, expected, fillvalue="nothing")):
        if there != wanted:
            what = "@main returns" if name == RETURN else f"{name} takes"
            return f"{what} {there} as number {number}, where {wanted} is expected"
    return ""
