"""Chooses which collectives go ahead and which end late, by predicted time and within memory.

`predict` estimates time and memory of a program in which fences hold some loops to a schedule. The
time of a held loop is that of its body's own schedule, with one collective in flight at a time.
All other ops are timed in the order in which they are written, which is nearer to XLA:GPU's
schedule than any plan. XLA:TPU schedules well, so there every loop counts as held.

`prefetch_groups` finds collectives that gain only together. XLA merges dots that share an operand,
like the query, key and value projections of a layer. The merged dot waits for all of their weights,
so prefetching one of them gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits, schedule
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.transforms.parts.pipeline_collectives.holding import is_worth_holding
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    Move,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.stages import StageChoice


@dataclass(frozen=True)
class Prediction:
    """Time and memory of one run on a device.

    `holds`: fences are worth it in each loop that is to be held.
    """

    ns: float
    peak_bytes: float
    holds: bool


def predict(
    module: ir.Module, hardware: Hardware, held: str | None, *, at_once: int | None = 1
) -> Prediction:
    """Predicts a run.

    `held`: the attribute that marks the held loops, None if all are. `at_once`: the most
    collectives in flight, None for any number.

    Raises ToolError if the program cannot be timed.
    """
    clock = Clock(hardware, ModuleFacts.from_module(module).grid.size)
    traced = traced_task_graph(module, clock, "")
    limits = ScheduleLimits(at_once=at_once, buckets=False)
    holds = True

    def nanoseconds(traced: TracedGraph, *, in_loop: bool, scheduled: bool) -> float:
        """Returns the ns of a graph; each inner loop is one task of its iterations' time."""
        nonlocal holds
        tasks = list(traced.graph.tasks)
        for number, body in traced.bodies.items():
            loop = tasks[number].loop
            assert loop is not None, "a task with a body is a loop"
            is_held = not held or any(held in op.attributes for op in traced.ops[number])
            ns = iterations(loop) * nanoseconds(body, in_loop=True, scheduled=is_held)
            tasks[number] = replace(tasks[number], kind=TaskKind.COMPUTE, loop=None, ns=ns)
        flat = TaskGraph(tasks, traced.graph.storages)
        if not scheduled:
            return simulate(flat).total_ns
        plan = schedule(flat, limits, in_loop=in_loop)
        holds = holds and (not held or is_worth_holding(flat, plan))
        return plan.total_ns

    ns = nanoseconds(traced, in_loop=False, scheduled=held is None)
    return Prediction(ns, memory_profile(traced.graph).peak_bytes, holds)


_DOT = "stablehlo.dot_general"


def prefetch_groups(surveyed: LoopSurvey) -> list[frozenset[int]]:
    """Groups the collectives that can go ahead, by number, in the order of their first readers."""
    groups: list[set[int]] = []
    group_of: dict[ir.Value, set[int]] = {}
    starts: dict[int, int] = {}
    for number, move in enumerate(surveyed.ahead):
        if not move.ops:
            continue
        own = {number}
        users = (
            user
            for result in move.collective.op.results
            for user in surveyed.body.users.get(result, ())
        )
        places = (surveyed.body.position_of[key_of(user)] for user in users)
        starts[number] = min(places, default=len(surveyed.body.ops))
        for shared in _shared_operands(surveyed.body, move.collective.op):
            other = group_of.setdefault(shared, own)
            if other is not own:
                other |= own
                group_of = {v: other if group is own else group for v, group in group_of.items()}
                groups = [group for group in groups if group is not own]
                own = other
        if own not in groups:
            groups.append(own)
    ordered = sorted(groups, key=lambda group: min(starts[number] for number in group))
    return [frozenset(group) for group in ordered]


def _shared_operands(body: LoopBody, op: ir.Operation) -> Iterator[ir.Value]:
    """Yields the other operands of dots that read a collective's result, also reformatted."""
    pending: list[ir.Value] = list(op.results)
    while pending:
        value = pending.pop()
        for user in body.users.get(value, ()):
            if user.name == _DOT:
                yield from (operand for operand in user.operands if operand != value)
            elif user.name in FORMATTING:
                pending += user.results


Judge = Callable[[StageChoice], Prediction | None]

_GAIN = 0.002  # of the program's time: smaller savings are not worth a longer program
_AS_GOOD = 0.01  # of the best choice's savings: choices this close compete by memory
_SLACK = 1.1  # factor on the bytes that a choice may add, for temporaries
_LATE_ITSELF = "reduce_scatter"


@dataclass(frozen=True)
class MotionBudget:
    """The memory that a choice may use.

    `limit` in bytes. Without one, a choice may add the results of the collectives that go ahead,
    for `distance` iterations and the one that runs. `is_held`: fences hold XLA:GPU to the choice.
    """

    limit: float | None
    distance: int
    is_held: bool

    def most_bytes(self, surveyed: LoopSurvey, whole: StageChoice, own: Prediction) -> float:
        """Returns the bytes that the program may need."""
        if self.limit is not None:
            return max(self.limit, own.peak_bytes)
        ahead = sum(surveyed.collectives[number].bytes_out or 0 for number in whole.ahead)
        late = sum(surveyed.collectives[number].bytes_in or 0 for number in whole.late)
        return own.peak_bytes + _SLACK * (self.distance + 1) * (ahead or late)


def possible(surveyed: LoopSurvey) -> StageChoice:
    """Returns the choice of all collectives that may move."""
    return StageChoice(_numbers(surveyed.ahead), _numbers(surveyed.late))


def sensible(surveyed: LoopSurvey, budget: MotionBudget) -> StageChoice:
    """Returns the collectives that `auto` considers.

    XLA:GPU lets reduce_scatters end late by itself, several as one. Other late collectives were
    measured to run between the gathers that fences place.
    """
    whole = possible(surveyed)
    if not budget.is_held:
        return whole
    if whole.ahead:
        return StageChoice(whole.ahead)
    late = (n for n in whole.late if surveyed.collectives[n].kind != _LATE_ITSELF)
    return StageChoice(whole.ahead, frozenset(late))


def best_choice(surveyed: LoopSurvey, judge: Judge, budget: MotionBudget) -> StageChoice:
    """Returns the choice with the shortest predicted time within the budget.

    `judge` predicts the program with a choice; None if the loop cannot have it or no fences hold
    it. With fences, moving only part of the collectives ahead is tried only if moving all does not
    fit: fences work best if a gather has a whole iteration to hide in. Of choices that are about as
    fast, returns the one that needs least memory.
    """
    whole = sensible(surveyed, budget)
    own = judge(StageChoice()) if whole else None
    if own is None:
        return StageChoice()
    limit = budget.most_bytes(surveyed, whole, own)
    fitting: list[tuple[StageChoice, Prediction]] = []
    for choice in _choices(surveyed, whole):
        is_part = 0 < len(choice.ahead) < len(whole.ahead)
        if budget.is_held and fitting and is_part:
            break
        told = judge(choice)
        if told is not None and told.peak_bytes <= limit:
            fitting.append((choice, told))
    most = max((own.ns - told.ns for _, told in fitting), default=0.0)
    if most <= 0 or most < _GAIN * own.ns:
        return StageChoice()
    good = [(s, told) for s, told in fitting if own.ns - told.ns >= (1 - _AS_GOOD) * most]
    return min(good, key=lambda pair: (bool(pair[0].late), pair[1].peak_bytes))[0]


def _choices(surveyed: LoopSurvey, whole: StageChoice) -> Iterator[StageChoice]:
    """Yields all that may move, each kind alone, and the first groups that go ahead."""
    groups = prefetch_groups(surveyed)
    counts = [2**n for n in range(len(groups).bit_length())]
    fewer = [frozenset[int]().union(*groups[:count]) for count in reversed(counts)]
    seen: set[StageChoice] = {StageChoice()}
    for ahead in (whole.ahead, frozenset[int](), *fewer):
        for late in (whole.late, frozenset[int]()):
            choice = StageChoice(ahead, late)
            if choice not in seen:
                seen.add(choice)
                yield choice


def _numbers(moves: Sequence[Move]) -> frozenset[int]:
    return frozenset(number for number, move in enumerate(moves) if move.ops)
