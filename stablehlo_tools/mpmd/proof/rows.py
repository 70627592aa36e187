"""The schedule read back from the programs of a set: M6, M7 and M11.

An action that is in no program is one that nothing has to be computed for, or sent: that can only
be all microbatches of it. Such an action counts where the manifest has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.names import phase_of
from stablehlo_tools.mpmd.proof.findings import Findings, Rule
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.reading import Call, Reading
from stablehlo_tools.schedules.simulator import simulate
from stablehlo_tools.schedules.table import (
    Action,
    Kind,
    Pair,
    Row,
    Step,
    Table,
    actions_of,
    compacted,
    table_of,
)
from stablehlo_tools.schedules.validation.communication import other_end
from stablehlo_tools.schedules.validator import violations

_SAME_TIME = 1e-9  # as a share of it


def read_back(manifest: Manifest, readings: Sequence[Reading], labels: Labels) -> Table:
    """The table that the programs run."""
    table = compacted(manifest.table)
    empty = _empty(table.stages, readings, labels)
    rows = [
        _completed(row, _actions(reading, labels), empty)
        for row, reading in zip(table.rows, readings, strict=True)
    ]
    return table_of(table.name, table.placement, table.microbatches, rows, table.training)


def check_rows(
    manifest: Manifest, readings: Sequence[Reading], labels: Labels, findings: Findings
) -> Table:
    """M6, M7 and M11. Returns the table read back."""
    found = read_back(manifest, readings, labels)
    wanted = compacted(manifest.table)
    for reading, row, expected in zip(readings, found.rows, wanted.rows, strict=True):
        _check_row(reading, labels, row, expected, findings)
    broken = violations(found)
    for violation in broken:
        findings.add(Rule.SCHEDULE, str(violation))
    if not broken:
        _check_bubble(manifest, found, findings)
    return found


def _actions(reading: Reading, labels: Labels) -> list[tuple[int, Action]]:
    """The actions of a rank, each with its first event; the tensors of a message count as one."""
    found: list[tuple[int, Action]] = []
    previous: tuple[Action, int] | None = None
    for event in reading.events:
        if isinstance(event, Call):
            if event.action is not None:
                found.append((event.index, event.action))
            previous = None
            continue
        label = labels.of(reading, event.index)
        if label is None or label.action is None:
            previous = None
            continue
        if previous != (label.action, label.tensor - 1):
            found.append((event.index, label.action))
        previous = (label.action, label.tensor)
    return found


def _empty(stages: int, readings: Sequence[Reading], labels: Labels) -> set[tuple[Kind, int]]:
    """The kinds of action, with their stages, that no program has, or defines."""
    there: set[tuple[Kind, int]] = set()
    for reading in readings:
        there.update(action[:2] for _, action in _actions(reading, labels))
        for name in functions_by_name(reading.module):
            phase = phase_of(name)
            if phase is not None:
                there.add(phase)
    for label in labels.of_event.values():
        if label.action is not None:
            there.add(other_end(label.action)[:2])
    return {(kind, stage) for kind in Kind for stage in range(stages)} - there


def _completed(
    row: Row, found: Sequence[tuple[int, Action]], empty: set[tuple[Kind, int]]
) -> list[Step]:
    """What was found, with the actions that are empty behind what they stand behind in the row."""
    behind: dict[Action | None, list[Action]] = {}
    last: Action | None = None
    for action in actions_of(row):
        if action[:2] in empty:
            behind.setdefault(last, []).append(action)
        else:
            last = action
    actions = list(behind.get(None, ()))
    for _, action in found:
        actions += [action, *behind.pop(action, ())]
    return _paired(actions, row)


def _paired(actions: Sequence[Action], row: Row) -> list[Step]:
    """The actions, those in one step where the row has a pair of them."""
    pairs = {step.forward: step for step in row if isinstance(step, Pair)}
    steps: list[Step] = []
    position = 0
    while position < len(actions):
        pair = pairs.get(actions[position])
        if pair is not None and tuple(actions[position : position + 2]) == tuple(pair):
            steps.append(pair)
            position += 2
        else:
            steps.append(actions[position])
            position += 1
    return steps


def _check_row(
    reading: Reading, labels: Labels, row: Row, expected: Row, findings: Findings
) -> None:
    if row == expected:
        return
    at = next(
        (i for i, pair in enumerate(zip(row, expected, strict=False)) if pair[0] != pair[1]),
        min(len(row), len(expected)),
    )
    there = str(row[at]) if at < len(row) else "nothing"
    wanted = str(expected[at]) if at < len(expected) else "nothing"
    event = next(
        (e for e, action in _actions(reading, labels) if at < len(row) and action in _of(row[at])),
        None,
    )
    op = reading.main if event is None else reading.events[event].op
    said = f"step {at} is {there}, and the schedule has {wanted} there"
    findings.add(Rule.ROWS, said, reading, op)


def _of(step: Step | None) -> tuple[Action, ...]:
    return tuple(actions_of((step,)))


def _check_bubble(manifest: Manifest, found: Table, findings: Findings) -> None:
    """M11: both tables with the costs of the manifest."""
    try:
        ours = simulate(found, manifest.costs)
        asked = simulate(compacted(manifest.table), manifest.costs)
    except ToolError as error:
        findings.add(Rule.BUBBLE, error.diagnostic.message)
        return
    if abs(ours.makespan - asked.makespan) > _SAME_TIME * asked.makespan:
        findings.add(
            Rule.BUBBLE,
            f"the programs take {ours.makespan:g} s with a bubble of {ours.bubble:.4f}, and the "
            f"schedule {asked.makespan:g} s with one of {asked.bubble:.4f}",
        )
