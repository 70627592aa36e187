"""Proves that a table can run, or reports where it cannot: sound and complete for one model.

The model. Every rank runs the steps of its row in order. A phase of a stage can run once its rank
has its inputs:

- F reads the activation of the previous stage. B and I read the activation of their own stage and
  the gradient of the next stage. W reads the residuals of I of its stage. All are of the same
  microbatch.
- In training a stage runs, for every microbatch, F and either B or both I and W, each once, on the
  rank that the placement names. In a forward-only table it runs only F.
- A pair starts once both of its phases can, and produces both results when it ends.
- If sequences are sliced, F of a slice also needs F of the previous slice of its microbatch, and B
  or I needs that of the next slice. Both are on the same rank (C16, constraints.py).
- A copy to the host and back involves only its own rank. OFFLOAD and RELOAD do not wait for other
  ranks; they come in this order between a stage's F and its gradient (C17).
- Idle cells do nothing.

In a table without transfers, the result of a phase is immediately on every rank that reads it. In a
table with any, each activation and gradient that crosses ranks needs one send, after its producer,
and one receive, before its reader. The messages from one rank to another form a channel and are
received in the order in which they are sent. With k buffers, a send runs once fewer than k messages
of its channel are unreceived, and a receive once its message has arrived. With 0 buffers, a send
and its receive run together (rendezvous).

A table is valid if this run completes every step. No step can disable another, so the result does
not depend on which rank moves first, and one run decides. The rows are first checked against C1 to
C9 (constraints.py) and, if they have transfers, C10 to C13, because a run does not detect
duplicates or messages out of order. If the run stops (C14), the report names the ranks that wait
and the actions that they wait for, ranks in a deadlock first.

Memory (C15): a rank holds the weights of its stages. For each microbatch it also holds a stage's
activation from F to B or I, and the residuals for W from I to W. A pair allocates the new
activation before it frees the old. An OFFLOAD frees the copied part, a RELOAD allocates it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.schedules.constraints import (
    MISSING,
    Lane,
    Positions,
    ScheduleRule,
    Violation,
    ViolationCollector,
    check_phases,
    check_rows,
    lanes,
    positions,
)
from stablehlo_tools.schedules.setting import Costs, unit_costs
from stablehlo_tools.schedules.table import Action, ActionKind, Row, Step, Table, parts
from stablehlo_tools.schedules.table_simulator import (
    RENDEZVOUS,
    change_of_memory,
    execute,
    peak_bytes,
)

Channel = tuple[int, int]  # the rank that sends and the rank that receives
_SHARES_ROUNDING = 1e-9  # share of the limit: rounding error of sums of shares of a byte count
_NOTES = 10


def violations(
    table: Table, costs: Costs | None = None, limit: float | None = None, buffers: int = 0
) -> list[Violation]:
    """Returns the violations of a table, by rule; empty if it is valid.

    `limit` is the most bytes that a rank may hold, by `costs`. `buffers` is the number of messages
    that a channel may hold, 0 for rendezvous, if the table has transfers. Lists the first few
    violations of each rule; the last states how many more there are. A deadlock has one for each
    waiting rank. The run and the memory are checked only if the rows by themselves are right.

    Raises ToolError for costs of another number of stages, a limit without costs or below 0, and
    buffers below 0.
    """
    return _findings(table, costs, limit, buffers).violations_by_rule()


def check(
    table: Table, costs: Costs | None = None, limit: float | None = None, buffers: int = 0
) -> None:
    """Raises ToolError if a table is invalid; the parameters are those of `violations`."""
    findings = _findings(table, costs, limit, buffers)
    if not findings.count:
        return
    first, *others = findings.violations_by_rule()
    notes = [note(str(violation)) for violation in others[:_NOTES]]
    left_out = findings.count - 1 - len(notes)
    if left_out:
        notes.append(note(f"and {left_out} more"))
    raise ToolError(f"{table.name} is not valid: {first}", notes=tuple(notes))


def _findings(
    table: Table, costs: Costs | None, limit: float | None, buffers: int
) -> ViolationCollector:
    if buffers < 0:
        raise ToolError(f"buffers: {buffers}; give 0 (rendezvous) or more")
    if limit is not None and costs is None:
        raise ToolError("a memory limit needs costs, with the bytes that each stage holds")
    if limit is not None and not limit >= 0:
        raise ToolError(f"the memory limit is {limit}: give 0 or more")
    if costs is not None:
        figures = (costs.forward, costs.activation, costs.kept, costs.weights)
        for figure in figures if limit is not None else figures[:1]:
            if len(figure) != table.stages:
                raise ToolError(
                    f"the costs have {len(figure)} stages, but the schedule has {table.stages}"
                )
    findings, at = _structural(table)
    if findings.count:
        return findings
    check_run(table, at, buffers, findings)
    if costs is not None and limit is not None:
        check_memory(table, costs, limit, findings)
    return findings


def _structural(table: Table) -> tuple[ViolationCollector, Positions]:
    """Returns violations of C1 to C13, and the positions of the actions.

    Each group of rules is checked only if the earlier groups hold.
    """
    findings = ViolationCollector()
    check_rows(table, findings)
    if findings.count:
        return findings, {}
    at = positions(table, findings)
    check_phases(table, at, findings)
    names_transfers = any(max(at[kind]) != MISSING for kind in _ENDS)
    # Without named transfers, each result is at once on every rank: C10 to C13 hold.
    if findings.count or not names_transfers:
        return findings, at
    check_transfers(table, at, findings)
    if not findings.count:
        check_channels(table, at, findings)
    return findings, at


def other_end(end: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    other, away = _ENDS[end.kind]
    return Action(other, end.stage + away, end.microbatch)


def channel_of(table: Table, rank: int, end: Action) -> Channel:
    """The channel of a send or receive of a rank."""
    peer = table.placement.rank_of(end.stage + _ENDS[end.kind].away, end.microbatch)
    return (rank, peer) if end.kind.is_send else (peer, rank)


class _MatchingEnd(NamedTuple):
    """One end of a transfer: the kind of the other end, and the offset of its stage."""

    other: ActionKind
    away: int


_FORWARDS = {
    ActionKind.SEND_FORWARD: _MatchingEnd(ActionKind.RECEIVE_FORWARD, 1),
    ActionKind.RECEIVE_FORWARD: _MatchingEnd(ActionKind.SEND_FORWARD, -1),
}


_BACKWARDS = {
    ActionKind.SEND_BACKWARD: _MatchingEnd(ActionKind.RECEIVE_BACKWARD, -1),
    ActionKind.RECEIVE_BACKWARD: _MatchingEnd(ActionKind.SEND_BACKWARD, 1),
}


_ENDS = _FORWARDS | _BACKWARDS


def check_transfers(table: Table, at: Positions, findings: ViolationCollector) -> None:
    """Checks C10 to C12."""
    for kind, lane, peer in _ends(table):
        if peer is None or peer == lane.rank:
            # C10: this stage has no transfer in this direction.
            for microbatch, step in zip(lane.microbatches, at[kind][lane.cells], strict=True):
                if step == MISSING:
                    continue
                end = Action(kind, lane.stage, microbatch)
                other = other_end(end).stage
                exists = 0 <= other < table.stages
                why = f"is on rank {lane.rank} too" if exists else "does not exist"
                message = f"transfers nothing between ranks: stage {other} {why}"
                findings.add(
                    Violation(lane.rank, step, str(end), ScheduleRule.NO_TRANSFER, message)
                )
        else:
            _check_each(table, kind, lane, at, findings)


def _ends(table: Table) -> Iterator[tuple[ActionKind, Lane, int | None]]:
    """Yields every possible end of a transfer of every stage, with the rank of the other end."""
    for kind in _ENDS if table.training else _FORWARDS:
        for lane in lanes(table):
            yield kind, lane, lane.behind if _ENDS[kind].away > 0 else lane.before


def _check_each(
    table: Table, kind: ActionKind, lane: Lane, at: Positions, findings: ViolationCollector
) -> None:
    """Checks C11 and C12: each send follows its producer, each receive precedes its reader."""
    sends = kind.is_send
    row = table.rows[lane.rank]
    # The position of the phase that produces the sent datum, or reads the received one.
    phases = at[ActionKind.FORWARD][lane.cells]
    if kind not in _FORWARDS:
        gradients = at[ActionKind.BACKWARD][lane.cells], at[ActionKind.INPUT_GRADIENT][lane.cells]
        phases = list(map(max, *gradients))  # one of the two is MISSING
    ends = zip(lane.microbatches, at[kind][lane.cells], phases, strict=True)
    for microbatch, step, phase in ends:
        if MISSING < phase < step if sends else MISSING < step < phase:
            continue
        end = Action(kind, lane.stage, microbatch)
        if step == MISSING:
            sender, receiver = channel_of(table, lane.rank, end)
            what = "an activation" if end.kind in _FORWARDS else "a gradient"
            message = f"{end} is missing: {what} goes from rank {sender} to rank {receiver} here"
            findings.add(Violation(lane.rank, len(row), "", ScheduleRule.TRANSFER, message))
            continue
        side = "produces the sent data" if sends else "reads the received data"
        message = f"comes {'before' if sends else 'after'} {row[phase]}, step {phase}, which {side}"
        findings.add(Violation(lane.rank, step, str(end), ScheduleRule.TRANSFER_ORDER, message))


def check_channels(table: Table, at: Positions, findings: ViolationCollector) -> None:
    """Checks C13 if C1 to C12 hold: reports each channel's first receive that is out of order."""
    # The steps of the send and of the receive of every message, by channel.
    steps: defaultdict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for kind, lane, peer in _ends(table):
        if not kind.is_send or peer is None or peer == lane.rank:
            continue
        other, away = _ENDS[kind]
        shift, cells = away * table.microbatches, lane.cells
        there = slice(cells.start + shift, cells.stop + shift, cells.step)
        steps[lane.rank, peer] += zip(at[kind][cells], at[other][there], strict=True)
    for (sender, receiver), messages in steps.items():
        messages.sort()
        received = sorted(step for _, step in messages)
        for number, ((sent, expected), step) in enumerate(zip(messages, received, strict=True)):
            if step == expected:
                continue
            message = (
                f"is receive {number} from rank {sender}, whose send {number} is "
                f"{table.rows[sender][sent]}, step {sent}; receives match the sends in order"
            )
            action = str(table.rows[receiver][step])
            findings.add(Violation(receiver, step, action, ScheduleRule.CHANNEL, message))
            break


class _Wait(NamedTuple):
    """A rank that waits at a step of its row for an action of another step."""

    rank: int
    step: int
    awaited: Action
    holder: int  # the rank of the awaited action
    holder_step: int


def check_run(table: Table, at: Positions, buffers: int, findings: ViolationCollector) -> None:
    """Checks C14 if C1 to C13 hold: one violation per waiting rank, those in cycles first."""
    # Unit costs: whether the run ends does not depend on times.
    done = [len(ends) for ends in execute(table, unit_costs(table.stages), buffers).ends]
    waits = {
        rank: _wait(table, at, done, rank, buffers)
        for rank, row in enumerate(table.rows)
        if done[rank] < len(row)
    }
    cycles = _cycles(waits)
    for cycle in cycles:
        for number, wait in enumerate(cycle):
            message = _message(table, wait)
            if number == 0 and len(cycle) > 1:
                # `rank 0 waits for 1F3 of rank 1, which waits for 0B1 of rank 0`
                turns = ", which ".join(
                    f"waits for {each.awaited} of rank {each.holder}" for each in cycle
                )
                message += f"; deadlock: rank {cycle[0].rank} {turns}"
            findings.add(_violation(table, wait, message))
    # The others wait, directly or not, for a rank of a cycle.
    in_cycles = {wait.rank for cycle in cycles for wait in cycle}
    for rank in sorted(waits.keys() - in_cycles):
        message = f"{_message(table, waits[rank])}, which is stuck as well"
        findings.add(_violation(table, waits[rank], message))


def _wait(table: Table, at: Positions, done: list[int], rank: int, buffers: int) -> _Wait:
    """Returns the first action that a stuck rank waits for."""
    here = done[rank]
    step = table.rows[rank][here]
    assert step is not None, "an idle cell never waits"
    for awaited in _needs(table, at, rank, step, buffers):
        holder = table.placement.rank_of(awaited.stage, awaited.microbatch)
        there = _position(table, at, awaited)
        if there >= done[holder]:
            return _Wait(rank, here, awaited, holder, there)
    raise AssertionError(f"rank {rank} stopped at {step}, all that it needs being there")


def _position(table: Table, at: Positions, action: Action) -> int:
    return at[action.kind][action.stage * table.microbatches + action.microbatch]


def _needs(table: Table, at: Positions, rank: int, step: Step, buffers: int) -> Iterator[Action]:
    """Yields the actions that a step may have to wait for."""
    for action in parts(step):
        if action.kind.is_compute:
            # The producers of a phase's inputs. Those of its own stage are earlier in the row (C9).
            kind, stage, microbatch = action
            if kind is ActionKind.FORWARD and stage > 0:
                yield Action(ActionKind.FORWARD, stage - 1, microbatch)
            if (
                kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
                and stage + 1 < table.stages
            ):
                full = Action(ActionKind.BACKWARD, stage + 1, microbatch)
                split = Action(ActionKind.INPUT_GRADIENT, stage + 1, microbatch)
                yield split if _position(table, at, full) == MISSING else full
        elif action.kind.is_send and buffers != RENDEZVOUS:
            # The receive that frees a buffer for a send: that of the message `buffers` earlier.
            channel = channel_of(table, rank, action)
            sends = [
                step
                for step in table.rows[rank][: _position(table, at, action)]
                if isinstance(step, Action) and step.kind.is_send
                if channel_of(table, rank, step) == channel
            ]
            if len(sends) >= buffers:
                yield other_end(sends[-buffers])
        else:
            yield other_end(action)


def _cycles(waits: dict[int, _Wait]) -> list[list[_Wait]]:
    """Returns the cycles of ranks that wait for each other, each starting at its lowest rank.

    Every waiting rank waits for a rank that waits too. So there is a cycle if any rank waits.
    """
    cycles: list[list[_Wait]] = []
    seen: set[int] = set()
    for first in waits:
        path: dict[int, None] = {}
        rank = first
        while rank not in seen:
            seen.add(rank)
            path[rank] = None
            rank = waits[rank].holder
        if rank in path:
            ranks = list(path)
            cycle = ranks[ranks.index(rank) :]
            turn = cycle.index(min(cycle))
            cycles.append([waits[one] for one in cycle[turn:] + cycle[:turn]])
    return cycles


def _message(table: Table, wait: _Wait) -> str:
    if wait.holder == wait.rank:
        return f"waits for {wait.awaited}, which comes after it, at step {wait.holder_step}"
    return f"waits for {wait.awaited} of rank {wait.holder}, step {wait.holder_step}"


def _violation(table: Table, wait: _Wait, message: str) -> Violation:
    step = str(table.rows[wait.rank][wait.step])
    return Violation(wait.rank, wait.step, step, ScheduleRule.DEADLOCK, message)


def check_memory(table: Table, costs: Costs, limit: float, findings: ViolationCollector) -> None:
    """Checks C15 if C1 to C9 hold: reports the first step of each rank that exceeds the limit."""
    most = limit * (1 + _SHARES_ROUNDING)
    held = table.placement.held
    for rank, (row, peak) in enumerate(zip(table.rows, peak_bytes(table, costs), strict=True)):
        if peak <= most:
            continue
        weights = sum(costs.weights[stage] for stage in held[rank])
        if weights > most:
            message = (
                f"the rank's weights alone need {weights:.15g} bytes, more than the limit of "
                f"{limit:.15g}"
            )
            findings.add(Violation(rank, 0, "", ScheduleRule.MEMORY, message))
            continue
        position, over = _first_over(row, costs, weights, most)
        message = (
            f"makes the rank hold {over:.15g} bytes, {over - weights:.15g} of them activations; "
            f"the limit is {limit:.15g}"
        )
        findings.add(Violation(rank, position, str(row[position]), ScheduleRule.MEMORY, message))


def _first_over(row: Row, costs: Costs, weights: float, most: float) -> tuple[int, float]:
    """Returns the first step at which a rank holds more than `most` bytes, and those bytes."""
    alive = 0.0
    for position, step in enumerate(row):
        for action in () if step is None else parts(step):
            alive += change_of_memory(action, costs)
            if weights + alive > most:
                return position, weights + alive
    raise AssertionError("a row whose peak is over the limit has a step that is")
