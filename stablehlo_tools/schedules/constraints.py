"""The numbered rules of a table, and the checks of those that its rows alone decide (C1 to C9).

C1 to C6: every action is allowed at its position. C7 to C9: all actions are present and in order.
Each row is read once and positions are stored in flat lists, because a table may have millions of
actions. The rules of transfers and of the run are in validator.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from stablehlo_tools.schedules.table import (
    COMPUTE,
    Action,
    ActionKind,
    ActionPair,
    Row,
    Table,
    parts,
)

_LISTED = 10  # of each rule; a few suffice to explain a table that breaks a rule everywhere
MISSING = -1
# For each kind of action, its position in its rank's row, at index `stage * microbatches +
# microbatch`; MISSING if it is absent.
Positions = dict[ActionKind, list[int]]
_FORWARD_ONLY = (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)


class ScheduleRule(enum.Enum):
    """A numbered constraint; see validator.py for the model that they make up."""

    ROWS = ("C1", "every rank of the placement has one row, and there is something to compute")
    RANGE = ("C2", "every stage and microbatch is in the range of the table")
    PHASE = ("C3", "a forward-only table has forwards and their transfers only")
    RANK = ("C4", "an action is on the rank that the placement names")
    PAIR = ("C5", "a pair is a forward and a full backward, of two microbatches")
    ONCE = ("C6", "no action occurs twice")
    COMPLETE = ("C7", "every stage runs all its phases for every microbatch")
    FULL_OR_SPLIT = ("C8", "a full backward excludes separate input and weight gradients")
    ROW_ORDER = ("C9", "forward, then (input) gradient, then weight gradient of the same stage")
    NO_TRANSFER = ("C10", "data that stay on a rank, or have no target stage, are not transferred")
    TRANSFER = ("C11", "if any transfer is named, all data crossing ranks have a send and receive")
    TRANSFER_ORDER = ("C12", "a send follows its datum's producer, a receive precedes its reader")
    CHANNEL = ("C13", "between two ranks, receives are in the order of the sends")
    DEADLOCK = ("C14", "the run completes every step")
    MEMORY = ("C15", "no rank ever holds more than the limit")
    SLICE_ORDER = ("C16", "slices of a microbatch go forward in order, and back in reverse")
    COPY = ("C17", "an offload follows its forward, and its reload precedes the gradient")

    def __init__(self, number: str, meaning: str) -> None:
        self.number = number
        self.meaning = meaning


class Violation(NamedTuple):
    """A place where a table breaks a rule.

    `step` counts a row's cells from 0, including idle ones. For a missing action it is the row's
    length, and `action` is empty.
    """

    rank: int
    step: int
    action: str
    rule: ScheduleRule
    message: str

    def __str__(self) -> str:
        action = f"{self.action} " if self.action else ""
        return f"rank {self.rank}, step {self.step}: {action}{self.message} ({self.rule.number})"


class ViolationCollector:
    """Collects violations: the first few of each rule, and the number of all."""

    def __init__(self) -> None:
        self._listed: dict[ScheduleRule, list[Violation]] = {}
        self._counts: dict[ScheduleRule, int] = {}

    @property
    def count(self) -> int:
        """The number of violations, listed or not."""
        return sum(self._counts.values())

    def add(self, violation: Violation) -> None:
        """Counts a violation, and keeps it if there are few of its rule, or one for each rank."""
        rule = violation.rule
        self._counts[rule] = self._counts.get(rule, 0) + 1
        if self._counts[rule] <= _LISTED or rule is ScheduleRule.DEADLOCK:
            self._listed.setdefault(rule, []).append(violation)

    def violations_by_rule(self) -> list[Violation]:
        """The violations by rule; the last one kept of a rule says how many more there are."""
        listed: list[Violation] = []
        for rule in ScheduleRule:
            kept = self._listed.get(rule, [])
            more = self._counts.get(rule, 0) - len(kept)
            if more:
                message = f"{kept[-1].message}; {more} more break the same rule"
                kept = [*kept[:-1], kept[-1]._replace(message=message)]
            listed += kept
        return listed


class Lane(NamedTuple):
    """One stage for the microbatches of one route: all of them on one rank."""

    stage: int
    rank: int
    before: int | None  # the rank of the previous stage, for the same microbatches
    behind: int | None  # the rank of the next stage
    microbatches: range
    cells: slice  # into the lists of positions


def check_rows(table: Table, findings: ViolationCollector) -> None:
    """Checks C1. If it fails, no other rule can be checked."""

    def refuse(message: str) -> None:
        findings.add(Violation(0, 0, "", ScheduleRule.ROWS, message))

    placement = table.placement
    if placement.ranks < 1 or not placement.routes or table.microbatches < 1:
        routes = len(placement.routes)
        refuse(
            f"the table has {placement.ranks} ranks, {routes} routes and {table.microbatches} "
            "microbatches; give one or more of each"
        )
        return
    if table.sequence_slices < 1 or table.microbatches % table.sequence_slices:
        refuse(
            f"{table.microbatches} slices, {table.sequence_slices} a microbatch: the first must be "
            "a multiple of the second"
        )
    if table.sequence_slices > 1 and len(placement.routes) > 1:
        refuse(
            f"{len(placement.routes)} routes: a table with sequence slices must have exactly one"
        )
    if len(table.rows) != placement.ranks:
        refuse(f"{len(table.rows)} rows for {placement.ranks} ranks; give one row for each rank")
    for number, route in enumerate(placement.routes):
        if not route or len(route) != table.stages:
            refuse(f"route {number} has {len(route)} stages, but route 0 has {table.stages}")
        for stage, rank in enumerate(route):
            if not 0 <= rank < placement.ranks:
                refuse(f"stage {stage} is on rank {rank}, but there are {placement.ranks} ranks")


def lanes(table: Table) -> Iterator[Lane]:
    """Every stage of every route."""
    routes, microbatches = table.placement.routes, table.microbatches
    for stage in range(table.stages):
        for first, route in enumerate(routes):
            yield Lane(
                stage,
                route[stage],
                route[stage - 1] if stage else None,
                route[stage + 1] if stage + 1 < table.stages else None,
                range(first, microbatches, len(routes)),
                slice(stage * microbatches + first, (stage + 1) * microbatches, len(routes)),
            )


def positions(table: Table, findings: ViolationCollector) -> Positions:
    """Returns the position of every action's first occurrence. Checks C2 to C6.

    An action that breaks a rule is left out, so that it counts as missing.
    """
    stages, microbatches, routes = table.stages, table.microbatches, table.placement.routes
    at = {kind: [MISSING] * (stages * microbatches) for kind in ActionKind}
    free = {kind: at[kind] for kind in (tuple(ActionKind) if table.training else _FORWARD_ONLY)}
    for rank, row in enumerate(table.rows):
        for position, action in _enumerate_actions(row):
            kind, stage, microbatch = action
            cell = stage * microbatches + microbatch
            if (
                0 <= stage < stages
                and 0 <= microbatch < microbatches
                and kind in free
                and routes[microbatch % len(routes)][stage] == rank
                and free[kind][cell] == MISSING
            ):
                free[kind][cell] = position
                continue
            rule, message = _refusal(table, rank, action, at)
            findings.add(Violation(rank, position, str(row[position]), rule, message))
        # C5.
        pairs = ActionPair in set(map(type, row))
        for position, step in enumerate(row if pairs else ()):
            if not isinstance(step, ActionPair):
                continue
            message = ""
            if (
                step.forward.kind is not ActionKind.FORWARD
                or step.backward.kind is not ActionKind.BACKWARD
            ):
                message = "overlaps other phases than a forward and a full backward"
            elif step.forward.microbatch == step.backward.microbatch:  # the forwards come before
                message = "overlaps two phases of one microbatch, but the second needs the first"
            if message:
                findings.add(Violation(rank, position, str(step), ScheduleRule.PAIR, message))
    return at


def _enumerate_actions(row: Row) -> Iterable[tuple[int, Action]]:
    """Every action with the position of its step."""
    if set(map(type, row)) <= {Action}:
        return enumerate(cast("tuple[Action, ...]", row))
    return (
        (position, action)
        for position, step in enumerate(row)
        if step is not None
        for action in parts(step)
    )


def _refusal(table: Table, rank: int, action: Action, at: Positions) -> tuple[ScheduleRule, str]:
    """Returns the first rule of C2, C3, C4 and C6 that an action breaks, and the message."""
    kind, stage, microbatch = action
    if not 0 <= stage < table.stages:
        return ScheduleRule.RANGE, f"has stage {stage}, but there are {table.stages} stages, from 0"
    if not 0 <= microbatch < table.microbatches:
        return (
            ScheduleRule.RANGE,
            f"has microbatch {microbatch}, but there are {table.microbatches}, from 0",
        )
    if not table.training and kind not in _FORWARD_ONLY:
        return ScheduleRule.PHASE, f"is not a forward, but {table.name} is a forward-only table"
    owner = table.placement.rank_of(stage, microbatch)
    if owner != rank:
        return ScheduleRule.RANK, f"is not for rank {rank}: stage {stage} is on rank {owner}"
    first = at[kind][stage * table.microbatches + microbatch]
    return ScheduleRule.ONCE, f"has {action} a second time; the first is at step {first}"


def check_phases(table: Table, at: Positions, findings: ViolationCollector) -> None:
    """Checks C7 to C9, C16 and C17."""
    copies = max(at[ActionKind.OFFLOAD]) != MISSING or max(at[ActionKind.RELOAD]) != MISSING
    for lane in lanes(table):
        phases = [at[kind][lane.cells] for kind in COMPUTE]
        for microbatch, steps in zip(lane.microbatches, zip(*phases, strict=True), strict=True):
            forward, full, inputs, weights = steps
            # The valid cases first: a table may have millions of phases.
            if forward != MISSING and not table.training:
                continue
            if MISSING < forward < full and inputs == weights == MISSING:
                continue
            if MISSING < forward < inputs < weights and full == MISSING:
                continue
            for rule, step, message, about in _faults(table.training, *steps):
                row = table.rows[lane.rank]
                names = [str(Action(kind, lane.stage, microbatch)) for kind in about]
                action = "" if step == MISSING else str(row[step])
                at_step = len(row) if step == MISSING else step
                text = message.format(*names)
                findings.add(Violation(lane.rank, at_step, action, rule, text))
        if copies:
            _check_copies(table, lane, at, findings)
        if table.sequence_slices > 1:
            _check_slices(table, lane, at, findings)


def _check_copies(table: Table, lane: Lane, at: Positions, findings: ViolationCollector) -> None:
    """Checks C17."""
    kinds = (ActionKind.OFFLOAD, ActionKind.RELOAD, *COMPUTE[:3])
    columns = [at[kind][lane.cells] for kind in kinds]
    for microbatch, steps in zip(lane.microbatches, zip(*columns, strict=True), strict=True):
        away, back, made, full, split = steps
        if away == back == MISSING or MISSING < made < away < back < max(full, split):
            continue
        names = [str(Action(kind, lane.stage, microbatch)) for kind in kinds]
        message = f"the order must be {names[2]}, {names[0]}, {names[1]}, and then the gradient"
        step = away if away != MISSING else back
        action = str(table.rows[lane.rank][step])
        findings.add(
            Violation(lane.rank, step, action, ScheduleRule.COPY, f"is out of place: {message}")
        )


def _check_slices(table: Table, lane: Lane, at: Positions, findings: ViolationCollector) -> None:
    """Checks C16: a slice reads keys and values of earlier slices, and sends them gradients."""
    row, forwards = table.rows[lane.rank], at[ActionKind.FORWARD][lane.cells]
    full, split = at[ActionKind.BACKWARD][lane.cells], at[ActionKind.INPUT_GRADIENT][lane.cells]
    gradients = list(map(max, full, split))  # one of the two is MISSING
    for later in lane.microbatches[1:]:
        # The first slice of a microbatch has no slice before it.
        if later % table.sequence_slices == 0:
            continue
        for first, second, why in (
            (forwards[later - 1], forwards[later], "the previous slice, whose keys it reads"),
            (gradients[later], gradients[later - 1], "the next slice, whose gradients it needs"),
        ):
            if MISSING < second < first:
                message = f"comes before {row[first]}, {why}"
                fault = Violation(
                    lane.rank, second, str(row[second]), ScheduleRule.SLICE_ORDER, message
                )
                findings.add(fault)


def _faults(
    training: bool, forward: int, full: int, inputs: int, weights: int
) -> Iterator[tuple[ScheduleRule, int, str, tuple[ActionKind, ...]]]:
    """Yields the faults in the phases of one stage and microbatch: rule, step, message and kinds.

    The braces in the message are placeholders for the phases of those kinds.
    """
    phase_f, phase_b, phase_i, phase_w = COMPUTE
    if forward == MISSING:
        yield (ScheduleRule.COMPLETE, MISSING, "{} is missing", (phase_f,))
    if not training:
        return
    split = [step for step in (inputs, weights) if step != MISSING]
    if full != MISSING:
        for step in split:
            message = f"is a separate gradient, but {{}} at step {full} computes both"
            yield (ScheduleRule.FULL_OR_SPLIT, step, message, (phase_b,))
    elif not split:
        message = "{} is missing, or {} and {}"
        yield (ScheduleRule.COMPLETE, MISSING, message, (phase_b, phase_i, phase_w))
    elif inputs == MISSING:
        message = f"{{}} is missing, though {{}} is at step {weights}"
        yield (ScheduleRule.COMPLETE, MISSING, message, (phase_i, phase_w))
    elif weights == MISSING:
        message = f"{{}} is missing, though {{}} is at step {inputs}"
        yield (ScheduleRule.COMPLETE, MISSING, message, (phase_w, phase_i))
    for step in (full, inputs):
        if MISSING < step < forward:
            message = f"comes before {{}}, which is at step {forward}"
            yield (ScheduleRule.ROW_ORDER, step, message, (phase_f,))
    if MISSING < weights < inputs:
        message = f"comes before {{}}, which is at step {inputs}"
        yield (ScheduleRule.ROW_ORDER, weights, message, (phase_i,))
