"""The candidates: the choices of each stage of the road, and the neighbours of a candidate.

A candidate has at most one choice of each stage. Its neighbours differ from it in one stage, whose
choice is added, removed or replaced.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablehlo_tools.passes.base import Pass, RoadStage, When
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.passes.registry import PASSES, find_pass


@dataclass(frozen=True)
class Circumstances:
    """The facts that decide which choices exist, and that fill in their options.

    `memory_limit` is in GiB; `axis` is the mesh axis for the stages of pipeline parallelism.
    """

    hardware: str
    memory_limit: float | None = None
    too_large: bool = False
    axis: str | None = None

    def admits(self, when: When) -> bool:
        """Returns True if a stage with this condition is tried."""
        return {
            When.ALWAYS: True,
            When.TOO_LARGE: self.too_large,
            When.ASKED: self.axis is not None,
        }[when]


@dataclass(frozen=True, order=True)
class RoadCandidate:
    """Choices by stage, in the order of the road; each is the text of a pass."""

    choices: tuple[tuple[RoadStage, str], ...] = ()

    @property
    def passes(self) -> tuple[str, ...]:
        """The texts of the passes, in order."""
        return tuple(text for _, text in self.choices)

    def __str__(self) -> str:
        return ",".join(self.passes)

    def to_json(self) -> list[tuple[int, str]]:
        """Returns the choices as plain data."""
        return [(int(stage), text) for stage, text in self.choices]

    @staticmethod
    def from_json(choices: list[tuple[int, str]]) -> RoadCandidate:
        """Returns the candidate from the data of `to_json`."""
        return RoadCandidate(tuple((RoadStage(stage), text) for stage, text in choices))


Road = Mapping[RoadStage, tuple[str, ...]]


def road(circumstances: Circumstances) -> Road:
    """Returns the choices of each stage, from the declarations of all passes."""
    choices: dict[RoadStage, list[str]] = {}
    for name in PASSES:
        of = find_pass(name)
        if of is not None and of.milestone and circumstances.admits(of.milestone.when):
            options = (*of.milestone.options, *of.milestone.slow)
            texts = _texts(of, options, circumstances)
            choices.setdefault(of.milestone.stage, []).extend(texts)
    return {stage: tuple(choices[stage]) for stage in sorted(choices)}


def slow_choices(circumstances: Circumstances) -> frozenset[str]:
    """Returns the choices whose rewriting takes about as long as a compilation."""
    passes = filter(None, map(find_pass, PASSES))
    return frozenset(
        text
        for of in passes
        if of.milestone
        for text in _texts(of, of.milestone.slow, circumstances)
    )


def neighbours(candidate: RoadCandidate, choices: Road) -> Iterator[RoadCandidate]:
    """Yields the candidates that differ from a candidate in one stage, later stages first.

    A change of a late stage keeps the passes before it, so its rewriting reuses their results.
    """
    chosen = dict(candidate.choices)
    for stage in sorted(choices, reverse=True):
        for text in (*choices[stage], None):
            if text == chosen.get(stage):
                continue
            other = {**chosen, stage: text}
            yield RoadCandidate(tuple((s, t) for s, t in sorted(other.items()) if t is not None))


def on_the_road(
    pipelines: Sequence[str], choices: Road, circumstances: Circumstances
) -> list[RoadCandidate]:
    """Returns advised pass pipelines as candidates, then the union of all of them.

    A pipeline with a pass that is not on the road is skipped. If two have a choice for one stage,
    the union has the first.
    """
    known: list[RoadCandidate] = []
    together: dict[RoadStage, str] = {}
    for text in pipelines:
        taken: dict[RoadStage, str] = {}
        for step in Pipeline.parse(text).passes:
            if step.milestone is None or step.milestone.stage not in choices:
                break
            told = dataclasses.replace(step, **_compiled_for(type(step), circumstances))
            taken.setdefault(step.milestone.stage, str(told))
        else:
            known.append(RoadCandidate(tuple(sorted(taken.items()))))
            together = {**taken, **together}
    union = RoadCandidate(tuple(sorted(together.items())))
    return list(dict.fromkeys([*known, union])) if known else []


@dataclass(frozen=True)
class Change:
    """The change from a candidate to a neighbour: a choice of a stage, None if it is removed."""

    stage: RoadStage
    text: str | None


def change_between(one: RoadCandidate, other: RoadCandidate) -> Change | None:
    """Returns the change from the first candidate to the second; None if not neighbours."""
    before, after = dict(one.choices), dict(other.choices)
    stages = [s for s in {*before, *after} if before.get(s) != after.get(s)]
    return Change(stages[0], after.get(stages[0])) if len(stages) == 1 else None


def for_machine(pipeline: str, circumstances: Circumstances) -> str:
    """Returns a pipeline whose passes know the machine, as candidates do."""
    steps = Pipeline.parse(pipeline).passes
    return ",".join(
        str(dataclasses.replace(step, **_compiled_for(type(step), circumstances))) for step in steps
    )


def _texts(of: type[Pass], options: Sequence[str], circumstances: Circumstances) -> Iterator[str]:
    for option in options:
        told = option.format(axis=circumstances.axis)
        # In its printed form, without options that have their default.
        yield for_machine(of.name + (f"{{{told}}}" if told else ""), circumstances)


def _compiled_for(of: type[Pass], circumstances: Circumstances) -> dict[str, Any]:
    """Returns the options of the pass that describe the machine: hardware and memory limit."""
    fields = {field.name for field in dataclasses.fields(of)}
    options: dict[str, Any] = {}
    if "hardware" in fields:
        options["hardware"] = circumstances.hardware
    limit = circumstances.memory_limit
    in_gib = typing.get_type_hints(of).get("memory_limit") == float | None
    if in_gib and limit is not None:
        options["memory_limit"] = limit
    return options
