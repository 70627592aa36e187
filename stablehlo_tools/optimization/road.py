"""The candidates: what each stage of the road has to choose from, and the neighbours of a choice.

A candidate takes at most one choice of each stage. Its neighbours differ from it in one stage: a
choice put in, taken out or exchanged.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.passes.registry import PASSES, find_pass
from stablehlo_tools.passes.road import Stage, When


@dataclass(frozen=True)
class Circumstances:
    """What decides which choices there are, and fills in their options.

    `memory_limit` in GiB; `axis`: the mesh axis that a pipeline may take.
    """

    hardware: str
    memory_limit: float | None = None
    too_large: bool = False
    axis: str | None = None

    def admits(self, when: When) -> bool:
        """Whether a stage is tried."""
        return {
            When.ALWAYS: True,
            When.TOO_LARGE: self.too_large,
            When.ASKED: self.axis is not None,
        }[when]


@dataclass(frozen=True, order=True)
class Candidate:
    """Choices by stage, in the order of the road; each is the text of a pass."""

    choices: tuple[tuple[Stage, str], ...] = ()

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes, in order."""
        return tuple(text for _, text in self.choices)

    def __str__(self) -> str:
        return ",".join(self.passes)

    def to_json(self) -> list[tuple[int, str]]:
        """The choices."""
        return [(int(stage), text) for stage, text in self.choices]

    @staticmethod
    def from_json(choices: list[tuple[int, str]]) -> Candidate:
        """What `to_json` gave."""
        return Candidate(tuple((Stage(stage), text) for stage, text in choices))


Road = Mapping[Stage, tuple[str, ...]]


def road(circumstances: Circumstances) -> Road:
    """The choices of each stage, from the declarations of all passes."""
    choices: dict[Stage, list[str]] = {}
    for name in PASSES:
        of = find_pass(name)
        if of is not None and of.milestone and circumstances.admits(of.milestone.when):
            options = (*of.milestone.options, *of.milestone.slow)
            texts = _texts(of, options, circumstances)
            choices.setdefault(of.milestone.stage, []).extend(texts)
    return {stage: tuple(choices[stage]) for stage in sorted(choices)}


def slow_choices(circumstances: Circumstances) -> frozenset[str]:
    """Those of the choices that take about as long as a compiler does."""
    passes = filter(None, map(find_pass, PASSES))
    return frozenset(
        text
        for of in passes
        if of.milestone
        for text in _texts(of, of.milestone.slow, circumstances)
    )


def neighbours(candidate: Candidate, choices: Road) -> Iterator[Candidate]:
    """All that differ from a candidate in one stage, later stages first.

    What comes late rewrites least, so it has most of its passes in common with the candidate.
    """
    chosen = dict(candidate.choices)
    for stage in sorted(choices, reverse=True):
        for text in (*choices[stage], None):
            if text == chosen.get(stage):
                continue
            other = {**chosen, stage: text}
            yield Candidate(tuple((s, t) for s, t in sorted(other.items()) if t is not None))


def on_the_road(
    pipelines: Sequence[str], choices: Road, circumstances: Circumstances
) -> list[Candidate]:
    """Pipelines that somebody advises as candidates, then all of them together.

    What has a pass that the road does not is left out; of two choices for a stage, the first is
    part of what they are together.
    """
    known: list[Candidate] = []
    together: dict[Stage, str] = {}
    for text in pipelines:
        taken: dict[Stage, str] = {}
        for step in Pipeline.parse(text).passes:
            if step.milestone is None or step.milestone.stage not in choices:
                break
            told = dataclasses.replace(step, **_compiled_for(type(step), circumstances))
            taken.setdefault(step.milestone.stage, str(told))
        else:
            known.append(Candidate(tuple(sorted(taken.items()))))
            together = {**taken, **together}
    union = Candidate(tuple(sorted(together.items())))
    return list(dict.fromkeys([*known, union])) if known else []


@dataclass(frozen=True)
class Change:
    """What makes one candidate of another: a choice of a stage, None where it is taken out."""

    stage: Stage
    text: str | None


def change_between(one: Candidate, other: Candidate) -> Change | None:
    """What makes the second candidate of the first; None where they are no neighbours."""
    before, after = dict(one.choices), dict(other.choices)
    stages = [s for s in {*before, *after} if before.get(s) != after.get(s)]
    return Change(stages[0], after.get(stages[0])) if len(stages) == 1 else None


def _texts(of: type[Pass], options: Sequence[str], circumstances: Circumstances) -> Iterator[str]:
    for option in options:
        told = option.format(axis=circumstances.axis)
        (step,) = Pipeline.parse(of.name + (f"{{{told}}}" if told else "")).passes
        # As it prints: without what is the default.
        yield str(dataclasses.replace(step, **_compiled_for(type(step), circumstances)))


def _compiled_for(of: type[Pass], circumstances: Circumstances) -> dict[str, Any]:
    """The options that say what is compiled for, where the pass has them."""
    fields = {field.name for field in dataclasses.fields(of)}
    options: dict[str, Any] = {}
    if "hardware" in fields:
        options["hardware"] = circumstances.hardware
    limit = circumstances.memory_limit
    in_gib = typing.get_type_hints(of).get("memory_limit") == float | None
    if in_gib and limit is not None:
        options["memory_limit"] = limit
    return options
