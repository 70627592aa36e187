"""Proves a set of rank programs: checks every rule, and collects the results of a sound set."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.proof.ends import check_ends, check_outside, check_parts
from stablehlo_tools.mpmd.proof.flow import InSums, check_flow
from stablehlo_tools.mpmd.proof.labels import (
    MessageLabels,
    check_fifo,
    check_messages,
    check_transfers,
)
from stablehlo_tools.mpmd.proof.message_order import issued_messages
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFinding, RankFindings, numbers
from stablehlo_tools.mpmd.proof.rank_memory import RankMemory, Temporaries, rank_memory
from stablehlo_tools.mpmd.proof.structure import check_devices, check_rows, check_structure
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import RankCall, RankReading, read_rank
from stablehlo_tools.mpmd.set_report import RankLink, RankMemoryLevel, RankRow, SetReport
from stablehlo_tools.order.simulation import LoopMismatchError
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.order.verdict_report import finding_text
from stablehlo_tools.processes.sharing import share_work
from stablehlo_tools.schedules.table import Action, Table, actions_of, drop_idle_cells
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

PAIRS = "pairs"
_ROUNDING = 0.5  # bytes
_MICROSECONDS = 1e6  # per second


@dataclass(frozen=True)
class SetProof:
    """The result of the check of a set. `table` is the schedule read back from the programs.

    `memory` is that of each rank, empty if the set breaks another rule. `finding_count` counts all
    findings; `findings` has the first few of each rule.
    """

    manifest: Manifest
    readings: tuple[RankReading, ...]
    labels: MessageLabels
    table: Table
    findings: tuple[RankFinding, ...]
    finding_count: int
    memory: tuple[RankMemory, ...]

    @property
    def is_proven(self) -> bool:
        """True if no rule is broken."""
        return not self.finding_count

    @property
    def timeline(self) -> Timeline:
        """The schedule read back, timed with the costs of the manifest. Raises ToolError."""
        return simulate(self.table, self.manifest.costs)


def prove(ranks: RankSet) -> SetProof:
    """Checks a set of rank programs whose messages are sends and receives.

    The order of the programs and their memory are checked only if the other rules hold. Raises
    ToolError if the set is of another form, or if a program cannot be read at all.
    """
    _check_form(ranks)
    readings = read_set(ranks)
    return sound(ranks, readings) or check_all_rules(ranks, readings)


class _Sound(NamedTuple):
    """The sums and the memory of a rank that breaks no rule by itself."""

    sums: InSums
    memory: RankMemory


def sound(ranks: RankSet, readings: tuple[RankReading, ...]) -> SetProof | None:
    """Returns the proof of a set that breaks no rule. This process and a fork share the ranks.

    Returns None if some rule is broken or cannot be checked. Then `check_all_rules` finds why.
    """
    manifest, findings = ranks.manifest, RankFindings()
    labels, temporaries = MessageLabels.of_manifest(manifest), Temporaries()
    check_transfers(manifest, readings, labels, findings)  # both processes need its labels
    check_fifo(readings, labels, findings)
    if findings.count:
        return None

    def work(rank: int) -> _Sound | None:
        own = RankFindings()
        with contextlib.suppress(
            Exception
        ):  # of programs of another form, which `check_all_rules` reports
            one = readings[rank]
            check_structure(one, manifest.ranks[one.rank].stages, own)
            check_devices(manifest, [one], own)
            check_messages(one, labels, own)
            check_outside(manifest, [one], own)
            sums = check_flow(one, labels, own)
            if not own.count:
                return _Sound(sums, rank_memory(one, labels, sums, manifest, temporaries))
        return None

    with share_work(work, range(len(readings))) as together:
        _check_stages(manifest, findings)
        check_ends(manifest, readings, findings)
        table = check_rows(manifest, readings, labels, findings)
        if findings.count:
            return None
        try:
            _check_order(ranks, readings, findings)
        except Exception:  # of programs of another form, which `check_all_rules` reports
            return None
        if findings.count:
            return None
        of_ranks = together()
    unbroken = [one for one in of_ranks if one is not None]
    if len(unbroken) < len(readings):
        return None
    sums = {reading.rank: one.sums for reading, one in zip(readings, unbroken, strict=True)}
    check_parts(readings, labels, sums, findings)
    memory = tuple(one.memory for one in unbroken)
    for held in memory:
        _check_memory(readings[held.rank], held, findings)
    if findings.count:
        return None
    return SetProof(manifest, readings, labels, table, (), 0, memory)


def check_all_rules(ranks: RankSet, readings: tuple[RankReading, ...]) -> SetProof:
    """Returns the proof of a set, with the findings of all rules."""
    manifest, findings = ranks.manifest, RankFindings()
    _check_stages(manifest, findings)
    for one in readings:
        check_structure(one, manifest.ranks[one.rank].stages, findings)
    check_devices(manifest, readings, findings)
    check_ends(manifest, readings, findings)
    labels = MessageLabels.of_manifest(manifest)
    check_transfers(manifest, readings, labels, findings)
    for one in readings:
        check_messages(one, labels, findings)
    check_fifo(readings, labels, findings)
    sums = {one.rank: check_flow(one, labels, findings) for one in readings}
    check_parts(readings, labels, sums, findings)
    check_outside(manifest, readings, findings)
    table = check_rows(manifest, readings, labels, findings)
    memory: tuple[RankMemory, ...] = ()
    if not findings.count:
        _check_order(ranks, readings, findings)
    if not findings.count:
        temporaries = Temporaries()
        memory = tuple(
            rank_memory(one, labels, sums[one.rank], manifest, temporaries) for one in readings
        )
    for held in memory:
        _check_memory(readings[held.rank], held, findings)
    listed = tuple(findings.listed)
    return SetProof(manifest, readings, labels, table, listed, findings.count, memory)


def read_set(ranks: RankSet) -> tuple[RankReading, ...]:
    """Returns a reading of the program of each rank."""
    readings: list[RankReading] = []
    for rank, program in enumerate(ranks.programs):
        with naming(program.name):
            readings.append(read_rank(program.module, rank, program.name))
    return tuple(readings)


def _check_form(ranks: RankSet) -> None:
    if ranks.manifest.form != PAIRS:
        raise ToolError(
            f"{ranks.name}: the messages are in the form {ranks.manifest.form!r}; give the set in "
            f"the form {PAIRS!r} that it was made from"
        )
    if len(ranks.programs) != ranks.manifest.table.ranks:
        raise ToolError(
            f"{ranks.name}: {len(ranks.programs)} programs, but the schedule has "
            f"{ranks.manifest.table.ranks} ranks"
        )
    described = [stage.stage for stage in ranks.manifest.stages]
    if described != list(range(ranks.manifest.table.stages)):
        raise ToolError(
            f"{ranks.name}: the manifest describes the stages {numbers(described)}, but its "
            f"schedule has {ranks.manifest.table.stages}, counted from 0"
        )


def _check_stages(manifest: Manifest, findings: RankFindings) -> None:
    """Checks M1: the ranks of the manifest have the stages of its schedule."""
    held = manifest.table.placement.held
    for rank, (listed, stages) in enumerate(zip(manifest.ranks, held, strict=True)):
        if listed.stages != stages:
            said = (
                f"the manifest gives rank {rank} the stages {numbers(listed.stages)}, but its "
                f"schedule gives it {numbers(stages)}"
            )
            findings.add(ProofRule.FORM, said)


def _check_order(ranks: RankSet, readings: Sequence[RankReading], findings: RankFindings) -> None:
    """Checks M8 by the verdict of `check-order`."""
    try:
        decided = decide(issued_messages(ranks, readings))
        if decided.finding is not None:
            # Once more with locations, which only an error message needs.
            decided = decide(issued_messages(ranks, readings, places=True))
    except LoopMismatchError:
        findings.add(
            ProofRule.ORDER, "deciding whether the programs can deadlock needs too many steps"
        )
        return
    if decided.finding is not None:
        text = finding_text(decided.programs, decided.finding)
        findings.add(ProofRule.ORDER, " ".join(line.strip() for line in text.splitlines()))


def _check_memory(reading: RankReading, memory: RankMemory, findings: RankFindings) -> None:
    """Checks M10: reports the first event after which more is held than by the schedule."""
    for moment in memory.moments:
        if moment.held <= moment.bound + _ROUNDING:
            continue
        event = reading.events[moment.event]
        said = (
            f"after {reading.describe_event(moment.event)} it holds {moment.held:,.0f} bytes of "
            f"microbatches, but its schedule allows {moment.bound:,.0f}"
        )
        findings.add(ProofRule.MEMORY, said, reading, event.op)
        return


def set_report(proof: SetProof, name: str, version: str, *, levels: bool = True) -> SetReport:
    """Returns the data of a report on a set. If it is not proven, the schedule is the manifest's.

    Without `levels` the ranks have no levels: only a page draws them. Raises ToolError for a
    schedule that cannot be timed.
    """
    manifest = proof.manifest
    table = proof.table if proof.is_proven else drop_idle_cells(manifest.table)

    def to_microseconds(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time * _MICROSECONDS for time in times)

    costs = manifest.costs.with_phases(to_microseconds)
    costs = replace(costs, communication=costs.communication * _MICROSECONDS)
    timeline = simulate(table, costs)
    memory = {one.rank: one for one in proof.memory}
    return SetReport(
        name,
        version,
        manifest.source,
        manifest.hardware,
        manifest.devices,
        timeline,
        tuple(
            _row(manifest, reading, memory.get(reading.rank), timeline, levels=levels)
            for reading in proof.readings
        ),
        _links(proof),
        tuple(map(str, proof.findings)),
        proof.finding_count,
    )


def _row(
    manifest: Manifest,
    reading: RankReading,
    memory: RankMemory | None,
    timeline: Timeline,
    *,
    levels: bool,
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
    )
    if memory is None:
        return row
    return replace(
        row,
        held=memory.held,
        bound=memory.bound,
        peak=memory.peak,
        peak_at="its arguments" if memory.peak_at < 0 else reading.describe_event(memory.peak_at),
        limit=memory.limit,
        weights=memory.weights,
        arguments=memory.arguments,
        levels=_levels(reading, memory, timeline) if levels else (),
    )


def _levels(
    reading: RankReading, memory: RankMemory, timeline: Timeline
) -> tuple[RankMemoryLevel, ...]:
    ended: dict[Action, float] = {}
    row, ends = timeline.table.rows[reading.rank], timeline.ends[reading.rank]
    for step, end in zip(row, ends, strict=True):
        ended.update(dict.fromkeys(actions_of((step,)), end))
    levels: list[RankMemoryLevel] = []
    for moment in memory.moments:
        event = reading.events[moment.event]
        time = ended.get(event.action) if isinstance(event, RankCall) and event.action else None
        levels.append(
            RankMemoryLevel(reading.describe_event(moment.event), moment.held, moment.bound, time)
        )
    return tuple(levels)


def _links(proof: SetProof) -> tuple[RankLink, ...]:
    """Returns the messages by their source and target ranks."""
    moments: defaultdict[tuple[int, int], list[tuple[bool, float]]] = defaultdict(list)
    sizes: dict[str, float] = {}  # of the types that are sent
    for reading in proof.readings:
        known = proof.labels.of_rank(reading)
        for message in reading.messages:
            label = known.get(message.index)
            if label is None or not message.is_send:
                continue
            if message.type not in sizes:
                sizes[message.type] = bytes_of(message.op.operands[0])
            ranks = (label.transfer.source, label.transfer.target)
            moments[ranks].append((label.action is not None, sizes[message.type]))
    links: list[RankLink] = []
    for ranks, sent in sorted(moments.items()):
        scheduled = [size for is_scheduled, size in sent if is_scheduled]
        finish = [size for is_scheduled, size in sent if not is_scheduled]
        links.append(RankLink(*ranks, len(scheduled), sum(scheduled), len(finish), sum(finish)))
    return tuple(links)
