"""What crosses from stage to stage for a microbatch, and what each phase takes and gives.

Values of the forward go up with the activations as far as something reads them; what the backward
reads below goes down with the gradients. A rank that has a value already is not sent it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stablehlo_tools.mpmd.staging.assignment import Assignment, Work
from stablehlo_tools.mpmd.staging.step import Step
from stablehlo_tools.schedules.table import Kind, Placement

_BACKWARD = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
Boundary = tuple[int, int]


@dataclass(frozen=True)
class Value:
    """A staged value: the phase that makes it, and the others that read it."""

    number: int
    made: Work
    read: frozenset[Work]

    def stages_above(self) -> list[int]:
        """The stages above its own that read it: it travels up with the activations."""
        if self.made.kind is not Kind.FORWARD:
            return []
        return sorted(work.stage for work in self.read if work.stage > self.made.stage)

    def stages_below(self) -> list[int]:
        """The stages below its own that read it: it travels down with the gradients."""
        return sorted(work.stage for work in self.read if work.stage < self.made.stage)


@dataclass
class Messages:
    """The values that go over each boundary, by the stages on its two sides: up where the second is
    above the first, down where it is below."""

    of: dict[Boundary, list[int]] = field(default_factory=dict[Boundary, list[int]])

    def between(self, stage: int, following: int) -> list[int]:
        """The values that a stage sends the next one, in the order of the program."""
        return self.of.get((stage, following), [])


def staged_values(step: Step, assignment: Assignment) -> list[Value]:
    """The values that a phase other than their own reads, in the order of the program."""
    found: list[Value] = []
    nodes = [step.flow.nodes[index] for index in sorted(step.needed)]
    for node in nodes:
        made = assignment.of[node.index]
        for number in node.results:
            users = step.flow.users.get(number, ())
            works = {assignment.of[u.index] for u in users if u.index in assignment.of}
            works.discard(made)
            if works:
                found.append(Value(number, made, frozenset(works)))
    return found


def route(values: Iterable[Value], placement: Placement, number: int) -> Messages:
    """The messages of a microbatch that takes route `number` of a placement."""
    ranks = placement.routes[number]
    messages = Messages()
    for value in values:
        has = {ranks[value.made.stage]}
        _travel(value, value.stages_above(), 1, ranks, has, messages)
        _travel(value, value.stages_below()[::-1], -1, ranks, has, messages)
    return messages


def _travel(
    value: Value,
    stages: list[int],
    way: int,
    ranks: tuple[int, ...],
    has: set[int],
    messages: Messages,
) -> None:
    """Sends a value on, from its stage to the last of those that lack it, nearest first."""
    missing = [stage for stage in stages if ranks[stage] not in has]
    if not missing:
        return
    last = max(missing, key=lambda stage: way * stage)
    for stage in range(value.made.stage, last, way):
        if ranks[stage + way] not in has:
            messages.of.setdefault((stage, stage + way), []).append(value.number)
            has.add(ranks[stage + way])


@dataclass(frozen=True)
class Ends:
    """What a phase takes from other phases, and what it gives to them: numbers of values."""

    takes: tuple[int, ...]
    gives: tuple[int, ...]


def ends_of(values: Iterable[Value], works: Mapping[Work, Work]) -> dict[Work, Ends]:
    """The ends of every phase, where `works` says which phase each is run as: I and W as
    themselves, or both as B."""
    takes: dict[Work, list[int]] = {work: [] for work in works.values()}
    gives: dict[Work, list[int]] = {work: [] for work in works.values()}
    for value in values:
        maker = works[value.made]
        readers = {works[work] for work in value.read}
        for reader in sorted(readers, key=_order):
            if reader != maker:
                takes[reader].append(value.number)
        if readers - {maker}:
            gives[maker].append(value.number)
    return {work: Ends(tuple(takes[work]), tuple(gives[work])) for work in takes}


def run_as(assignment: Assignment, *, split: bool) -> dict[Work, Work]:
    """The phase that each phase is run as: with `split` itself, else both gradients as B."""
    found: dict[Work, Work] = {}
    for stage in range(assignment.stages):
        found[Work(Kind.FORWARD, stage)] = Work(Kind.FORWARD, stage)
        for kind in _BACKWARD:
            found[Work(kind, stage)] = Work(kind if split else Kind.BACKWARD, stage)
    return found


def _order(work: Work) -> tuple[int, str]:
    return work.stage, work.kind.value
