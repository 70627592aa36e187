"""The oracle of the schedule search: the optimum of a small setting, by OR-Tools CP-SAT.

The solver searches all orders of forwards and of full or split gradients, on loop and V placements
with the chunks per rank of the setting, or with one and two if it leaves them open. It does not
search two pipelines in opposite directions, nor overlapped pairs. If a pair costs the sum of its
two parts, this loses nothing.

The model of one placement: every phase is an interval of time. Intervals of one rank do not
overlap, and those of one microbatch follow each other with the hops between them. A gradient is
either an interval I and a later interval W, or, if B is shorter than I + W, one interval B. A rank
holds an activation from the start of F to the end of the gradient, and the kept part of it until
the end of W.

Microbatches are interchangeable, so every stage runs them in order. Proof: call the n-th forward of
each stage in time microbatch n, and the same for the n-th gradient and the n-th W. Each forward of
stage s + 1 starts a hop after one of stage s, so the n-th starts a hop after the n-th. The same
holds for every other dependence. The bytes held at any time stay the same.

Whole numbers: times are rounded down to the unit, so the least makespan of the model is a true
bound. Bytes and the room for them are rounded down too, so every order that fits is in the model.
An order that the solver finds may exceed the room by rounding, so `solve_setting` checks it.

If a phase has no time, its place among phases at the same moment is open, and memory depends on it.
Each phase then takes one more tick. The ticks of all phases together are less than one unit.

The unit divides every figure if these are fractions of few digits, and nothing is lost. Otherwise
it is a small part of the largest figure, and figures are rounded down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ortools.sat.python import cp_model

from stablehlo_tools.schedules.search.auto import find_best, lower_bound
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Row,
    Table,
    actions_of,
    backward,
    forward,
    input_gradient,
    loop,
    table_of,
    v_shape,
    weight_gradient,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

_CHUNKS = (1, 2)  # per rank, if the setting leaves them open
_EQUAL = 1e-9  # relative difference of makespans that count as equal
_DENOMINATOR = 10_000  # the largest denominator of a fraction of few digits
_MOST = 2**20  # units in the largest figure, at most
_SAME_FRACTION = 1e-12  # relative difference of two floats for the same fraction
_ROUNDED = 5e-10  # of the limit: half of the excess that `ScheduleSetting.fits` allows for rounding
_ROUNDED_SUM = 1e-12  # of a makespan: the rounding of sums of times
_SEED = 1


class Optimum(NamedTuple):
    """A schedule with its times, whether it is the fastest, and a lower bound of the makespan.

    `proven` and `bound` hold for the placements that the solver searches. If times are not
    multiples of one unit, the bound of a proven schedule may be below its makespan by a millionth
    of the longest phase for every action.
    """

    timeline: Timeline
    proven: bool
    bound: float

    @property
    def table(self) -> Table:
        """The schedule."""
        return self.timeline.table


def solve_setting(setting: ScheduleSetting, seconds: float) -> Optimum:
    """Returns the fastest schedule within the limit, or the best one after so many seconds.

    The solver begins with the schedule of `find_best`, so the result is never slower. A proven
    result is the same each time. Raises ToolError, as `find_best` does, if no schedule fits.
    """
    best = find_best(setting).timeline
    left, proven = seconds, True
    bounds: list[float] = []
    placements = list(_placements(setting))
    for count, placement in enumerate(placements):
        costs = setting.costs(placement.stages)
        room = setting.room(placement)
        bounds.append(lower_bound(placement, setting.microbatches, costs, room))
        if not bounds[-1] < best.makespan * (1 - _EQUAL):
            continue
        begin = time.monotonic()
        model = ScheduleModel(placement, setting.microbatches, costs, setting.limit, best.makespan)
        pairs = any(isinstance(step, ActionPair) for row in best.table.rows for step in row)
        if best.table.placement == placement and not pairs:
            model.hint(best.table)
        answer = model.solve(max(left, 0.0) / (len(placements) - count))
        left -= time.monotonic() - begin
        bounds[-1] = max(bounds[-1], answer.bound)
        proven = proven and answer.proven
        if answer.rows is None:
            continue
        table = table_of("optimum", placement, setting.microbatches, answer.rows)
        optimum = simulate(table, costs)
        if not setting.fits(max(optimum.peak_bytes)):
            proven = False
        elif optimum.makespan < best.makespan * (1 - _EQUAL):
            best = optimum
    return Optimum(best, proven, min([best.makespan, *bounds]))


def _placements(setting: ScheduleSetting) -> Iterator[Placement]:
    """The placements that the solver searches."""
    for chunks in _CHUNKS if setting.chunks is None else (setting.chunks,):
        if not setting.can_be_cut(chunks):
            continue
        yield loop(setting.ranks, chunks)
        if chunks > 1 and setting.ranks > 1:
            yield v_shape(setting.ranks, chunks)


@dataclass(frozen=True)
class Unit:
    """The size of one unit, and whether every figure is a whole number of units."""

    size: float
    divides: bool

    def whole(self, figure: float) -> int:
        """The figure in units, rounded down unless the unit divides it."""
        return round(figure / self.size) if self.divides else math.floor(figure / self.size)


def unit_of(figures: Iterable[float]) -> Unit:
    """Returns the unit for figures that are not negative."""
    positive = {figure for figure in figures if figure > 0}
    if not positive:
        return Unit(1.0, True)
    largest = max(positive)
    fractions = {figure: Fraction(figure).limit_denominator(_DENOMINATOR) for figure in positive}
    common = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    shared = math.gcd(*(int(fraction * common) for fraction in fractions.values()))
    size = Fraction(shared, common)
    close = all(abs(float(fraction) - x) <= _SAME_FRACTION * x for x, fraction in fractions.items())
    if shared and close and largest / float(size) <= _MOST:
        return Unit(float(size), True)
    return Unit(largest / _MOST, False)


class Answer(NamedTuple):
    """Rows within the makespan asked for, if the solver found any, and a lower bound.

    `proven`: except for rounding, no schedule on the placement is faster than the rows, or than the
    makespan asked for if there are no rows.
    """

    rows: list[list[Action]] | None
    bound: float
    proven: bool


class _Visit(NamedTuple):
    """A stage's phases for one microbatch; `full`, if B is a choice, is true if B runs."""

    start: cp_model.IntVar
    gradient: cp_model.IntVar
    returned: cp_model.LinearExprT  # the end of the gradient
    weights: cp_model.IntVar
    done: cp_model.LinearExprT  # the end of W
    full: cp_model.IntVar | None


class ScheduleModel:
    """The schedules of a placement that end by `makespan`, within the limit of bytes per rank."""

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        limit: float | None,
        makespan: float,
    ) -> None:
        """`makespan`: that of some schedule, in the unit of the costs."""
        self._placement = placement
        self._microbatches = microbatches
        self._costs = costs
        self._limit = limit
        self._most = makespan
        phases = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward)
        times = [time for phase in phases for time in phase]
        self._unit = unit_of([*times, costs.communication])
        phases_in_all = 3 * placement.stages * microbatches
        instant = any(self._unit.whole(time) == 0 for time in times)
        # Ticks per unit, and the most that they add to a makespan.
        self._ticks, self._added = (phases_in_all + 1, phases_in_all) if instant else (1, 0)
        self._whole = _whole(costs, self._unit, self._ticks, int(instant))
        units = math.floor(makespan / self._unit.size * (1 + _ROUNDED_SUM))
        self._horizon = units * self._ticks + self._added
        self._model = cp_model.CpModel()
        self._visits = [
            [self._visit(stage, microbatch) for microbatch in range(microbatches)]
            for stage in range(placement.stages)
        ]
        self._follow()
        for stage in range(placement.stages):
            self._in_order(stage)
        for rank, stages in enumerate(placement.held):
            self._compute(stages)
            self._hold(rank, stages)
        self._makespan = self._end()
        self._model.minimize(self._makespan)

    def hint(self, table: Table) -> None:
        """Starts the solver from a valid table of the same placement, without pairs."""
        rows = [list(self._phases_of(row)) for row in table.rows]
        split = table_of(table.name, table.placement, table.microbatches, rows)
        times = simulate(split, self._whole)
        starts = {
            action: int(start)
            for row, of_row in zip(rows, times.starts, strict=True)
            for action, start in zip(row, of_row, strict=True)
        }
        for stage, visits in enumerate(self._visits):
            for microbatch, visit in enumerate(visits):
                self._hint_visit(starts, stage, microbatch, visit)
        self._model.add_hint(self._makespan, int(times.makespan))

    def solve(self, seconds: float) -> Answer:
        """Returns the fastest rows that the solver finds in so many seconds."""
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = _SEED
        parameters.max_time_in_seconds = seconds
        # Linear relaxations cost most of the time and do not model that a rank runs one phase at a
        # time. Precedences do: tight limits are proven three times as fast, some only this way.
        parameters.linearization_level = 0
        parameters.use_precedences_in_disjunctive_constraint = True
        parameters.use_strong_propagation_in_disjunctive = True
        parameters.use_disjunctive_constraint_in_cumulative = True
        status = solver.solve(self._model)
        if status == cp_model.INFEASIBLE:
            return Answer(None, self._most, True)
        bound = self._bound(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, bound, False)
        return Answer(self._rows(solver), bound, status == cp_model.OPTIMAL)

    def _bound(self, ticks: float) -> float:
        """Returns the lower bound in the unit of the costs, from one in ticks."""
        units = max(0.0, ticks - self._added) / self._ticks
        return self._unit.size * (math.ceil(units) if self._unit.divides else units)

    def _visit(self, stage: int, microbatch: int) -> _Visit:
        model, whole, name = self._model, self._whole, f"{stage} {microbatch}"
        gradient = model.new_int_var(0, self._horizon, f"gradient {name}")
        weights = model.new_int_var(0, self._horizon, f"weights {name}")
        split, rest = int(whole.input_gradient[stage]), int(whole.weight_gradient[stage])
        full = None
        returned, done = gradient + split, weights + rest
        if self._may_be_full(stage):
            full = model.new_bool_var(f"full {name}")
            returned = model.new_int_var(0, self._horizon, f"returned {name}")
            done = model.new_int_var(0, self._horizon, f"done {name}")
            longer = int(whole.backward[stage]) - split
            model.add(returned == gradient + split + longer * full)
            model.add(done == weights + rest - rest * full)
            model.add(weights == returned).only_enforce_if(full)
        start = model.new_int_var(0, self._horizon, f"forward {name}")
        return _Visit(start, gradient, returned, weights, done, full)

    def _may_be_full(self, stage: int) -> bool:
        """Returns True if B takes less time than I + W, which otherwise replace it."""
        costs = self._costs
        return costs.backward[stage] < costs.input_gradient[stage] + costs.weight_gradient[stage]

    def _follow(self) -> None:
        """Adds the dependences of each microbatch's phases."""
        model, whole = self._model, self._whole
        hop = int(whole.communication)
        for stage, visits in enumerate(self._visits):
            for microbatch, visit in enumerate(visits):
                made = visit.start + int(whole.forward[stage])
                model.add(visit.gradient >= made)
                model.add(visit.weights >= visit.returned)
                if stage + 1 == self._placement.stages:
                    continue
                following = self._visits[stage + 1][microbatch]
                away = hop * self._placement.crosses(stage, microbatch)
                model.add(following.start >= made + away)
                model.add(visit.gradient >= following.returned + away)

    def _in_order(self, stage: int) -> None:
        """Runs every phase's microbatches in order."""
        model, visits = self._model, self._visits[stage]
        for one, other in pairwise(visits):
            model.add(other.start >= one.start + int(self._whole.forward[stage]))
            model.add(other.gradient >= one.returned)
        if visits[0].full is None:
            for one, other in pairwise(visits):
                model.add(other.weights >= one.done)
            return
        for at, other in enumerate(visits):
            for one in visits[:at]:
                split = [visit.full.negated() for visit in (one, other) if visit.full is not None]
                model.add(other.weights >= one.done).only_enforce_if(*split)

    def _compute(self, stages: tuple[int, ...]) -> None:
        """Runs one phase at a time on a rank."""
        model, whole = self._model, self._whole
        intervals: list[cp_model.IntervalVar] = []
        for stage in stages:
            time = int(whole.forward[stage])
            for visit in self._visits[stage]:
                intervals.append(model.new_fixed_size_interval_var(visit.start, time, "forward"))
                intervals += self._gradients(stage, visit)
        model.add_no_overlap(intervals)

    def _gradients(self, stage: int, visit: _Visit) -> Iterator[cp_model.IntervalVar]:
        model, whole = self._model, self._whole
        split, rest = int(whole.input_gradient[stage]), int(whole.weight_gradient[stage])
        if visit.full is None:
            yield model.new_fixed_size_interval_var(visit.gradient, split, "gradient")
            yield model.new_fixed_size_interval_var(visit.weights, rest, "weights")
            return
        yield self._between(visit.gradient, visit.returned, "gradient")
        yield model.new_optional_fixed_size_interval_var(
            visit.weights, rest, visit.full.negated(), "weights"
        )

    def _hold(self, rank: int, stages: tuple[int, ...]) -> None:
        """Limits the bytes that a rank holds."""
        if self._limit is None:
            return
        model, costs = self._model, self._costs
        room = self._limit * (1 + _ROUNDED) - sum(costs.weights[stage] for stage in stages)
        figures = [figure[stage] for stage in stages for figure in (costs.activation, costs.kept)]
        unit = unit_of(figures)
        capacity = math.floor(room / unit.size)
        most = sum(max(costs.activation[stage], costs.kept[stage]) for stage in stages)
        if unit.whole(most) * self._microbatches <= capacity:
            return
        intervals: list[cp_model.IntervalVar] = []
        bytes_held: list[int] = []
        for stage in stages:
            held, kept = unit.whole(costs.activation[stage]), unit.whole(costs.kept[stage])
            for visit in self._visits[stage]:
                intervals.append(self._between(visit.start, visit.returned, "held"))
                intervals.append(self._between(visit.returned, visit.done, "kept"))
                bytes_held += [held, kept]
        model.add_cumulative(intervals, bytes_held, max(0, capacity))

    def _between(
        self, start: cp_model.LinearExprT, end: cp_model.LinearExprT, name: str
    ) -> cp_model.IntervalVar:
        size = self._model.new_int_var(0, self._horizon, f"size of {name}")
        return self._model.new_interval_var(start, size, end, name)

    def _end(self) -> cp_model.IntVar:
        makespan = self._model.new_int_var(0, self._horizon, "makespan")
        for visits in self._visits:
            for visit in visits:
                self._model.add(makespan >= visit.done)
        return makespan

    def _phases_of(self, row: Row) -> Iterator[Action]:
        """The phases of a row; B becomes I and W if the model has only those."""
        for action in actions_of(row):
            kind, stage, microbatch = action
            if kind is ActionKind.BACKWARD and not self._may_be_full(stage):
                yield input_gradient(stage, microbatch)
                yield weight_gradient(stage, microbatch)
            else:
                yield action

    def _hint_visit(
        self, starts: dict[Action, int], stage: int, microbatch: int, visit: _Visit
    ) -> None:
        full = starts.get(backward(stage, microbatch))
        gradient = starts[input_gradient(stage, microbatch)] if full is None else full
        if full is None:
            weights = starts[weight_gradient(stage, microbatch)]
        else:
            weights = full + int(self._whole.backward[stage])
        self._model.add_hint(visit.start, starts[forward(stage, microbatch)])
        self._model.add_hint(visit.gradient, gradient)
        self._model.add_hint(visit.weights, weights)
        if visit.full is not None:
            self._model.add_hint(visit.full, full is not None)

    def _rows(self, solver: cp_model.CpSolver) -> list[list[Action]]:
        """Returns the phases of every rank in the order of their times."""
        starts: dict[Action, int] = {}
        for stage, visits in enumerate(self._visits):
            for microbatch, visit in enumerate(visits):
                starts[forward(stage, microbatch)] = solver.value(visit.start)
                gradient = solver.value(visit.gradient)
                if visit.full is not None and solver.boolean_value(visit.full):
                    starts[backward(stage, microbatch)] = gradient
                    continue
                starts[input_gradient(stage, microbatch)] = gradient
                starts[weight_gradient(stage, microbatch)] = solver.value(visit.weights)
        rows: list[list[Action]] = [[] for _ in range(self._placement.ranks)]
        for action in sorted(starts, key=starts.__getitem__):
            rows[self._placement.rank_of(action.stage, action.microbatch)].append(action)
        return rows


def _whole(costs: Costs, unit: Unit, ticks: int, more: int) -> Costs:
    """Returns the times in ticks, those of phases with so many more."""

    def whole(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(unit.whole(time) * ticks + more for time in times)

    communication = unit.whole(costs.communication) * ticks
    return replace(costs.with_phases(whole), communication=communication)
