"""The rules that a table keeps, and the places where one breaks them."""

from __future__ import annotations

import enum
from typing import NamedTuple

_LISTED = 10  # of each rule; a table that breaks one everywhere is as well explained by a few


class Rule(enum.Enum):
    """A numbered constraint; see validator.py for the model that they make up."""

    ROWS = ("C1", "every rank of the placement has one row, and there is something to compute")
    RANGE = ("C2", "stages and microbatches are those of the table")
    PHASE = ("C3", "a forward-only table has forwards and their transfers only")
    RANK = ("C4", "an action stands on the rank that the placement names")
    PAIR = ("C5", "a pair is a forward and a full backward, of two microbatches")
    ONCE = ("C6", "no action stands twice")
    COMPLETE = ("C7", "every stage runs all its phases for every microbatch")
    FULL_OR_SPLIT = ("C8", "a full backward excludes the two gradients by themselves")
    ROW_ORDER = ("C9", "forward, then (input) gradient, then weight gradient of the same stage")
    NO_TRANSFER = ("C10", "what stays on its rank, or has no stage to go to, is not transferred")
    TRANSFER = ("C11", "what crosses ranks has a send and a receive, if any transfer is named")
    TRANSFER_ORDER = ("C12", "a send follows what makes its datum, a receive precedes its use")
    CHANNEL = ("C13", "between two ranks, receives are in the order of the sends")
    DEADLOCK = ("C14", "the run comes to an end")
    MEMORY = ("C15", "no rank ever holds more than the limit")

    def __init__(self, number: str, meaning: str) -> None:
        self.number = number
        self.meaning = meaning


class Violation(NamedTuple):
    """Where a table breaks a rule.

    `step` counts a row's cells from 0, idle ones too; for what is missing it is the row's length,
    and `action` is empty.
    """

    rank: int
    step: int
    action: str
    rule: Rule
    message: str

    def __str__(self) -> str:
        action = f"{self.action} " if self.action else ""
        return f"rank {self.rank}, step {self.step}: {action}{self.message} ({self.rule.number})"


class Findings:
    """Collects violations: the first few of each rule, and how many there are."""

    def __init__(self) -> None:
        self._listed: dict[Rule, list[Violation]] = {}
        self._counts: dict[Rule, int] = {}

    @property
    def count(self) -> int:
        """How many violations there are, listed or not."""
        return sum(self._counts.values())

    def add(self, violation: Violation) -> None:
        """Counts a violation, and keeps it if there are few of its rule, or one for each rank."""
        rule = violation.rule
        self._counts[rule] = self._counts.get(rule, 0) + 1
        if self._counts[rule] <= _LISTED or rule is Rule.DEADLOCK:
            self._listed.setdefault(rule, []).append(violation)

    def listed(self) -> list[Violation]:
        """The violations by rule; the last one kept of a rule says how many more there are."""
        listed: list[Violation] = []
        for rule in Rule:
            kept = self._listed.get(rule, [])
            more = self._counts.get(rule, 0) - len(kept)
            if more:
                message = f"{kept[-1].message}; {more} more break the same rule"
                kept = [*kept[:-1], kept[-1]._replace(message=message)]
            listed += kept
        return listed
