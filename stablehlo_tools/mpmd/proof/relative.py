"""Values as the actions of a microbatch see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stablehlo_tools.mpmd.names import phase_of
from stablehlo_tools.mpmd.proof.findings import Findings
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.reading import Call, Origin, Reading, Source
from stablehlo_tools.schedules.table import Action, Kind


class Relative(NamedTuple):
    """A value as a call sees it: what it is, and whether it is of the call's own microbatch.

    `name` is a function, or a receive without its microbatch; empty for what is the same value
    always, which `origin` then is.
    """

    name: str
    number: int
    is_own: bool
    origin: Origin | None


@dataclass(frozen=True, eq=False)
class Flow:
    """What the checks of a rank share."""

    reading: Reading
    labels: Labels
    findings: Findings
    calls: dict[str, list[Call]]

    def relative(self, origin: Origin, microbatch: int) -> Relative:
        """An origin as seen from a microbatch."""
        action = self.action_of(origin)
        if action is None:
            return Relative("", 0, True, origin)
        is_own = action.microbatch == microbatch
        if origin.source is Source.CALL:
            call = self.reading.events[origin.event]
            assert isinstance(call, Call)
            return Relative(call.function, origin.number, is_own, None)
        label = self.labels.of(self.reading, origin.event)
        assert label is not None
        return Relative(f"{action.stage}{action.kind.value}", label.tensor, is_own, None)

    @cached_property
    def phases(self) -> dict[int, tuple[str, ...]]:
        """For each microbatch the functions that are called for it, in the order of their names.

        A schedule may run both gradients at once for one microbatch, and apart for another.
        """
        found: defaultdict[int, set[str]] = defaultdict(set)
        for call in self.reading.calls:
            found[microbatch_of(call)].add(call.function)
        return {microbatch: tuple(sorted(names)) for microbatch, names in found.items()}

    def alike(self, calls: Sequence[Call]) -> list[list[Call]]:
        """The calls in groups of those whose microbatches run the same phases."""
        groups: defaultdict[tuple[str, ...], list[Call]] = defaultdict(list)
        for call in calls:
            groups[self.phases[microbatch_of(call)]].append(call)
        return list(groups.values())

    def loosely(self, relative: Relative) -> Relative:
        """The same for microbatches that run other phases: of gradients only the stage counts."""
        phase = phase_of(relative.name)
        if phase is None or phase[0] is Kind.FORWARD:
            return relative
        return Relative(f"a gradient of stage {phase[1]}", 0, relative.is_own, None)

    def action_of(self, origin: Origin) -> Action | None:
        """The phase or the receive that makes a value; None for what no microbatch makes."""
        if origin.source is Source.CALL:
            event = self.reading.events[origin.event]
            return event.action if isinstance(event, Call) else None
        if origin.source is Source.MESSAGE:
            label = self.labels.of(self.reading, origin.event)
            return None if label is None else label.action
        return None


def microbatch_of(call: Call) -> int:
    """The microbatch of a call of the schedule."""
    assert call.action is not None
    return call.action.microbatch
