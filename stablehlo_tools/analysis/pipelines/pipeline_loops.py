"""Finds pipeline-parallel loops in a module, and reads their schedules from their tables.

A pipeline is a loop over ticks that reads a row of a table of integers in each tick. There are one
or two tables, or two for each stack of layers, and each rank of a mesh axis has its own part. By
the row, a rank chooses between what it received and a value from outside. It runs the layers of a
chunk, and sends their result along the ring of the axis. A loop is reported only if playing the
tables shows that every value reaches the cell that reads it. `bubble_of` counts the idle cells of a
schedule, and `schedule_name` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    classify_communication,
    find_collectives,
)
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import constant_integer, counter_of
from stablehlo_tools.analysis.pipelines.rank_tables import (
    Column,
    RankAxis,
    ReadDirection,
    join_tables,
    read_direction,
    schedule_of,
)
from stablehlo_tools.analysis.pipelines.tick_loops import (
    Classify,
    Entries,
    Holdings,
    RingFlow,
    TickLoop,
    final_reductions,
    flows_behind,
    flows_of,
    holdings,
    kept_bytes,
    layers_of,
    tick_loop,
    value_bytes,
)
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.schedules.lockstep import Lockstep, TickCell

Iterations = NDArray[np.int32]  # [ranks, ticks]: the number of layers that a rank runs in a tick
CUSTOM = "custom"
LEAST_OF_ONE = "(S - 1) / (MV + S - 1)"
LEAST_OF_BOTH = "(VS + S - 2) / (MV + VS + S - 2)"


@dataclass(frozen=True)
class PipelineDirection:
    """One direction of a pipeline in the program.

    `layers` are the loops over a chunk's layers, one for each stack of layers, in forward order.
    `iterations` are the numbers of layers that a rank runs in each tick, also on garbage. Bytes are
    per rank: `sent` in a tick, `received` of all slots.
    """

    back: bool
    layers: tuple[ir.Operation, ...]
    iterations: tuple[Iterations, ...]
    permutes: tuple[ir.Operation, ...]
    sent: int
    received: int
    held: Holdings


@dataclass(frozen=True)
class PipelineInModule:
    """A pipeline that a module contains.

    `schedule` is read from its tables. `devices` is the number of devices that share a rank:
    several if a partitioner divides other axes of the mesh. `sizes` are the layers of each virtual
    stage. `kept` are the bytes that forwards keep for backwards. `finals` are the reductions over
    the ranks at the end.
    """

    loop: ir.Operation
    axis: RankAxis
    devices: int
    schedule: Lockstep
    sizes: tuple[int, ...]
    phases: tuple[PipelineDirection, ...]
    kept: int
    finals: tuple[Collective, ...]

    @property
    def weights(self) -> int:
        """The bytes of the weights that a rank holds."""
        stacks: dict[ir.Value, int] = {}
        for phase in self.phases:
            stacks.update(phase.held.weights)
        return sum(stacks.values())

    @property
    def skips(self) -> bool:
        """True if a rank without work runs no layers."""
        directions = zip(self.phases, self.schedule.directions, strict=True)
        return all(
            not any(each[rank, tick] for each in phase.iterations)
            for phase, direction in directions
            for tick, column in enumerate(direction.cells)
            for rank, cell in enumerate(column)
            if cell is None
        )


class Bubble(NamedTuple):
    """The cells of a schedule, the cells that run, and the smallest possible share of idle ones.

    A cell is a rank's tick, or half of it if a tick has a forward and a backward. A half that all
    ranks leave out does not count. `formula` is in S ranks, V chunks per rank and M microbatches;
    `closed_form` is its value.
    """

    cells: int
    run: int
    formula: str
    closed_form: float

    @property
    def share(self) -> float:
        """The share of the cells that do not run."""
        return 1 - self.run / self.cells


def bubble_of(schedule: Lockstep, *, skips: bool) -> Bubble:
    """Counts the idle cells of a schedule; with `skips`, without the half ticks that no rank runs.

    The closed form for one direction is that of GPipe, (S - 1) / (M + S - 1) with V = 1 (arXiv
    1811.06965, section 2.3). Chunks divide the bubble by V (arXiv 2104.04473, section 2.2). A 1F1B
    that runs a forward or a backward in a tick has the same: 2MV of 2(MV + S - 1) ticks. If M < S,
    chunks cannot be interleaved so closely; if S does not divide M, 1F1B cannot always. If ticks
    run a forward and a backward, the first backward follows VS - 1 ticks of forwards. The backwards
    need MV + S - 1 ticks. If ticks of one kind alone are half as long, there are 2(MV + S - 1)
    halves.
    """
    run = sum(cell is not None for column in _columns(schedule) for cell in column)
    ranks, chunks, microbatches = schedule.ranks, schedule.chunks, schedule.microbatches
    cells, work = ranks * schedule.ticks, microbatches * chunks
    together = is_together(schedule)
    if together and skips:
        halves = (any(cell is not None for cell in column) for column in _columns(schedule))
        cells = ranks * sum(halves)
    if not together or skips:
        idle = ranks - 1
        return Bubble(cells, run, LEAST_OF_ONE, idle / (work + idle))
    idle = chunks * ranks + ranks - 2
    return Bubble(2 * cells, run, LEAST_OF_BOTH, idle / (work + idle))


def _columns(schedule: Lockstep) -> Iterator[Sequence[TickCell | None]]:
    """Yields the cells of each tick, of each direction."""
    for direction in schedule.directions:
        yield from direction.cells


def is_together(schedule: Lockstep) -> bool:
    """Returns True if any rank runs a forward and a backward in one tick."""
    if schedule.forward is None or schedule.backward is None:
        return False
    columns = zip(schedule.forward.cells, schedule.backward.cells, strict=True)
    return any(
        ahead is not None and back is not None
        for column in columns
        for ahead, back in zip(*column, strict=True)
    )


def schedule_name(schedule: Lockstep) -> str:
    """Returns `gpipe`, `circular`, `[interleaved-]1f1b`, `[interleaved-]eager-1f1b` or `custom`.

    One direction is GPipe with one chunk per rank, circular with several. Both in one loop are 1F1B
    if the last rank runs the first backward as soon as it can. Then it must alternate forwards and
    backwards. It is eager if ranks run both in one tick.
    """
    interleaved = schedule.chunks > 1
    if schedule.forward is None or schedule.backward is None:
        return "circular" if interleaved else "gpipe"
    # 1F1B: the last rank runs the backward of its first microbatch at once, and never two forwards
    # in a row after that.
    last = schedule.ranks - 1
    steps: list[tuple[bool, TickCell]] = []
    for ahead, back in zip(schedule.forward.cells, schedule.backward.cells, strict=True):
        cells = ((False, ahead[last]), (True, back[last]))
        steps += [(is_back, cell) for is_back, cell in cells if cell is not None]
    final = schedule.chunks - 1
    first = next(at for at, (_, cell) in enumerate(steps) if cell.chunk == final)
    turns = [is_back for is_back, _ in steps[first:]]
    before, after = steps[first][1], steps[first + 1][1]
    own = (before.chunk, before.microbatch) == (after.chunk, after.microbatch)
    if not own or not all(one or other for one, other in pairwise(turns)):
        return CUSTOM
    name = "eager-1f1b" if is_together(schedule) else "1f1b"
    return f"interleaved-{name}" if interleaved else name


def find_pipelines(module: ir.Module) -> list[PipelineInModule]:
    """Returns the pipelines of a module, in program order."""
    loops = ops_named(module.operation, {WHILE})
    reader = _Reader(module) if loops else None
    found = [reader.pipeline(op) for op in loops] if reader is not None else []
    return [pipeline for pipeline in found if pipeline is not None]


class _Reader:
    def __init__(self, module: ir.Module) -> None:
        self._facts = ModuleFacts.from_module(module, find_collectives(module))
        self._known = DeviceValues(module, self._facts)
        self._classify: Classify = classify_communication(module.context)

    def pipeline(self, op: ir.Operation) -> PipelineInModule | None:
        """Returns a `while` as a pipeline; None for any other."""
        loop = tick_loop(op, self._facts, self._known)
        if loop is None:
            return None
        training = len(loop.tables) > 1  # one table: only forwards; more: also backwards
        ways = join_tables([table.entries for table in loop.tables])
        read = [read_direction(way.entries, training=training) for way in ways or ()]
        directions = [direction for direction in read if direction is not None]
        if ways is None or len(directions) != min(2, len(loop.tables)):
            return None
        schedule = schedule_of(directions, loop.axis.size)
        if schedule is None:
            return None
        entries = Entries(loop)
        phases: list[PipelineDirection] = []
        found = zip(ways, directions, strict=True)
        for way, direction in sorted(found, key=lambda item: item[1].back):
            phase = self._phase(loop, way.tables, direction, entries)
            if phase is None:
                return None
            phases.append(phase)
        kept = 0
        if training:
            pairs = zip(phases[0].layers, phases[1].layers, strict=True)
            kept = sum(kept_bytes(ahead, back) for ahead, back in pairs)
        finals = final_reductions(loop.op, loop.axis, self._facts, self._classify)
        return PipelineInModule(
            loop.op,
            loop.axis,
            self._devices_of_rank(loop),
            schedule,
            directions[0].sizes,
            tuple(phases),
            kept,
            tuple(finals),
        )

    def _phase(
        self, loop: TickLoop, tables: Sequence[int], read: ReadDirection, entries: Entries
    ) -> PipelineDirection | None:
        loops, flows = self._flows(loop, tables, entries, -1 if read.back else 1)
        if not flows or len(loops) != len(tables):
            return None
        iterations: list[Iterations] = []
        for table, op in zip(tables, loops, strict=True):
            each = _iterations(op, loop, table, entries)
            own = loop.tables[table].entries
            runs = own[:, :, Column.RUNS] == 1  # cells, which run all layers of their chunk
            if each is None or not np.array_equal(each[runs], own[:, :, Column.LAYERS][runs]):
                return None
            iterations.append(each)
        permutes = list({flow.permute.results[0]: flow.permute for flow in flows}.values())
        received = {flow.received for flow in flows}
        held = [
            holdings(loop, op, [flow for flow in flows if flow.layers == op], entries)
            for op in loops
        ]
        return PipelineDirection(
            read.back,
            tuple(loops),
            tuple(iterations),
            tuple(permutes),
            sum(value_bytes(permute.results[0]) for permute in permutes),
            sum(value_bytes(loop.body.arguments[carry]) for carry in received),
            Holdings(
                {stack: size for each in held for stack, size in each.weights.items()},
                sum(each.read for each in held),
                sum(each.written for each in held),
            ),
        )

    def _flows(
        self, loop: TickLoop, tables: Sequence[int], entries: Entries, step: int
    ) -> tuple[list[ir.Operation], list[RingFlow]]:
        """Returns the loops over layers of a direction, one for each table, and their flows."""
        if len(tables) == 1:
            flows = flows_of(loop, tables[0], entries, self._facts, self._classify, step)
            return list({flow.layers.results[0]: flow.layers for flow in flows}.values()), flows
        loops = [op for table in tables if (op := layers_of(loop, table, entries)) is not None]
        return loops, flows_behind(loop, loops, self._facts, self._classify, step)

    def _devices_of_rank(self, loop: TickLoop) -> int:
        """Returns the number of devices that share the values of one rank."""
        manual = 1
        axes = dict(self._facts.meshes[loop.axis.mesh].axes)
        op = loop.op.parent
        while op is not None:
            if op.operation.name == MANUAL_COMPUTATION:
                for name in manual_axes(op.operation):
                    manual *= axes.pop(name, 1)
            op = op.operation.parent
        return loop.axis.devices // max(manual, loop.axis.size)


def _iterations(
    layers: ir.Operation, loop: TickLoop, table: int, entries: Entries
) -> Iterations | None:
    """Returns the number of layers that each rank runs in each tick.

    It is a constant, or an entry of its table; None for any other count.
    """
    counter = counter_of(layers)
    if isinstance(counter, str) or counter.step != 1 or counter.direction != "LT":
        return None
    if constant_integer(layers.operands[counter.position]) != 0:
        return None
    own = loop.tables[table].entries[:, :, Column.LAYERS]
    limit = constant_integer(counter.bound)
    if limit is not None:
        return np.full_like(own, limit)
    return (
        own if entries.find_entries(counter.bound) == frozenset({(table, Column.LAYERS)}) else None
    )
