"""Offloads activations to the host between forward and gradient: selects them and times the copies.

Follows PipeOffload (Wan et al., arXiv 2503.01328). A rank makes one copy at a time, overlapped with
its compute. The stages with the longest-lived activations come first, because those make up the
peak. An activation that is live too briefly for both copies stays on the device.

Offloading never lengthens the schedule. Forwards are delayed only as far as no gradient waits,
which is how a full pipeline runs anyway. Copies fill slots, alternately out and back, as early and
as late as possible. An activation without a free slot stays. If a rank's copies take longer than
its compute, they are rejected, with the share that would fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Step,
    Table,
    actions_of,
    drop_idle_cells,
    parts,
    with_rows,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

_ROUNDING = 1e-9
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


class OffloadedSchedule(NamedTuple):
    """A table with its copies, and the costs with the bytes and times of the copies."""

    table: Table
    costs: Costs


def offload_activations(table: Table, costs: Costs, share: float, copy: float) -> OffloadedSchedule:
    """Offloads up to `share` of each rank's activations to the host without a longer makespan.

    `costs` are those of the table's phases. `copy` is the time of one copy, out or back, of all
    activations of a rank for one microbatch. A valid table that has copies keeps them; `share` is
    then the share of each activation that they move. Raises ToolError if `share` is not in [0, 1],
    the table names transfers or has no backward, or the copies take longer than the compute.
    """
    if not 0 <= share <= 1:
        raise ToolError(f"offload: {share:g} of the activations; give a share from 0 to 1")
    if table.offloads:
        return OffloadedSchedule(table, _moving(table, costs, [share] * table.stages, copy))
    if table.communicates:
        raise ToolError(f"{table.name}: offloading needs a schedule without sends and receives")
    if not table.training:
        raise ToolError(
            f"{table.name}: offloading needs a training schedule, but this one has no backward"
        )
    latest = _Latest(simulate(drop_idle_cells(table), costs))
    moving = _moving(table, costs, _shares(latest, costs, share), copy)
    # The copies of a rank must not last longer than all of its compute.
    for rank, row in enumerate(latest.table.rows):
        copied = computed = 0.0
        for action in actions_of(row):
            times = {
                ActionKind.FORWARD: moving.forward,
                ActionKind.BACKWARD: moving.backward,
                ActionKind.INPUT_GRADIENT: moving.input_gradient,
                ActionKind.WEIGHT_GRADIENT: moving.weight_gradient,
            }
            computed += times[action.kind][action.stage]
            copied += 2 * moving.copy[action.stage] * (action.kind is ActionKind.FORWARD)
        if copied > computed * (1 + _ROUNDING):
            raise ToolError(
                f"offload: the copies of rank {rank} take {copied:g} in both directions, longer "
                f"than its compute of {computed:g}: offload a share of at most "
                f"{share * computed / copied:.3g}"
            )
    rows = [_row(latest, moving, rank) for rank in range(table.ranks)]
    return OffloadedSchedule(with_rows(latest.table, rows), moving)


def _moving(table: Table, costs: Costs, shares: list[float], copy: float) -> Costs:
    """Returns the costs with `shares` of the activations offloaded, in times by their bytes."""
    moved = tuple(x * size for x, size in zip(shares, costs.activation, strict=True))
    whole = sum(costs.activation) * table.sequence_slices / table.ranks
    each = copy / whole if whole else 0.0
    return replace(costs, offloaded=moved, copy=tuple(size * each for size in moved))


class _Latest:
    """A table without idle cells, and its steps, forwards as late as they can be for the others.

    Goes through the rows from their ends, each as far as what reads its forwards is placed.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.table = timeline.table
        self.starts = [[*row] for row in timeline.starts]
        self.ends = [[*row] for row in timeline.ends]
        self._hop = timeline.costs.communication
        self._due: dict[tuple[int, int], float] = {}  # the latest end of a stage's forward
        left = [len(row) for row in self.table.rows]
        while any(left):
            for rank in range(self.table.ranks):
                while left[rank] and self._place(rank, left[rank] - 1):
                    left[rank] -= 1

    def _place(self, rank: int, at: int) -> bool:
        """Delays a step as far as possible; returns False if its limit is not yet known."""
        step = self.table.rows[rank][at]
        assert step is not None, "idle cells are left out"
        if isinstance(step, Action) and step.kind is ActionKind.FORWARD:
            if step.stage < self.table.stages - 1 and step[1:] not in self._due:
                return False
            following = self.starts[rank][at + 1]  # there is one: its gradient at least
            end = min(following, self._due.get(step[1:], following))
            self.starts[rank][at] += end - self.ends[rank][at]
            self.ends[rank][at] = end
        for kind, stage, microbatch in parts(step):
            if kind is ActionKind.FORWARD and stage:
                hop = self._hop * self.table.placement.crosses(stage - 1, microbatch)
                self._due[stage - 1, microbatch] = self.starts[rank][at] - hop
        return True


class _Life(NamedTuple):
    """An activation on a rank: from the end of its forward to the start of its gradient."""

    stage: int
    microbatch: int
    begin: float
    end: float


def _lives(latest: _Latest, rank: int) -> list[_Life]:
    """The activations of a rank in the order of their forwards."""
    steps = zip(latest.table.rows[rank], latest.starts[rank], latest.ends[rank], strict=True)
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for step, start, end in steps:
        for kind, stage, microbatch in parts(step) if step is not None else ():
            if kind is ActionKind.FORWARD:
                begins[stage, microbatch] = end
            elif kind in _GRADIENTS:
                ends[stage, microbatch] = start
    return [_Life(*key, begin, ends[key]) for key, begin in begins.items()]


def _shares(latest: _Latest, costs: Costs, share: float) -> list[float]:
    """Returns the share of each stage's activations to offload: `share` of the rank's bytes in all.

    Whole stages come first, the longest-lived before others, then a part of the next stage.
    """
    table = latest.table
    lives: defaultdict[int, list[float]] = defaultdict(list)
    for rank in range(table.ranks):
        for life in _lives(latest, rank):
            lives[life.stage].append(life.end - life.begin)
    mean = {stage: sum(each) / len(each) for stage, each in lives.items()}
    shares = [0.0] * table.stages
    for held in table.placement.held:
        whole = sum(costs.activation[stage] for stage in held)
        left = share * whole
        for stage in sorted(held, key=lambda stage: -mean[stage]):
            size = costs.activation[stage]
            shares[stage] = min(1.0, left / size) if left > _ROUNDING * whole and size else 0.0
            left -= shares[stage] * size
    return shares


def _row(latest: _Latest, costs: Costs, rank: int) -> list[Step | None]:
    """Returns the row of a rank with its copies.

    An OFFLOAD precedes the first step that starts after its copy is done. A RELOAD precedes the
    step that runs when its copy starts. Copies before the same step are in the order of their
    times.
    """
    row, starts, ends = latest.table.rows[rank], latest.starts[rank], latest.ends[rank]
    before: defaultdict[int, list[tuple[float, Action]]] = defaultdict(list)
    for life, out, due in _slots(_lives(latest, rank), costs):
        freed = bisect_left(starts, out - _ROUNDING)
        taken = bisect_right(ends, due + _ROUNDING)
        if freed < taken:  # else no step could use the freed memory
            before[freed].append((out, Action(ActionKind.OFFLOAD, life.stage, life.microbatch)))
            before[taken].append((due, Action(ActionKind.RELOAD, life.stage, life.microbatch)))
    placed: list[Step | None] = []
    for at, step in enumerate(row):
        ends_of_copies = sorted(before[at], key=lambda each: each[0])
        placed += [*(action for _, action in ends_of_copies), step]
    return placed


def _slots(lives: list[_Life], costs: Costs) -> Iterator[tuple[_Life, float, float]]:
    """Yields each offloaded activation, the end of its copy out and the start of its copy back.

    The rank's time is divided into slots as long as its longest copy, alternately out and back.
    """
    going = [life for life in lives if costs.offloaded[life.stage]]
    length = max((costs.copy[life.stage] for life in going), default=0.0)
    if not length:
        yield from ((life, life.begin, life.end) for life in going if life.begin < life.end)
        return
    period, origin = 2 * length, going[0].begin
    # A shorter life has no room for a slot out and a slot back.
    fitting = [life for life in going if life.end - life.begin > period * (1 - _ROUNDING)]
    backs: dict[_Life, int] = {}
    slot: float = float("inf")
    # Copies back take the latest slots, the last gradient first.
    for life in sorted(fitting, key=lambda life: -life.end):
        slot = min(slot - 1, floor((life.end - origin) / period + _ROUNDING) - 1)
        backs[life] = int(slot)
    taken = -1
    for life in fitting:
        # Copies out take the earliest slots, the first forward first.
        slot = max(taken + 1, ceil((life.begin - origin) / period - _ROUNDING))
        if slot <= backs[life]:
            taken = slot
            yield life, origin + slot * period + length, origin + backs[life] * period + length
