"""Defines the rules for a set of rank programs, and collects the violations that a proof finds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, to_place
from stablehlo_tools.mpmd.reading import RankReading

NOWHERE = Place()
_LISTED = 10  # findings of each rule


class ProofRule(enum.Enum):
    """A numbered rule; docs/reference/commands/check-mpmd.md explains each."""

    FORM = ("M1", "main contains only the calls of its stages, the finish, and messages")
    TOKENS = ("M2", "one chain of tokens connects the messages, one the actions")
    OPERANDS = (
        "M3",
        "an action reads values of its own microbatch, the same ones for each microbatch",
    )
    SUMS = ("M4", "each sum over microbatches goes through all of them, once")
    MESSAGES = ("M5", "each message is sent once and received once, as the manifest describes it")
    ROWS = ("M6", "each rank runs its row of the schedule")
    SCHEDULE = ("M7", "the schedule read back is valid with rendezvous")
    ORDER = ("M8", "the separately compiled programs cannot deadlock")
    ENDS = ("M9", "inputs and outputs are in the right arguments and results")
    MEMORY = ("M10", "a rank holds no more of microbatches than its schedule allows")
    BUBBLE = ("M11", "the schedule read back needs the time of the requested one")
    OUTSIDE = ("M12", "calls outside the schedule read what the manifest lists")

    def __init__(self, number: str, meaning: str) -> None:
        self.number = number
        self.meaning = meaning


@dataclass(frozen=True)
class RankFinding:
    """A violation of a rule: its rank (None for the whole set), message and location."""

    rule: ProofRule
    rank: int | None
    message: str
    place: Place = NOWHERE
    program: str = ""

    def __str__(self) -> str:
        where = f"{self.place.render(self.program)}: " if self.program else ""
        who = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{who}{self.message} ({self.rule.number})"


@dataclass
class RankFindings:
    """Collects findings: the first few of each rule, and their number."""

    listed: list[RankFinding] = field(default_factory=list[RankFinding])
    counts: dict[ProofRule, int] = field(default_factory=dict[ProofRule, int])

    @property
    def count(self) -> int:
        """The number of findings, listed or not."""
        return sum(self.counts.values())

    def add(
        self,
        rule: ProofRule,
        message: str,
        reading: RankReading | None = None,
        op: ir.Operation | None = None,
    ) -> None:
        """Counts a finding about a rank, at an op of its program. Lists the first of each rule."""
        self.counts[rule] = self.counts.get(rule, 0) + 1
        if self.counts[rule] > _LISTED:
            return
        place = to_place(op.location) if op is not None else Place()
        rank, name = (None, "") if reading is None else (reading.rank, reading.name)
        self.listed.append(RankFinding(rule, rank, message, place, name))


def numbers(listed: Sequence[int]) -> str:
    """Returns numbers as text: `0, 2, 5`."""
    return ", ".join(map(str, listed))
