"""Whether every stage runs its phases, in order, for every microbatch: C7 to C9."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.schedules.actions import COMPUTE, Action, Kind
from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.validation.rules import Findings, Rule, Violation
from stablehlo_tools.schedules.validation.structure import MISSING, Lane, Positions, lanes


def check_phases(table: Table, at: Positions, findings: Findings) -> None:
    """C7 to C9."""
    for lane in lanes(table):
        _check_lane(table, lane, at, findings)


def _check_lane(table: Table, lane: Lane, at: Positions, findings: Findings) -> None:
    phases = [at[kind][lane.cells] for kind in COMPUTE]
    for microbatch, steps in zip(lane.microbatches, zip(*phases, strict=True), strict=True):
        forward, full, inputs, weights = steps
        if forward != MISSING and not table.training:
            continue
        if MISSING < forward < full and inputs == weights == MISSING:
            continue
        if MISSING < forward < inputs < weights and full == MISSING:
            continue
        for fault in _faults(table.training, *steps):
            findings.add(_violation(table, lane, microbatch, fault))


class _Fault(NamedTuple):
    """What is wrong with the phases of one stage and microbatch; `about` as in `1F3`."""

    rule: Rule
    step: int
    message: str
    about: tuple[Kind, ...]  # named in the message where it has braces


def _faults(training: bool, forward: int, full: int, inputs: int, weights: int) -> Iterator[_Fault]:
    phase_f, phase_b, phase_i, phase_w = COMPUTE
    if forward == MISSING:
        yield _Fault(Rule.COMPLETE, MISSING, "{} is missing", (phase_f,))
    if not training:
        return
    split = [step for step in (inputs, weights) if step != MISSING]
    if full != MISSING:
        for step in split:
            message = f"is a gradient by itself, but {{}} at step {full} has both"
            yield _Fault(Rule.FULL_OR_SPLIT, step, message, (phase_b,))
    elif not split:
        message = "{} is missing, or {} and {}"
        yield _Fault(Rule.COMPLETE, MISSING, message, (phase_b, phase_i, phase_w))
    elif inputs == MISSING:
        message = f"{{}} is missing, though {{}} is at step {weights}"
        yield _Fault(Rule.COMPLETE, MISSING, message, (phase_i, phase_w))
    elif weights == MISSING:
        message = f"{{}} is missing, though {{}} is at step {inputs}"
        yield _Fault(Rule.COMPLETE, MISSING, message, (phase_w, phase_i))
    for step in (full, inputs):
        if MISSING < step < forward:
            message = f"comes before {{}}, which is at step {forward}"
            yield _Fault(Rule.ROW_ORDER, step, message, (phase_f,))
    if MISSING < weights < inputs:
        message = f"comes before {{}}, which is at step {inputs}"
        yield _Fault(Rule.ROW_ORDER, weights, message, (phase_i,))


def _violation(table: Table, lane: Lane, microbatch: int, fault: _Fault) -> Violation:
    row = table.rows[lane.rank]
    names = [str(Action(kind, lane.stage, microbatch)) for kind in fault.about]
    message = fault.message.format(*names)
    if fault.step == MISSING:
        return Violation(lane.rank, len(row), "", fault.rule, message)
    return Violation(lane.rank, fault.step, str(row[fault.step]), fault.rule, message)
