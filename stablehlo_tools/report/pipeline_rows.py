"""Computes the report of a pipeline found in a module, with its times.

A loop over ticks is one program for all ranks; a rank's row of the table gives the number of layers
that it runs in a tick. The cost model times each tick of each rank. Ranks synchronize only by
exchanging values. A rank begins a tick after it has ended the previous one and has received its
neighbours' sends of the previous one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.pipelines.pipeline_loops import (
    PipelineInModule,
    bubble_of,
    schedule_name,
)
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.frontend_attributes import mean_runs
from stablehlo_tools.ir.walk import is_inside
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.report.pipeline_report import DirectionRow, PipelineReport, PipelineTimes

Times = NDArray[np.float64]  # [ranks, ticks], ns


def pipeline_times(pipeline: PipelineInModule, program: TracedGraph) -> PipelineTimes | None:
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
    tasks = list(zip(tick.graph.tasks, tick.ops, strict=True))
    sends = [
        sum(sum(task.ns for task, ops in tasks if op in ops) for op in phase.permutes)
        for phase in pipeline.phases
    ]
    head, rest = _around(pipeline, tick)
    begins = _begins(pipeline)
    # The time in which ranks run useful layers and heads, summed over ranks.
    useful = head * float(begins.sum())
    run = rest + head * begins
    means: list[float] = []
    directions = pipeline.schedule.directions
    for phase, direction, each in zip(pipeline.phases, directions, layers, strict=True):
        runs = np.array([[cell is not None for cell in column] for column in direction.cells])
        stacks = list(zip(phase.iterations, each, strict=True))
        for own, ns in stacks:
            useful += ns * float(own[runs.T].sum())
        run = run + sum(own * ns for own, ns in stacks)
        # The mean time of a layer over stacks, weighted by how often their layers run.
        counts = [float(own.sum()) for own in phase.iterations]
        spent = sum(count * ns for count, ns in zip(counts, each, strict=True))
        means.append(spent / sum(counts))
    # The total is the time when the last rank has ended its last tick and its sends have arrived.
    ready = np.zeros(run.shape[0])
    for durations in run.T:
        ready = ends = ready + durations
        for phase, delay in zip(pipeline.phases, sends, strict=True):
            ready = np.maximum(ready, np.roll(ends, -1 if phase.back else 1) + delay)
    total = float(ready.max())
    share = useful / (total * pipeline.schedule.ranks) if total else 1.0
    return PipelineTimes(total, 1 - share, tuple(means), tuple(sends), head, rest)


def _body_of(loop: ir.Operation, program: TracedGraph) -> TracedGraph | None:
    """Returns the body of a loop, at any depth of a program; None if it is not there."""
    for task, body in program.bodies.items():
        if loop in program.ops[task]:
            return body
        nested = _body_of(loop, body)
        if nested is not None:
            return nested
    return None


def _around(pipeline: PipelineInModule, tick: TracedGraph) -> tuple[float, float]:
    """Returns the ns of a tick besides layers and permutes: in branches, and outside of them.

    Branches contain the head, which only some ranks run.
    """
    counted = [op for phase in pipeline.phases for op in (*phase.permutes, *phase.layers)]
    head = rest = 0.0
    for task, ops in zip(tick.graph.tasks, tick.ops, strict=True):
        first = ops[0] if ops else None
        if first is None or first in counted:
            continue
        ns = task.ns
        if task.loop is not None:  # not a layer loop: its iterations run in sequence
            ns = (task.loop.trips or 1) * simulate(task.loop.body).total_ns
        share = _share_in_branch(first, pipeline.loop)
        if share is not None:
            head += ns / share
        elif task.kind is not TaskKind.WAIT:
            rest += ns
    return head, rest


def _share_in_branch(op: ir.Operation, loop: ir.Operation) -> float | None:
    """Returns the mean runs of the branch that an op is in; None if it is in no branch."""
    parent = op.parent
    while parent is not None and parent.operation != loop:
        choice = parent.operation
        if choice.name in ("stablehlo.if", "stablehlo.case") and is_inside(choice, loop):
            return mean_runs(choice) or 1.0
        parent = choice.parent
    return None


def _begins(pipeline: PipelineInModule) -> Times:
    """Returns 1 for each rank and tick that begins a backward, and so runs the head."""
    schedule = pipeline.schedule
    begins = np.zeros((schedule.ranks, schedule.ticks))
    if len(pipeline.phases) < 2 or schedule.backward is None:
        return begins
    for tick, column in enumerate(schedule.backward.cells):
        for rank, cell in enumerate(column):
            begins[rank, tick] = cell is not None and cell.source < 0
    return begins


def pipeline_report(
    pipeline: PipelineInModule, input_name: str, times: PipelineTimes | None = None
) -> PipelineReport:
    """Returns the figures of one pipeline; `input_name` is for ops without a source line."""
    schedule = pipeline.schedule
    bubble = bubble_of(schedule, skips=pipeline.skips)
    directions = tuple(
        DirectionRow(
            direction="backward" if phase.back else "forward",
            sent_bytes=phase.sent,
            receive_slots=direction.slots,
            received_bytes=phase.received,
            weights_bytes=sum(phase.held.weights.values()),
            read_bytes=phase.held.read,
            written_bytes=phase.held.written,
        )
        for phase, direction in zip(pipeline.phases, schedule.directions, strict=True)
    )
    # The share of the sent bytes that a cell reads: one cell for each arrival.
    read = sum(
        row.sent_bytes
        for row, direction in zip(directions, schedule.directions, strict=True)
        for column in direction.cells
        for cell in column
        if cell is not None and cell.source >= 0
    )
    sent = schedule.ranks * schedule.ticks * sum(row.sent_bytes for row in directions)
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
        permuted_read=read / sent if sent else 0.0,
        kept_bytes=pipeline.kept,
        weights_bytes=pipeline.weights,
        reductions=len(pipeline.finals),
        reduced_bytes=sum(each.bytes_in or 0 for each in pipeline.finals),
        schedule=schedule,
        times=times,
    )
