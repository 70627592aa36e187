"""Where the operands of actions come from, and where their results go: M3 and M4.

A phase of a stage is one function, called once for each microbatch, so every operand of it has one
meaning. It is the same value for all microbatches; or comes from the same result of the same phase,
or the same message, of the call's own microbatch; or goes through all calls, each of which takes
what the call before left: a sum. Whatever deviates is one call that takes something else.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from stablehlo_tools.mpmd.proof.findings import Findings, Rule
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.proof.sums import Flow, InSums, Relative, check_sums, microbatch_of
from stablehlo_tools.mpmd.reading import RETURN, Call, Message, Origin, Reading, Source, Use
from stablehlo_tools.schedules.table import Action, Kind

_GRADIENT = re.compile(r"operand \d+ of @stage_(\d+)_(?:backward|input_gradient|weight_gradient)\b")
_FORWARDS = frozenset({Kind.FORWARD, Kind.RECEIVE_FORWARD})
_LATER = frozenset(
    {*_FORWARDS, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.RECEIVE_BACKWARD}
)  # what a gradient may read


def check_flow(reading: Reading, labels: Labels, findings: Findings) -> InSums:
    """M3 and M4 of one rank. Returns its sums."""
    calls: defaultdict[str, list[Call]] = defaultdict(list)
    for call in reading.calls:
        calls[call.function].append(call)
    flow = Flow(reading, labels, findings, dict(calls))
    slots = [(name, i) for name, c in flow.calls.items() for i in range(1, len(c[0].operands))]
    even = [slot for slot in slots if _is_even(flow, flow.calls[slot[0]], slot[1])]
    uneven = [slot for slot in slots if slot not in set(even)]
    in_sums = check_sums(flow, uneven, even)
    for function, slot in slots:
        if (function, slot) in in_sums.operands:
            continue
        if (function, slot) in even:
            _check_earlier(flow, flow.calls[function][0], slot)
        else:
            _tell_deviants(flow, flow.calls[function], slot)
    for function, each in flow.calls.items():
        for number in range(len(each[0].op.results)):
            if (function, number) not in in_sums.results:
                makers = [(Origin(Source.CALL, number, c.index), microbatch_of(c)) for c in each]
                _check_uses(flow, makers)
    _check_sends(flow)
    _check_receives(flow)
    _check_others(flow)
    return in_sums


def _is_even(flow: Flow, calls: Sequence[Call], slot: int) -> bool:
    """Whether all calls take the same, relative to their microbatch.

    A gradient may come from another phase where the microbatches do not run the same ones.
    """
    seen: set[Relative] = set()
    for group in flow.alike(calls):
        taken = {flow.relative(call.operands[slot], microbatch_of(call)) for call in group}
        if len(taken) > 1 or not next(iter(taken)).is_own:
            return False
        seen |= {flow.loosely(relative) for relative in taken}
    return len(seen) <= 1


def _check_earlier(flow: Flow, call: Call, slot: int) -> None:
    """Forwards read of forwards only, and nothing of a microbatch reads a weight gradient."""
    made = flow.action_of(call.operands[slot])
    assert call.action is not None
    allowed = _FORWARDS if call.action.kind is Kind.FORWARD else _LATER
    if made is not None and made.kind not in allowed:
        what = flow.reading.described(call.operands[slot])
        said = f"{call.action} takes {what} as operand {slot}, which is of a later phase"
        flow.findings.add(Rule.OPERANDS, said, flow.reading, call.op)


def _tell_deviants(flow: Flow, calls: Sequence[Call], slot: int) -> None:
    """The calls that take another value than most that are like them."""
    told = False
    for group in flow.alike(calls):
        seen = [flow.relative(call.operands[slot], microbatch_of(call)) for call in group]
        usual = Counter(one._replace(is_own=True) for one in seen).most_common(1)[0][0]
        for call, taken in zip(group, seen, strict=True):
            if taken == usual:
                continue
            told = True
            what = flow.reading.described(call.operands[slot])
            other = " of its own microbatch" if taken._replace(is_own=True) == usual else ""
            expected = f"{_expected(flow, usual)}{other} is expected"
            said = f"{call.action} takes {what} as operand {slot}, where {expected}"
            flow.findings.add(Rule.OPERANDS, said, flow.reading, call.op)
    if not told:
        said = f"operand {slot} of @{calls[0].function} is not of one kind for all microbatches"
        flow.findings.add(Rule.OPERANDS, said, flow.reading, calls[0].op)


def _expected(flow: Flow, usual: Relative) -> str:
    if usual.origin is not None:
        return flow.reading.described(usual.origin)
    return f"number {usual.number} of {usual.name}"


def _check_uses(flow: Flow, made: Sequence[tuple[Origin, int]]) -> None:
    """Values that differ in their microbatch alone go to the same places, relative to it, and to
    some. Where microbatches run other phases, these are places in the same stages."""
    groups: defaultdict[tuple[str, ...], list[Origin]] = defaultdict(list)
    for origin, microbatch in made:
        groups[flow.phases.get(microbatch, ())].append(origin)
    microbatches = dict(made)
    usual_of_all: list[str] | None = None
    for group in groups.values():
        seen = [_uses(flow, origin, microbatches[origin]) for origin in group]
        usual = Counter(seen).most_common(1)[0][0]
        loose = _stages_in(usual)
        usual_of_all = usual_of_all or loose
        for origin, each in zip(group, seen, strict=True):
            if each and each == usual and loose == usual_of_all:
                continue
            said = f"{flow.reading.described(origin)} goes to {_listed(each)}"
            if each != usual or loose != usual_of_all:
                other = _listed(usual if each != usual else usual_of_all)
                said += f", and for other microbatches to {other}"
            op = flow.reading.events[origin.event].op
            flow.findings.add(Rule.OPERANDS, said, flow.reading, op)


def _uses(flow: Flow, origin: Origin, microbatch: int) -> tuple[str, ...]:
    uses = flow.reading.uses.get(origin, [])
    return tuple(sorted({_use(flow, use, microbatch) for use in uses}))


def _stages_in(uses: Sequence[str]) -> list[str]:
    """The uses without what differs between a gradient as a whole and its two parts."""
    return sorted({_GRADIENT.sub(r"gradients of stage \1", use) for use in uses})


def _use(flow: Flow, use: Use, microbatch: int) -> str:
    if use.event == RETURN:
        return f"result {use.operand} of @main"
    event = flow.reading.events[use.event]
    if isinstance(event, Call):
        if event.action is None:
            return f"operand {use.operand} of @{event.function}"
        other = "" if event.action.microbatch == microbatch else " of another microbatch"
        return f"operand {use.operand} of @{event.function}{other}"
    label = flow.labels.of(flow.reading, use.event)
    if label is None or label.action is None:
        return f"a message on channel {event.channel}"
    other = "" if label.action.microbatch == microbatch else " of another microbatch"
    return f"tensor {label.tensor} of {label.action.stage}{label.action.kind.value}{other}"


def _listed(uses: Sequence[str]) -> str:
    return ", ".join(uses) or "nothing"


def _check_sends(flow: Flow) -> None:
    """What a stage sends is the same for all microbatches."""
    sent: defaultdict[tuple[object, ...], list[tuple[Message, Relative]]] = defaultdict(list)
    for message in flow.reading.messages:
        label = flow.labels.of(flow.reading, message.index)
        if label is None or label.action is None or message.operand is None:
            continue
        kind, stage, microbatch = label.action
        relative = flow.relative(message.operand, microbatch)
        phases = flow.phases.get(microbatch, ())
        sent[kind, stage, label.tensor, phases].append((message, relative))
    for each in sent.values():
        usual = Counter(relative for _, relative in each).most_common(1)[0][0]
        for message, relative in each:
            if relative != usual and message.operand is not None:
                title = flow.reading.titled(message.index)
                what = flow.reading.described(message.operand)
                said = f"{title} sends {what}, where {_expected(flow, usual)} is expected"
                flow.findings.add(Rule.OPERANDS, said, flow.reading, message.op)


def _check_receives(flow: Flow) -> None:
    """What is received is used, by the stage and the microbatch that it is for."""
    reading = flow.reading
    received: defaultdict[tuple[Kind, int, int], list[tuple[Origin, int]]] = defaultdict(list)
    for message in reading.messages:
        label = flow.labels.of(reading, message.index)
        if message.is_send or label is None:
            continue
        origin = Origin(Source.MESSAGE, 0, message.index)
        if label.action is None:
            if origin not in reading.uses:
                said = f"{reading.described(origin)} is not used"
                flow.findings.add(Rule.OPERANDS, said, reading, message.op)
            continue
        kind, stage, microbatch = label.action
        received[kind, stage, label.tensor].append((origin, microbatch))
        users = [_user(flow, use) for use in reading.uses.get(origin, [])]
        if not users or not all(_may_take(user, label.action) for user in users):
            what = f"{reading.described(origin)} ({label.action})"
            said = f"{what} is not taken by its stage, or one behind it, and its microbatch alone"
            flow.findings.add(Rule.OPERANDS, said, reading, message.op)
    for each in received.values():
        _check_uses(flow, each)


def _may_take(user: Action | None, receive: Action) -> bool:
    """A rank that holds a later stage, for gradients an earlier one, may keep what it receives."""
    if user is None or user.microbatch != receive.microbatch:
        return False
    is_forward = receive.kind is Kind.RECEIVE_FORWARD
    return user.stage >= receive.stage if is_forward else user.stage <= receive.stage


def _user(flow: Flow, use: Use) -> Action | None:
    return None if use.event == RETURN else _action(flow, flow.reading.events[use.event])


def _action(flow: Flow, event: Call | Message) -> Action | None:
    if isinstance(event, Call):
        return event.action
    label = flow.labels.of(flow.reading, event.index)
    return None if label is None else label.action


def _check_others(flow: Flow) -> None:
    """What is prepared, and what the finish leaves, is used; no round takes a value of
    microbatches, or a message, twice."""
    reading = flow.reading
    for event in reading.events:
        if not isinstance(event, Call) or event.action is not None:
            continue
        for number in range(len(event.op.results)):
            if Origin(Source.CALL, number, event.index) not in reading.uses:
                said = f"result {number} of @{event.function} is not used"
                flow.findings.add(Rule.OPERANDS, said, reading, event.op)
        counted = Counter(
            origin
            for origin in event.operands
            if flow.action_of(origin) is not None or origin.source is Source.MESSAGE
        )
        for origin, count in counted.items():
            if count > 1:
                said = f"@{event.function} takes {reading.described(origin)} {count} times"
                flow.findings.add(Rule.OPERANDS, said, reading, event.op)
