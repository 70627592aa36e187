"""A proof as the plain data that reports show."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.memory import RankMemory
from stablehlo_tools.mpmd.proof.proving import Proof
from stablehlo_tools.mpmd.reading import Call, Message, Reading
from stablehlo_tools.report.mpmd_document import Level, Link, RankRow, SetReport
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.simulator import Timeline, simulate
from stablehlo_tools.schedules.table import Action, actions_of, compacted

_MICROSECONDS = 1e6  # of a second


def set_report(proof: Proof, name: str, version: str) -> SetReport:
    """What there is to show of a set, proven or not. An unproven one has the manifest's schedule.

    Raises ToolError for a schedule that cannot be timed.
    """
    manifest = proof.manifest
    table = proof.table if proof.is_proven else compacted(manifest.table)
    timeline = simulate(table, _in_microseconds(manifest.costs))
    memory = {one.rank: one for one in proof.memory}
    return SetReport(
        name,
        version,
        manifest.source,
        manifest.hardware,
        manifest.devices,
        timeline,
        tuple(
            _row(manifest, reading, memory.get(reading.rank), timeline)
            for reading in proof.readings
        ),
        _links(proof),
        tuple(map(str, proof.findings)),
        proof.found,
    )


def _in_microseconds(costs: Costs) -> Costs:
    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time * _MICROSECONDS for time in times)

    return replace(
        costs,
        forward=scaled(costs.forward),
        input_gradient=scaled(costs.input_gradient),
        weight_gradient=scaled(costs.weight_gradient),
        backward=scaled(costs.backward),
        communication=costs.communication * _MICROSECONDS,
    )


def _row(
    manifest: Manifest, reading: Reading, memory: RankMemory | None, timeline: Timeline
) -> RankRow:
    sends = sum(message.is_send for message in reading.messages)
    stages = timeline.table.placement.held[reading.rank]
    row = RankRow(
        rank=reading.rank,
        stages=stages,
        what=tuple(manifest.stages[stage].what for stage in stages),
        actions=len(reading.calls),
        sends=sends,
        receives=len(reading.messages) - sends,
        held=0.0,
        bound=0.0,
        peak=0.0,
        peak_at="",
        limit=0.0,
        weights=0.0,
        arguments=0.0,
        levels=(),
    )
    if memory is None:
        return row
    return replace(
        row,
        held=memory.held,
        bound=memory.bound,
        peak=memory.peak,
        peak_at="its arguments" if memory.peak_at < 0 else reading.titled(memory.peak_at),
        limit=memory.limit,
        weights=memory.weights,
        arguments=memory.arguments,
        levels=_levels(reading, memory, timeline),
    )


def _levels(reading: Reading, memory: RankMemory, timeline: Timeline) -> tuple[Level, ...]:
    ended: dict[Action, float] = {}
    row, ends = timeline.table.rows[reading.rank], timeline.ends[reading.rank]
    for step, end in zip(row, ends, strict=True):
        ended.update(dict.fromkeys(actions_of((step,)), end))
    levels: list[Level] = []
    for moment in memory.moments:
        event = reading.events[moment.event]
        time = ended.get(event.action) if isinstance(event, Call) and event.action else None
        levels.append(Level(reading.titled(moment.event), moment.held, moment.bound, time))
    return tuple(levels)


def _links(proof: Proof) -> tuple[Link, ...]:
    """The messages by the ranks that they go between."""
    found: defaultdict[tuple[int, int], list[tuple[bool, float]]] = defaultdict(list)
    for reading in proof.readings:
        for message in reading.messages:
            label = proof.labels.of(reading, message.index)
            if label is None or not message.is_send:
                continue
            ranks = (label.transfer.source, label.transfer.target)
            found[ranks].append((label.action is not None, _bytes(message)))
    return tuple(_link(ranks, each) for ranks, each in sorted(found.items()))


def _bytes(message: Message) -> float:
    return bytes_of(message.op.operands[0])


def _link(ranks: tuple[int, int], sent: list[tuple[bool, float]]) -> Link:
    scheduled = [size for is_scheduled, size in sent if is_scheduled]
    finish = [size for is_scheduled, size in sent if not is_scheduled]
    return Link(*ranks, len(scheduled), sum(scheduled), len(finish), sum(finish))
