"""Finds the pipelines of a module, whoever wrote them, and reads what they do from their tables.

A pipeline is a loop over ticks that takes a row of a table of integers a tick, one table or two,
and two for each stack of layers, of which each rank of a mesh axis has its own; by it, it chooses
between what it received and what comes from outside, runs the layers of a chunk, and sends what
they leave along the ring of the axis. What is read is claimed only where playing the tables shows
that every value reaches the cell that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import (
    ModuleFacts,
    classify_communication,
    find_collectives,
)
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import constant_integer, counter_of
from stablehlo_tools.analysis.pipelines.lockstep_match import (
    ReadDirection,
    joined,
    read_direction,
    schedule_of,
)
from stablehlo_tools.analysis.pipelines.pipeline import Iterations, Phase, Pipeline
from stablehlo_tools.analysis.pipelines.rank_tables import Column
from stablehlo_tools.analysis.pipelines.tick_loops import (
    Classify,
    Entries,
    Flow,
    Holdings,
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


def find_pipelines(module: ir.Module) -> list[Pipeline]:
    """The pipelines of a module, in program order."""
    loops = ops_named(module.operation, {WHILE})
    return list(_Reader(module).pipelines(loops)) if loops else []


class _Reader:
    def __init__(self, module: ir.Module) -> None:
        self._facts = ModuleFacts.of(module, find_collectives(module))
        self._known = DeviceValues(module, self._facts)
        self._classify: Classify = classify_communication(module.context)

    def pipelines(self, loops: list[ir.Operation]) -> Iterator[Pipeline]:
        """Those of the loops, any `while`s, that are pipelines, in their order."""
        for op in loops:
            loop = tick_loop(op, self._facts, self._known)
            pipeline = None if loop is None else self._pipeline(loop)
            if pipeline is not None:
                yield pipeline

    def _pipeline(self, loop: TickLoop) -> Pipeline | None:
        training = len(loop.tables) > 1  # one table: forwards alone; more: and backwards
        ways = joined([table.entries for table in loop.tables])
        read = [read_direction(way.entries, training=training) for way in ways or ()]
        directions = [direction for direction in read if direction is not None]
        if ways is None or len(directions) != min(2, len(loop.tables)):
            return None
        schedule = schedule_of(directions, loop.axis.size)
        if schedule is None:
            return None
        entries = Entries(loop)
        phases: list[Phase] = []
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
        return Pipeline(
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
    ) -> Phase | None:
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
        return Phase(
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
    ) -> tuple[list[ir.Operation], list[Flow]]:
        """The loops over layers of a direction, one for each table, and what they hand on."""
        if len(tables) == 1:
            flows = flows_of(loop, tables[0], entries, self._facts, self._classify, step)
            return list({flow.layers.results[0]: flow.layers for flow in flows}.values()), flows
        loops = [op for table in tables if (op := layers_of(loop, table, entries)) is not None]
        return loops, flows_behind(loop, loops, self._facts, self._classify, step)

    def _devices_of_rank(self, loop: TickLoop) -> int:
        """How many devices share what the types say of one rank."""
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
    """How many layers each rank runs in each tick: a constant, or what its table says."""
    counter = counter_of(layers)
    if isinstance(counter, str) or counter.step != 1 or counter.direction != "LT":
        return None
    if constant_integer(layers.operands[counter.position]) != 0:
        return None
    own = loop.tables[table].entries[:, :, Column.LAYERS]
    limit = constant_integer(counter.bound)
    if limit is not None:
        return np.full_like(own, limit)
    return own if entries.of(counter.bound) == frozenset({(table, Column.LAYERS)}) else None
