"""The outcome of a pass pipeline on a module: the facts that its test states."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.artifacts.artifact import Artifact, parse, to_text
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.testing.brief_lines import brief_checks, link_count
from stablehlo_tools.testing.check_lines import Checks, check_lines


class Effect(enum.Enum):
    """The three results of a run."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True)
class TestOutcome:
    """The text before and after a run, its CHECK lines, and the diagnostics of the passes."""

    effect: Effect
    before: str
    after: str
    checks: Checks
    said: tuple[Diagnostic, ...]
    collectives: str | None  # the count as `inspect` prints it, None if it refuses the module
    links: int = 0  # the number of lines of a token chain, if only that is checked

    @property
    def refusal(self) -> Diagnostic:
        """The error of a run that was refused."""
        return next(d for d in self.said if d.severity is Severity.ERROR)

    def is_like(self, other: TestOutcome) -> bool:
        """Returns True if tests of both outcomes would state the same."""
        mine, its = (
            (each.effect, check_words(each.checks), [(d.severity, d.message) for d in each.said])
            for each in (self, other)
        )
        return mine == its


def check_words(checks: Checks) -> list[str]:
    """Returns the words of checks, without line breaks and brackets, which depend on gaps."""
    joined = "\n".join(checks.lines).replace("\nCHECK-SAME:", "")
    return [" ".join(re.findall(r"\w+", line)) for line in joined.splitlines()]


def outcome_of(
    data: bytes, name: str, pipeline: Pipeline, *, everything: bool, brief: bool = False
) -> TestOutcome:
    """Runs a pass pipeline on an artifact's bytes. Raises ToolError if they are not an artifact."""
    loaded = parse(data, name)
    before = to_text(loaded.module)
    diagnostics = Diagnostics()
    try:
        run_pipeline(loaded, pipeline, diagnostics)
    except ToolError as error:
        said = (*diagnostics.collected, error.diagnostic)
        return TestOutcome(Effect.REFUSED, before, "", Checks([], False), said, None)
    after = to_text(loaded.module)
    changed = before != after
    return TestOutcome(
        Effect.CHANGED if changed else Effect.UNCHANGED,
        before,
        after,
        brief_checks(loaded.module) if brief else check_lines(loaded.module, everything=everything),
        tuple(diagnostics.collected),
        collective_count(loaded),
        link_count(after) if brief else 0,
    )


def collective_count(loaded: Artifact) -> str | None:
    """Returns the count in the first line of `inspect`; None for a module that it refuses."""
    try:
        grid = ModuleFacts.from_module(loaded.module).grid
        count = len(find_collectives(loaded.module))
    except ToolError:
        return None
    return f": {count} communicating ops on {grid.num_replicas} x {grid.num_partitions} "
