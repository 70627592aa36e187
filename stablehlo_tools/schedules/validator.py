"""Proves that a table can be run, or says where it cannot: sound and complete for one model.

The model. Every rank takes the steps of its row in order. A phase of a stage can be taken once its
rank has what it reads:

- F reads the activation of the stage before, B and I that of their own stage and the gradient of
  the stage behind, W what I of its stage left; all of the same microbatch.
- In training a stage runs, for every microbatch, F and either B or both I and W, each once, on the
  rank that the placement names; in a forward-only table F only.
- A pair starts once both of its phases can, and makes what they make when it ends.
- Idle cells do nothing.

In a table that names no transfer, what a phase makes is at once on every rank that reads it. In one
that names any, each activation and gradient that crosses ranks goes by one send, behind what makes
it, and one receive, before what reads it; the messages from one rank to another form a channel and
are received in the order in which they are sent. With k buffers, a send is taken once fewer than k
messages of its channel wait to be received, and a receive once its message waits; with none, a send
and its receive are taken together (rendezvous).

A table is valid if that run takes every step. Taking a step never takes the chance from another, so
the run ends the same whichever rank moves first, and one run decides. Rows are held against C1 to
C13 first, for a run says nothing of duplicates or of messages that arrive in the place of another.

Memory: a rank holds the weights of its stages and, of each microbatch, a stage's activation from F
to B or I, and what is kept of it from I to W. A pair holds the new before it frees the old.
"""

from __future__ import annotations

from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.simulator import change_of_memory, peak_bytes
from stablehlo_tools.schedules.table import Row, Table, parts
from stablehlo_tools.schedules.validation.communication import (
    check_channels,
    check_run,
    check_transfers,
    named,
    runs,
)
from stablehlo_tools.schedules.validation.rules import Findings, Rule, Violation
from stablehlo_tools.schedules.validation.structure import (
    Positions,
    check_phases,
    check_rows,
    positions,
)

_SHARES_ROUNDING = 1e-9  # of the limit: what sums of shares of a byte count may be off by
_NOTES = 10


def check_memory(table: Table, costs: Costs, limit: float, findings: Findings) -> None:
    """C15, once C1 to C9 hold: the first step of each rank that holds more than the limit."""
    most = limit * (1 + _SHARES_ROUNDING)
    held = table.placement.held
    for rank, (row, peak) in enumerate(zip(table.rows, peak_bytes(table, costs), strict=True)):
        if peak <= most:
            continue
        weights = sum(costs.weights[stage] for stage in held[rank])
        findings.add(_memory_violation(rank, row, costs, weights, (limit, most)))


def _memory_violation(
    rank: int, row: Row, costs: Costs, weights: float, limits: tuple[float, float]
) -> Violation:
    limit, most = limits
    if weights > most:
        message = f"the rank's weights alone take {weights:.15g} bytes of {limit:.15g}"
        return Violation(rank, 0, "", Rule.MEMORY, message)
    position, held = _first_over(row, costs, weights, most)
    activations = held - weights
    message = (
        f"makes the rank hold {held:.15g} bytes, {activations:.15g} of them activations; the limit "
        f"is {limit:.15g}"
    )
    return Violation(rank, position, str(row[position]), Rule.MEMORY, message)


def _first_over(row: Row, costs: Costs, weights: float, most: float) -> tuple[int, float]:
    """The first step at which a rank holds more than the most, and what it holds."""
    alive = 0.0
    for position, step in enumerate(row):
        for action in () if step is None else parts(step):
            alive += change_of_memory(action, costs)
            if weights + alive > most:
                return position, weights + alive
    raise AssertionError("a row whose peak is over the limit has a step that is")


def violations(
    table: Table, costs: Costs | None = None, limit: float | None = None, buffers: int = 0
) -> list[Violation]:
    """Where a table breaks a rule, by rule; empty where it is valid.

    `limit`: the most bytes that a rank may hold, by `costs`. `buffers`: the messages that a channel
    may hold, 0 for rendezvous, where the table names its transfers. Of each rule the first few
    violations are listed, the last of them with the number left out; one for each rank that waits
    in a deadlock. The run is tried, and memory counted, once the rows by themselves are right.

    Raises ToolError for costs of another number of stages, a limit without costs or below 0, and
    buffers below 0.
    """
    return _findings(table, costs, limit, buffers).listed()


def check(
    table: Table, costs: Costs | None = None, limit: float | None = None, buffers: int = 0
) -> None:
    """Raises ToolError for a table that is not valid; takes what `violations` takes."""
    findings = _findings(table, costs, limit, buffers)
    if not findings.count:
        return
    first, *others = findings.listed()
    notes = [note(str(violation)) for violation in others[:_NOTES]]
    left_out = findings.count - 1 - len(notes)
    if left_out:
        notes.append(note(f"and {left_out} more"))
    raise ToolError(f"{table.name} is not valid: {first}", notes=tuple(notes))


def least_buffers(table: Table) -> int | None:
    """The fewest messages that channels have to hold for the run to end; 0 for rendezvous.

    None where the run ends with no number of them, or the table breaks another rule. 0 for a valid
    table that names no transfers.
    """
    if _structural(table)[0].count:
        return None
    most = max(map(len, table.rows))  # with so many, no send ever waits
    if not runs(table, most):
        return None
    fewest, enough = 0, 0
    while not runs(table, enough):
        fewest, enough = enough + 1, min(2 * enough + 1, most)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if runs(table, middle):
            enough = middle
        else:
            fewest = middle + 1
    return enough


def _findings(table: Table, costs: Costs | None, limit: float | None, buffers: int) -> Findings:
    _check_arguments(table, costs, limit, buffers)
    findings, at = _structural(table)
    if findings.count:
        return findings
    check_run(table, at, buffers, findings)
    if costs is not None and limit is not None:
        check_memory(table, costs, limit, findings)
    return findings


def _structural(table: Table) -> tuple[Findings, Positions]:
    """What breaks C1 to C13, and where the actions stand; each group once the ones before hold."""
    findings = Findings()
    check_rows(table, findings)
    if findings.count:
        return findings, {}
    at = positions(table, findings)
    check_phases(table, at, findings)
    if findings.count or not named(at):
        return findings, at
    check_transfers(table, at, findings)
    if not findings.count:
        check_channels(table, at, findings)
    return findings, at


def _check_arguments(table: Table, costs: Costs | None, limit: float | None, buffers: int) -> None:
    if buffers < 0:
        raise ToolError(f"buffers: {buffers}; it takes 0, for rendezvous, or more")
    if limit is not None and costs is None:
        raise ToolError("a memory limit needs costs, which say what the stages hold")
    if limit is not None and not limit >= 0:
        raise ToolError(f"the memory limit is {limit}: it takes an amount from 0 up")
    if costs is None:
        return
    figures = (costs.forward, costs.activation, costs.kept, costs.weights)
    for figure in figures if limit is not None else figures[:1]:
        if len(figure) != table.stages:
            raise ToolError(f"costs of {len(figure)} stages for a schedule of {table.stages}")
