"""Computes the report of a pipeline found in a module, with its times.

A loop over ticks is one program for all ranks; a rank's row of the table gives the number of layers
that it runs in a tick. The cost model times each tick of each rank. Ranks synchronize only by
exchanging values. A rank begins a tick after it has ended the previous one and has received its
neighbours' sends of the previous one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.pipelines.pipeline import Phase, Pipeline, bubble_of, schedule_name
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.frontend_attributes import mean_runs
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.report.pipeline_report import (
    DirectionRow,
    PipelineReport,
    PipelineTimes,
)

Times = NDArray[np.float64]  # [ranks, ticks], ns


def pipeline_times(pipeline: Pipeline, program: TracedGraph) -> PipelineTimes | None:
    """Returns the times of a pipeline of a program; None if the program does not run it."""
    tick = _body_of(pipeline.loop, program)
    if tick is None:
        return None
    layers: list[list[float]] = []
    for phase in pipeline.phases:
        bodies = [_body_of(op, tick) for op in phase.layers]
        layers.append([simulate(body.graph).total_ns for body in bodies if body is not None])
        if len(layers[-1]) != len(bodies):
            return None
    sends = [sum(_ns(op, tick) for op in phase.permutes) for phase in pipeline.phases]
    head, rest = _around(pipeline, tick)
    # The time in which ranks run useful layers and heads, summed over ranks.
    work = head * float(_begins(pipeline).sum())
    for phase, direction, each in zip(
        pipeline.phases, pipeline.schedule.directions, layers, strict=True
    ):
        runs = np.array([[cell is not None for cell in column] for column in direction.cells])
        for own, ns in zip(phase.iterations, each, strict=True):
            work += ns * float(own[runs.T].sum())
    useful = work
    run = rest + head * _begins(pipeline)
    for phase, each in zip(pipeline.phases, layers, strict=True):
        run = run + sum(own * ns for own, ns in zip(phase.iterations, each, strict=True))
    total = _makespan(run, pipeline, sends)
    share = useful / (total * pipeline.schedule.ranks) if total else 1.0
    means = [_mean(phase, each) for phase, each in zip(pipeline.phases, layers, strict=True)]
    return PipelineTimes(total, 1 - share, tuple(means), tuple(sends), head, rest)


def _mean(phase: Phase, layers: Sequence[float]) -> float:
    """Returns the mean time of a layer over stacks, weighted by how often their layers run."""
    runs = [float(each.sum()) for each in phase.iterations]
    return sum(count * ns for count, ns in zip(runs, layers, strict=True)) / sum(runs)


def _body_of(loop: ir.Operation, program: TracedGraph) -> TracedGraph | None:
    """Returns the body of a loop, at any depth of a program; None if it is not there."""
    for task, body in program.bodies.items():
        if loop in program.ops[task]:
            return body
        nested = _body_of(loop, body)
        if nested is not None:
            return nested
    return None


def _ns(op: ir.Operation, tick: TracedGraph) -> float:
    return sum(task.ns for task, ops in zip(tick.graph.tasks, tick.ops, strict=True) if op in ops)


def _around(pipeline: Pipeline, tick: TracedGraph) -> tuple[float, float]:
    """Returns the ns of a tick besides layers and permutes: in branches, and outside of them.

    Branches contain the head, which only some ranks run.
    """
    permutes = [op for phase in pipeline.phases for op in phase.permutes]
    head = rest = 0.0
    for task, ops in zip(tick.graph.tasks, tick.ops, strict=True):
        first = ops[0] if ops else None
        if first is None or first in permutes or _is_layers(first, pipeline):
            continue
        whole = task.loop is not None
        ns = simulate_task(tick, task.id) if whole else task.ns
        share = _share_in_branch(first, pipeline.loop)
        if share is not None:
            head += ns / share
        elif task.kind is not TaskKind.WAIT:
            rest += ns
    return head, rest


def simulate_task(program: TracedGraph, task: int) -> float:
    """Returns the time of a loop other than a layer loop: iterations in sequence."""
    loop = program.graph.tasks[task].loop
    assert loop is not None, "only loops have bodies"
    return (loop.trips or 1) * simulate(loop.body).total_ns


def _is_layers(op: ir.Operation, pipeline: Pipeline) -> bool:
    return any(op in phase.layers for phase in pipeline.phases)


def _share_in_branch(op: ir.Operation, loop: ir.Operation) -> float | None:
    """Returns the mean runs of the branch that an op is in; None if it is in no branch."""
    parent = op.parent
    while parent is not None and parent.operation != loop:
        choice = parent.operation
        if choice.name in ("stablehlo.if", "stablehlo.case") and is_inside(choice, loop):
            return mean_runs(choice) or 1.0
        parent = choice.parent
    return None


def _begins(pipeline: Pipeline) -> Times:
    """Returns 1 for each rank and tick that begins a backward, and so runs the head."""
    schedule = pipeline.schedule
    begins = np.zeros((schedule.ranks, schedule.ticks))
    if len(pipeline.phases) < 2 or schedule.backward is None:
        return begins
    for tick, column in enumerate(schedule.backward.cells):
        for rank, cell in enumerate(column):
            begins[rank, tick] = cell is not None and cell.source < 0
    return begins


def _makespan(run: Times, pipeline: Pipeline, sends: Sequence[float]) -> float:
    """Returns the time when the last rank has ended its last tick and its sends have arrived."""
    ends = run[:, 0].copy()
    for tick in range(1, run.shape[1]):
        ends = _arrived(ends, pipeline, sends) + run[:, tick]
    return float(_arrived(ends, pipeline, sends).max())


def _arrived(ends: Times, pipeline: Pipeline, sends: Sequence[float]) -> Times:
    """Returns the time when each rank has ended a tick and received its neighbours' sends."""
    ready = ends
    for phase, ns in zip(pipeline.phases, sends, strict=True):
        ready = np.maximum(ready, np.roll(ends, -1 if phase.back else 1) + ns)
    return ready


def pipeline_report(
    pipeline: Pipeline, input_name: str, times: PipelineTimes | None = None
) -> PipelineReport:
    """Returns the figures of one pipeline; `input_name` is for ops without a source line."""
    schedule = pipeline.schedule
    bubble = bubble_of(schedule, skips=pipeline.skips)
    directions = tuple(_directions(pipeline))
    return PipelineReport(
        place=to_place(pipeline.loop.location).render(input_name),
        kind=schedule_name(schedule),
        axis=pipeline.axis.name,
        mesh=pipeline.axis.mesh,
        devices=pipeline.devices,
        layers=pipeline.sizes,
        cells=bubble.cells,
        run=bubble.run,
        closed_form=bubble.closed_form,
        formula=bubble.formula,
        skips=pipeline.skips,
        directions=directions,
        permuted_read=_read(pipeline, directions),
        kept_bytes=pipeline.kept,
        weights_bytes=pipeline.weights,
        reductions=len(pipeline.finals),
        reduced_bytes=sum(each.bytes_in or 0 for each in pipeline.finals),
        schedule=schedule,
        times=times,
    )


def _directions(pipeline: Pipeline) -> Iterator[DirectionRow]:
    for phase, direction in zip(pipeline.phases, pipeline.schedule.directions, strict=True):
        yield DirectionRow(
            direction="backward" if phase.back else "forward",
            sent_bytes=phase.sent,
            receive_slots=direction.slots,
            received_bytes=phase.received,
            weights_bytes=sum(phase.held.weights.values()),
            read_bytes=phase.held.read,
            written_bytes=phase.held.written,
        )


def _read(pipeline: Pipeline, rows: Sequence[DirectionRow]) -> float:
    """Returns the share of the sent bytes that a cell reads: one cell for each arrival."""
    schedule = pipeline.schedule
    read = sum(
        row.sent_bytes
        for row, direction in zip(rows, schedule.directions, strict=True)
        for column in direction.cells
        for cell in column
        if cell is not None and cell.source >= 0
    )
    sent = schedule.ranks * schedule.ticks * sum(row.sent_bytes for row in rows)
    return read / sent if sent else 0.0
