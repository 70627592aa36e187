"""Checks the form of a rank's program (M1, M2), and the schedule read back from it (M6, M7, M11).

An action that is in no program has nothing to compute or send. This is possible only for all
microbatches at once. The manifest then determines its position.

Rank r runs on the devices from r * count on, and on no others. If count > 1, `main` is one manual
computation over a mesh. The slowest axis of the mesh is the ranks, and it divides no value. The
collectives in functions stay within each rank, and are the same for all ranks. So the devices of a
rank run one program. They issue the same collectives in the same order, and device d sends only to
device d of another rank. One device of each rank, with its sends and receives, is therefore enough
to decide if ranks can deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import TokenType, ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.communication_kinds import TRANSFERS
from stablehlo_tools.dialect.names import (
    AFTER_ALL,
    BARRIER,
    CALL,
    CONSTANT,
    MANUAL_COMPUTATION,
    RECV,
    SEND,
)
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import ENTRY, callee_name, functions_by_name, ops_named
from stablehlo_tools.mpmd.manifest import Manifest, phase_of
from stablehlo_tools.mpmd.origins import Source
from stablehlo_tools.mpmd.proof.labels import MessageLabels
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFindings, numbers
from stablehlo_tools.mpmd.reading import RankCall, RankMessage, RankReading
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Row,
    Step,
    Table,
    actions_of,
    drop_idle_cells,
    with_rows,
)
from stablehlo_tools.schedules.table_simulator import simulate
from stablehlo_tools.schedules.validator import other_end, violations

_ALLOWED = frozenset({AFTER_ALL, BARRIER, CALL, CONSTANT, RECV, SEND})
_VALUES = 3  # a message has a tensor, a token operand and a token result
_ENDS = frozenset({"func.return", "sdy.return"})
_IN_FUNCTIONS = frozenset({SEND, RECV, "stablehlo.infeed", "stablehlo.outfeed"})
_SAME_TIME = 1e-9  # relative tolerance
_WRAPPED = [MANUAL_COMPUTATION, "func.return"]
_TRANSFERS = frozenset({SEND, RECV})


def check_structure(reading: RankReading, stages: Sequence[int], findings: RankFindings) -> None:
    """Checks M1 and M2 of one rank, which has these stages."""
    for op in reading.ops:
        name = op.name
        if name not in _ALLOWED and name not in _ENDS:
            message = f"{name} is in @main, which may hold only calls, barriers and messages"
            findings.add(ProofRule.FORM, message, reading, op)
        elif name in _TRANSFERS and len(op.operands) + len(op.results) != _VALUES:
            findings.add(ProofRule.FORM, f"{name} must carry exactly one tensor", reading, op)
    _check_calls(reading, stages, findings)
    _check_functions(reading, findings)
    _check_messages_chain(reading, findings)
    # Two barriers surround every call of an action, and one token passes through all of them.
    token: ir.Value | None = None
    known: set[ir.Value] = set()  # tokens, because the hash of an op covers all of its operands
    for call in reading.calls:
        before = producer(call.op.operands[0]) if len(call.op.operands) else None
        said, after = _around(call, before, token)
        if said:
            findings.add(ProofRule.TOKENS, f"{call.action}: {said}", reading, call.op)
        token = None if after is None else after.results[-1]
        known.update(barrier.results[-1] for barrier in (before, after) if barrier is not None)
    for op in reading.ops:  # a further barrier would belong to no chain
        if op.name == BARRIER and op.results[-1] not in known:
            findings.add(ProofRule.TOKENS, "a barrier belongs to no action", reading, op)


def _check_calls(reading: RankReading, stages: Sequence[int], findings: RankFindings) -> None:
    before, computed, prepared = -1, False, 0
    last = max((call.index for call in reading.calls), default=-1)
    for event in reading.events:
        for number, origin in enumerate(event.operands):
            if origin.source is Source.UNKNOWN:
                user = reading.describe_event(event.index)
                what = f"the origin of operand {number} of {user} is unknown"
                findings.add(ProofRule.FORM, what, reading, event.op)
        if isinstance(event, RankMessage):
            continue
        said = ""
        if event.action is not None:
            computed = True
            if event.action.stage not in stages:
                own = numbers(stages)
                said = f"@{event.function} is called, but this rank has only the stages {own}"
            elif event.action.microbatch < 0:
                what = f"operand 0 of the call of @{event.function}"
                said = f"{what} is not a constant microbatch number"
        elif event.is_prepare:
            prepared += 1
            if prepared > 1 or computed:
                said = "@prepare is called twice, or after the first action"
        elif event.round is None:
            said = (
                f"@{event.function} is called, but is not a stage, prepare or a round of the finish"
            )
        else:
            if event.round <= before or event.index < last:
                said = f"@{event.function} is called before the last action, or after a later round"
            before = event.round
        if said:
            findings.add(ProofRule.FORM, said, reading, event.op)


def _check_functions(reading: RankReading, findings: RankFindings) -> None:
    """Checks that functions have bodies without messages, and that each phase is called."""
    functions = functions_by_name(reading.module)
    called = {event.function for event in reading.events if isinstance(event, RankCall)}
    for name, function in functions.items():
        if function == reading.main:
            continue
        if not len(function.regions[0].blocks):
            findings.add(ProofRule.FORM, f"@{name} has no body", reading, function)
            continue
        if phase_of(name) is not None and name not in called:
            findings.add(ProofRule.FORM, f"@{name} is never called", reading, function)
        for op in ops_named(function, _IN_FUNCTIONS | CALLS):
            if op.name in _IN_FUNCTIONS:
                message = f"{op.name} is in @{name}, but messages are allowed in @main only"
                findings.add(ProofRule.FORM, message, reading, op)
            elif callee_name(op) == ENTRY:
                message = f"@{name} calls @main, which would repeat its messages"
                findings.add(ProofRule.FORM, message, reading, op)
    for name in sorted(called - functions.keys()):
        findings.add(ProofRule.FORM, f"@{name} is called but does not exist", reading, reading.main)


def _check_messages_chain(reading: RankReading, findings: RankFindings) -> None:
    """Checks that every message reads the token of the one before it; the first, a new token."""
    before: RankMessage | None = None
    for message in reading.messages:
        token = message.op.operands[-1]
        if not (_is_new(token) if before is None else token == before.op.results[-1]):
            after = "a new token"
            if before is not None:
                after = f"that of {reading.describe_event(before.index)}"
            said = f"{reading.describe_event(message.index)} reads another token than {after}"
            findings.add(ProofRule.TOKENS, said, reading, message.op)
        before = message


def _is_new(token: ir.Value) -> bool:
    op = producer(token)
    return op is not None and op.name == AFTER_ALL and not len(op.operands)


def _around(
    call: RankCall, before: ir.Operation | None, token: ir.Value | None
) -> tuple[str, ir.Operation | None]:
    """Returns an error about the barriers around a call ("" if none), and the barrier after it.

    `before` is the op that yields the number of its microbatch. `token` is the token of the action
    before it, None for the first.
    """
    if (
        before is None
        or before.name != BARRIER
        or not TokenType.isinstance(before.operands[-1].type)
    ):
        return "its microbatch number does not come from a barrier that ends in a token", None
    said = ""
    taken = before.operands[-1]
    if not (_is_new(taken) if token is None else taken == token):
        said = "the barrier before it does not read the token of the action before"
    behind = [use.owner.operation for use in before.results[-1].uses]
    if len(behind) != 1 or behind[0].name != BARRIER:
        return said or "its token does not go to exactly one barrier after it", None
    after = behind[0]
    return said or _of_handed(call, before, after), after


def _of_handed(call: RankCall, before: ir.Operation, after: ir.Operation) -> str:
    """Returns an error about the values in the barriers around a call; "" if there is none.

    The barrier before the call may hold only its operands, the barrier after it only its results.
    Any other value would be live until then.
    """
    if not set(call.op.operands).issuperset(before.results[:-1]):
        return "the barrier before it holds a value that the call does not read"
    if len(after.operands) < 2:
        return (
            "none of its results goes through the barrier after it, so nothing holds the call there"
        )
    if not set(call.op.results).issuperset(after.operands[:-1]):
        return "the barrier after it holds a value that the call does not return"
    return ""


def check_rows(
    manifest: Manifest,
    readings: Sequence[RankReading],
    labels: MessageLabels,
    findings: RankFindings,
) -> Table:
    """Checks M6, M7 and M11. Returns the table read back."""
    wanted = drop_idle_cells(manifest.table)
    standing = [_actions(reading, labels) for reading in readings]
    empty = _empty(wanted.stages, readings, standing, labels)
    rows = [_insert_empty_actions(*both, empty) for both in zip(wanted.rows, standing, strict=True)]
    table = with_rows(wanted, rows)
    for reading, row, expected in zip(readings, table.rows, wanted.rows, strict=True):
        _check_row(reading, labels, row, expected, findings)
    broken = violations(table)
    for violation in broken:
        findings.add(ProofRule.SCHEDULE, str(violation))
    if not broken and table.rows != wanted.rows:  # the same rows take the same time
        _check_bubble(manifest, table, wanted, findings)
    return table


def _actions(reading: RankReading, labels: MessageLabels) -> list[tuple[int, Action]]:
    """Returns the actions of a rank, each with its first event, without further tensors."""
    positions: list[tuple[int, Action]] = []
    previous: tuple[Action, int] | None = None
    known = labels.of_rank(reading)
    for event in reading.events:
        if isinstance(event, RankCall):
            if event.action is not None:
                positions.append((event.index, event.action))
            previous = None
            continue
        label = known.get(event.index)
        if label is None or label.action is None:
            previous = None
            continue
        if previous != (label.action, label.tensor - 1):
            positions.append((event.index, label.action))
        previous = (label.action, label.tensor)
    return positions


def _empty(
    stages: int,
    readings: Sequence[RankReading],
    standing: Sequence[Sequence[tuple[int, Action]]],
    labels: MessageLabels,
) -> set[tuple[ActionKind, int]]:
    """Returns the kinds of action, with their stages, that no program runs or defines."""
    there: set[tuple[ActionKind, int]] = set()
    for reading, actions in zip(readings, standing, strict=True):
        there.update(action[:2] for _, action in actions)
        there.update(filter(None, map(phase_of, functions_by_name(reading.module))))
        for label in labels.of_rank(reading).values():
            if label.action is not None:
                there.add(other_end(label.action)[:2])
    return {(kind, stage) for kind in ActionKind for stage in range(stages)} - there


def _insert_empty_actions(
    row: Row, standing: Sequence[tuple[int, Action]], empty: set[tuple[ActionKind, int]]
) -> list[Step]:
    """Returns the steps, with each empty action after the action that it follows in the row."""
    behind: dict[Action | None, list[Action]] = {}
    last: Action | None = None
    for action in actions_of(row):
        if action[:2] in empty:
            behind.setdefault(last, []).append(action)
        else:
            last = action
    actions = list(behind.get(None, ()))
    for _, action in standing:
        actions += [action, *behind.pop(action, ())]
    # Two actions become one step if the row has a pair of them.
    pairs = {step.forward: step for step in row if isinstance(step, ActionPair)}
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
    reading: RankReading, labels: MessageLabels, row: Row, expected: Row, findings: RankFindings
) -> None:
    if row == expected:
        return
    pairs = enumerate(zip(row, expected, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(row), len(expected)))
    there = str(row[at]) if at < len(row) else "nothing"
    wanted = str(expected[at]) if at < len(expected) else "nothing"
    actions = set(actions_of(row[at : at + 1]))
    event = next((e for e, action in _actions(reading, labels) if action in actions), None)
    op = reading.main if event is None else reading.events[event].op
    said = f"step {at} is {there}, but the schedule has {wanted}"
    findings.add(ProofRule.ROWS, said, reading, op)


def _check_bubble(manifest: Manifest, table: Table, wanted: Table, findings: RankFindings) -> None:
    """Checks M11: simulates both tables with the costs of the manifest."""
    try:
        ours = simulate(table, manifest.costs)
        asked = simulate(wanted, manifest.costs)
    except ToolError as error:
        findings.add(ProofRule.BUBBLE, error.diagnostic.message)
        return
    if abs(ours.makespan - asked.makespan) > _SAME_TIME * asked.makespan:
        findings.add(
            ProofRule.BUBBLE,
            f"the programs need {ours.makespan:g} s with a bubble of {ours.bubble:.4f}, but the "
            f"schedule {asked.makespan:g} s with a bubble of {asked.bubble:.4f}",
        )


def check_devices(
    manifest: Manifest, readings: Sequence[RankReading], findings: RankFindings
) -> None:
    """Checks the part of M1 about devices, for all ranks."""
    for reading in readings:
        facts = ModuleFacts.from_module(reading.module)
        ranks, size = len(manifest.ranks), manifest.devices
        if facts.grid.size != ranks * size:
            said = f"the program is for {facts.grid.size} devices, not {ranks} ranks of {size}"
            findings.add(ProofRule.FORM, said, reading, reading.main)
            continue
        _check_wrapping(reading, facts, ranks, size, findings)
        _check_groups(reading, facts, size, findings)


def _check_wrapping(
    reading: RankReading, facts: ModuleFacts, ranks: int, size: int, findings: RankFindings
) -> None:
    """Checks that the manual computation is all of `main`, and divides nothing over the ranks."""
    outer = Function(reading.main).body
    if outer == reading.block:
        if size > 1:
            said = f"@main has no manual computation over the {size} devices of the rank"
            findings.add(ProofRule.FORM, said, reading, reading.main)
        return
    ops = [view.operation for view in outer.operations]
    if [op.name for op in ops] != _WRAPPED:
        extra = next((op for op in ops if op.name not in _WRAPPED), ops[-1])
        message = f"{extra.name} is in @main, outside the manual computation"
        findings.add(ProofRule.FORM, message, reading, extra)
        return
    manual, end = ops
    takes_all = list(manual.operands) == list(outer.arguments)
    if takes_all and list(end.operands) == list(manual.results):
        said = _of_axes(manual, facts, ranks, size)
    else:
        said = "does not read all arguments and return all results in order"
    if said:
        findings.add(ProofRule.FORM, f"the manual computation {said}", reading, manual)


def _of_axes(manual: ir.Operation, facts: ModuleFacts, ranks: int, size: int) -> str:
    names = ("in_shardings", "out_shardings")
    shardings = [sharding_axes(s) for n in names for s in sharding_per_value(manual.attributes[n])]
    meshes = list(dict.fromkeys(name for name, _ in shardings))
    if not meshes:
        return ""
    mesh = facts.meshes.get(meshes[0])
    if len(meshes) > 1 or mesh is None:
        return "is over several meshes, or an unknown one"
    ids = mesh.device_ids or tuple(range(mesh.size))
    first = ids[:size]
    if (
        not mesh.axes
        or mesh.axes[0][1] != ranks
        or sorted(first) != list(range(size))
        or ids != tuple(rank * size + device for rank in range(ranks) for device in first)
    ):
        return f"is over a mesh whose slowest axis is not {ranks} ranks of {size} devices in order"
    if manual_axes(manual) != frozenset(name for name, _ in mesh.axes):
        return "is not over all axes of its mesh"
    over = mesh.axes[0][0]
    divided = any(over in axes for _, axes in shardings)
    return f'divides a value over the ranks, axis "{over}"' if divided else ""


def _check_groups(
    reading: RankReading, facts: ModuleFacts, size: int, findings: RankFindings
) -> None:
    """Checks that collectives stay between the devices of a rank, the same on each rank."""
    try:
        own = [one for one in find_collectives(reading.module) if one.kind not in TRANSFERS]
        groups = [(one, facts.groups(one)) for one in own]
    except ToolError as error:
        findings.add(ProofRule.FORM, error.diagnostic.message, reading, reading.main)
        return
    for collective, each in groups:
        said = "" if each is None else _of_groups(each, facts.grid.size, size)
        if said:
            message = f"{collective.inner.name} {said}"
            findings.add(ProofRule.FORM, message, reading, collective.op)


def _of_groups(groups: ProcessGroups, devices: int, size: int) -> str:
    within: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(devices // size)}
    for group in groups:
        ranks = {device // size for device in group}
        if len(ranks) > 1:
            return f"has a group with devices {numbers(group)}, which belong to several ranks"
        for rank in ranks:
            within[rank].append(tuple(device - rank * size for device in group))
    if len({tuple(each) for each in within.values()}) > 1:
        return "has different groups of devices on different ranks"
    return ""
