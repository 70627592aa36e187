"""Checks the data flow between actions: M3 and M4.

A phase of a stage is one function, called once for each microbatch. So each of its operands has one
meaning, which is one of these:

- The same value for all microbatches.
- The same result of the same phase, or the same message, of the call's own microbatch.
- A sum that is chained through all calls: each call reads the result of the call before.

A deviation shows up as a call that reads another value than the other calls.

A sum, usually of gradients, is an operand and a result of every function that adds to it. The calls
of these functions form one chain in program order. The first call reads the prepared value, each
other one the result of the call before. Only the next call reads a result; the last result is read
after the schedule. Within a function the result depends on the operand.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from stablehlo_tools.mpmd.manifest import phase_of
from stablehlo_tools.mpmd.origins import RETURN, Origin, Source, Use
from stablehlo_tools.mpmd.proof.dependences import Dependences
from stablehlo_tools.mpmd.proof.labels import Label, MessageLabels
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFindings
from stablehlo_tools.mpmd.reading import Event, RankCall, RankMessage, RankReading, microbatch_of
from stablehlo_tools.schedules.table import Action, ActionKind

_GRADIENT = re.compile(r"operand \d+ of @stage_(\d+)_(?:backward|input_gradient|weight_gradient)\b")
_FORWARDS = frozenset({ActionKind.FORWARD, ActionKind.RECEIVE_FORWARD})
_LATER = frozenset(
    {*_FORWARDS, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.RECEIVE_BACKWARD}
)  # actions whose results a gradient may read


def check_flow(reading: RankReading, labels: MessageLabels, findings: RankFindings) -> InSums:
    """Checks M3 and M4 for one rank. Returns its sums."""
    calls: defaultdict[str, list[RankCall]] = defaultdict(list)
    for call in reading.calls:
        calls[call.function].append(call)
    flow = RankFlow(
        reading, labels.of_rank(reading), labels.actions(reading), findings, dict(calls)
    )
    slots = [Slot(name, i) for name, c in flow.calls.items() for i in range(1, len(c[0].operands))]
    even = [slot for slot in slots if _is_even(flow, *slot)]
    all_even = set(even)
    uneven = [slot for slot in slots if slot not in all_even]
    in_sums = check_sums(flow, uneven, even)
    for function, slot in slots:
        if (function, slot) in in_sums.operands:
            continue
        if (function, slot) in all_even:
            # A forward reads results of forwards only. Only sums read weight gradients.
            call = flow.calls[function][0]
            made = flow.action_of(call.operands[slot])
            assert call.action is not None
            allowed = _FORWARDS if call.action.kind is ActionKind.FORWARD else _LATER
            if made is not None and made.kind not in allowed:
                what = flow.reading.describe_origin(call.operands[slot])
                said = f"{call.action} reads {what} as operand {slot}, a result of a later phase"
                flow.findings.add(ProofRule.OPERANDS, said, flow.reading, call.op)
        else:
            _tell_deviants(flow, flow.calls[function], slot)
    for function, each in flow.calls.items():
        used = flow.group_uses(each)
        for number in range(len(each[0].results)):
            if (function, number) not in in_sums.results:
                _check_uses(flow, used, number)
    _check_sends(flow)
    _check_receives(flow)
    _check_others(flow)
    return in_sums


def _is_even(flow: RankFlow, function: str, slot: int) -> bool:
    """Returns True if all calls read the same operand, relative to their microbatch.

    Calls are grouped by the phases of their microbatch. Between groups a gradient may come from
    another phase of the same stage.
    """
    seen: set[Relative] = set()
    for views in flow.views[function]:
        taken = {view.taken[slot] for view in views}
        if len(taken) > 1 or not next(iter(taken)).is_own:
            return False
        seen |= {flow.loosely(relative) for relative in taken}
    return len(seen) <= 1


def _tell_deviants(flow: RankFlow, calls: Sequence[RankCall], slot: int) -> None:
    """Reports the calls that read another value than most calls of their group."""
    told = False
    for group in flow.alike(calls):
        seen = [flow.view(call).taken[slot] for call in group]
        usual = Counter(one._replace(is_own=True) for one in seen).most_common(1)[0][0]
        for call, taken in zip(group, seen, strict=True):
            if taken == usual:
                continue
            told = True
            what = flow.reading.describe_origin(call.operands[slot])
            other = " of its own microbatch" if taken._replace(is_own=True) == usual else ""
            expected = f"{_describe_usual(flow, usual)}{other} is expected"
            said = f"{call.action} reads {what} as operand {slot}, where {expected}"
            flow.findings.add(ProofRule.OPERANDS, said, flow.reading, call.op)
    if not told:
        said = f"operand {slot} of @{calls[0].function} differs in kind between microbatches"
        flow.findings.add(ProofRule.OPERANDS, said, flow.reading, calls[0].op)


def _describe_usual(flow: RankFlow, usual: Relative) -> str:
    if usual.origin is not None:
        return flow.reading.describe_origin(usual.origin)
    return f"number {usual.number} of {usual.name}"


def _check_uses(flow: RankFlow, used: Sequence[Sequence[Used]], number: int) -> None:
    """Checks that results that differ only in their microbatch have the same uses, at least one.

    The uses are relative to the microbatch. If microbatches run different phases, gradients of one
    stage count as the same use.
    """
    usual_of_all: list[str] | None = None
    for group in used:
        seen = [uses[number] for _, uses in group]
        usual = Counter(seen).most_common(1)[0][0]
        # Backward, input gradient and weight gradient of a stage count as one.
        loose = sorted({_GRADIENT.sub(r"gradients of stage \1", use) for use in usual})
        usual_of_all = usual_of_all or loose
        for (event, _), each in zip(group, seen, strict=True):
            if each and each == usual and loose == usual_of_all:
                continue
            said = (
                f"{flow.reading.describe_origin(event.results[number])} goes to {_list_uses(each)}"
            )
            if each != usual or loose != usual_of_all:
                other = _list_uses(usual if each != usual else usual_of_all)
                said += f", and for other microbatches to {other}"
            flow.findings.add(ProofRule.OPERANDS, said, flow.reading, event.op)


def _uses(flow: RankFlow, origin: Origin, microbatch: int) -> tuple[str, ...]:
    return tuple(sorted({_use(flow, use, microbatch) for use in flow.reading.origins.uses(origin)}))


def _use(flow: RankFlow, use: Use, microbatch: int) -> str:
    if use.event == RETURN:
        return f"result {use.operand} of @main"
    event = flow.reading.events[use.event]
    if isinstance(event, RankCall):
        if event.action is None:
            return f"operand {use.operand} of @{event.function}"
        other = "" if event.action.microbatch == microbatch else " of another microbatch"
        return f"operand {use.operand} of @{event.function}{other}"
    label = flow.labels.get(use.event)
    if label is None or label.action is None:
        return f"a message on channel {event.channel}"
    other = "" if label.action.microbatch == microbatch else " of another microbatch"
    return f"tensor {label.tensor} of {label.action.stage}{label.action.kind.value}{other}"


def _list_uses(uses: Sequence[str]) -> str:
    return ", ".join(uses) or "nothing"


def _check_sends(flow: RankFlow) -> None:
    """Checks that a stage sends the same value for all microbatches, relative to the microbatch."""
    sent: defaultdict[tuple[object, ...], list[tuple[RankMessage, Relative]]] = defaultdict(list)
    for message in flow.reading.messages:
        label = flow.labels.get(message.index)
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
                title = flow.reading.describe_event(message.index)
                what = flow.reading.describe_origin(message.operand)
                said = f"{title} sends {what}, but {_describe_usual(flow, usual)} is expected"
                flow.findings.add(ProofRule.OPERANDS, said, flow.reading, message.op)


def _check_receives(flow: RankFlow) -> None:
    """Checks that received values are used, by their own microbatch and stage (or a later one)
    only."""
    reading = flow.reading
    received: defaultdict[tuple[ActionKind, int, int], list[RankMessage]] = defaultdict(list)
    for message in reading.messages:
        label = flow.labels.get(message.index)
        if message.is_send or label is None:
            continue
        (origin,) = message.results
        if label.action is None:
            if not reading.origins.uses(origin):
                said = f"{reading.describe_origin(origin)} is not used"
                flow.findings.add(ProofRule.OPERANDS, said, reading, message.op)
            continue
        received[label.action.kind, label.action.stage, label.tensor].append(message)
        users = [_user(flow, use) for use in reading.origins.uses(origin)]
        # A rank may also use the value in a later stage (in an earlier one for gradients).
        kind, stage, microbatch = label.action
        may_take = [
            user is not None
            and user.microbatch == microbatch
            and (user.stage >= stage if kind is ActionKind.RECEIVE_FORWARD else user.stage <= stage)
            for user in users
        ]
        if not users or not all(may_take):
            what = f"{reading.describe_origin(origin)} ({label.action})"
            said = f"{what} must be read only by its stage or a later one, in its microbatch"
            flow.findings.add(ProofRule.OPERANDS, said, reading, message.op)
    for each in received.values():
        _check_uses(flow, flow.group_uses(each), 0)


def _user(flow: RankFlow, use: Use) -> Action | None:
    return None if use.event == RETURN else flow.actions[use.event]


def _check_others(flow: RankFlow) -> None:
    """Checks functions outside the schedule: each result is used, and no call reads a value of a
    microbatch, or a message, twice."""
    reading = flow.reading
    for event in reading.events:
        if not isinstance(event, RankCall) or event.action is not None:
            continue
        for number, origin in enumerate(event.results):
            if not reading.origins.uses(origin):
                said = f"result {number} of @{event.function} is not used"
                flow.findings.add(ProofRule.OPERANDS, said, reading, event.op)
        counted = Counter(
            origin
            for origin in event.operands
            if flow.action_of(origin) is not None or origin.source is Source.MESSAGE
        )
        for origin, count in counted.items():
            if count > 1:
                said = f"@{event.function} reads {reading.describe_origin(origin)} {count} times"
                flow.findings.add(ProofRule.OPERANDS, said, reading, event.op)


class Relative(NamedTuple):
    """A value from the view of a call; `is_own` says if it is of the call's own microbatch.

    `name` is a function, or a receive without its microbatch. If the value is the same for all
    microbatches, `name` is empty and `origin` is the value.
    """

    name: str
    number: int
    is_own: bool
    origin: Origin | None


@dataclass(frozen=True, eq=False)
class CallView:
    """The operands of a call, relative to its microbatch, by position. Operand 0, the number of the
    microbatch, is left out. Calls with the same operands share one view."""

    taken: dict[int, Relative]


class Used(NamedTuple):
    """An event, and the uses of each of its results, relative to its microbatch."""

    event: Event
    uses: Sequence[tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class RankFlow:
    """The shared state of a rank's checks. Operands and uses are computed once per form of call."""

    reading: RankReading
    labels: Mapping[int, Label]
    actions: Sequence[Action | None]
    findings: RankFindings
    calls: dict[str, list[RankCall]]
    _views: dict[object, CallView] = field(default_factory=dict[object, CallView])
    _used: dict[object, list[tuple[str, ...]]] = field(
        default_factory=dict[object, list[tuple[str, ...]]]
    )

    def relative(self, origin: Origin, microbatch: int) -> Relative:
        """Returns a value from the view of a microbatch."""
        action = self.action_of(origin)
        if action is None:
            return Relative("", 0, True, origin)
        is_own = action.microbatch == microbatch
        event = self.reading.events[origin.event]
        if isinstance(event, RankCall):
            return Relative(event.function, origin.number, is_own, None)
        return Relative(f"{action.stage}{action.kind.value}", self._tensor(event), is_own, None)

    def view(self, call: RankCall) -> CallView:
        """Returns the operands of a call of the schedule."""
        microbatch, operands = microbatch_of(call), call.operands
        fixed = [origin for origin in operands[1:] if origin.event < 0]
        makers = self.reading.origins.makers[call.index]
        seen = [(self._relative_identity(maker, microbatch), taken) for maker, taken in makers]
        looks = (call.function, *fixed, *seen)
        if looks not in self._views:
            taken = [self.relative(origin, microbatch) for origin in operands]
            self._views[looks] = CallView({i: taken[i] for i in range(1, len(taken))})
        return self._views[looks]

    @cached_property
    def views(self) -> dict[str, list[list[CallView]]]:
        """The operands of the calls of each function, in groups as in `alike`."""
        return {
            function: [list(dict.fromkeys(map(self.view, group))) for group in self.alike(calls)]
            for function, calls in self.calls.items()
        }

    def group_uses(self, events: Sequence[Event]) -> list[list[Used]]:
        """Returns the uses of the results of events of the schedule, in groups as in `alike`."""
        return [[Used(event, self._uses(event)) for event in group] for group in self.alike(events)]

    def _uses(self, event: Event) -> Sequence[tuple[str, ...]]:
        action = self.actions[event.index]
        assert action is not None, "it is of the schedule"
        takers = self.reading.origins.takers[event.index]
        seen = [
            (self._relative_identity(taker, action.microbatch), taken) for taker, taken in takers
        ]
        looks = (self._names[event.index], *seen)
        if looks not in self._used:
            self._used[looks] = [_uses(self, origin, action.microbatch) for origin in event.results]
        return self._used[looks]

    def _relative_identity(self, event: int, microbatch: int) -> object:
        """Returns the part of an event's identity that matters to an event of `microbatch`."""
        action = None if event < 0 else self.actions[event]
        return event if action is None else (self._names[event], action.microbatch == microbatch)

    @cached_property
    def _names(self) -> list[object]:
        """The identity of each event of the schedule without its microbatch."""
        names: list[object] = []
        for event, action in zip(self.reading.events, self.actions, strict=True):
            if isinstance(event, RankCall):
                names.append(event.function)
            else:
                names.append(action and (action.kind, action.stage, self._tensor(event)))
        return names

    def _tensor(self, message: RankMessage) -> int:
        label = self.labels.get(message.index)
        assert label is not None, "it belongs to an action"
        return label.tensor

    @cached_property
    def phases(self) -> dict[int, tuple[str, ...]]:
        """The functions that are called for each microbatch, sorted by name.

        A schedule may run one backward for a microbatch, and two separate gradients for another.
        """
        readers: defaultdict[int, set[str]] = defaultdict(set)
        for call in self.reading.calls:
            readers[microbatch_of(call)].add(call.function)
        return {microbatch: tuple(sorted(names)) for microbatch, names in readers.items()}

    def alike[E: Event](self, events: Sequence[E]) -> list[list[E]]:
        """Returns the events in groups whose microbatches run the same phases."""
        groups: defaultdict[tuple[str, ...], list[E]] = defaultdict(list)
        for event in events:
            action = self.actions[event.index]
            assert action is not None, "it is of the schedule"
            groups[self.phases.get(action.microbatch, ())].append(event)
        return list(groups.values())

    def loosely(self, relative: Relative) -> Relative:
        """Returns a form in which all gradients of a stage are equal, to compare different
        phases."""
        phase = phase_of(relative.name)
        if phase is None or phase[0] is ActionKind.FORWARD:
            return relative
        return Relative(f"a gradient of stage {phase[1]}", 0, relative.is_own, None)

    def action_of(self, origin: Origin) -> Action | None:
        """Returns the phase or receive that yields a value; None if it is outside the schedule."""
        return None if origin.event < 0 else self.actions[origin.event]


class Slot(NamedTuple):
    """An operand or a result of a function of the schedule."""

    function: str
    number: int


type Group = tuple[list[Slot], list[Slot]]  # operands and results


@dataclass(frozen=True)
class InSums:
    """The operands and the results that belong to sums.

    `chains` has the results of each sum, one for each function that adds to it.
    """

    operands: set[Slot] = field(default_factory=set[Slot])
    results: set[Slot] = field(default_factory=set[Slot])
    chains: list[tuple[Slot, ...]] = field(default_factory=list[tuple[Slot, ...]])


def check_sums(flow: RankFlow, uneven: Sequence[Slot], even: Sequence[Slot]) -> InSums:
    """Finds the sums among the `uneven` operands, which differ between calls, and checks them.

    If stages of the rank take turns in a sum, some of its operands are always the result of another
    stage for the same microbatch. These are among the `even` operands.
    """
    in_sums = InSums()
    dependences = Dependences(flow.reading.module)
    groups = _connected_groups(flow, uneven)
    turns = [([slot], _results_of(flow, slot)) for slot in even]
    groups = _with_turns(groups, [group for group in turns if group[1]], dependences)
    for operands, results in _join_groups(groups, dependences):
        entries = {slot.function: slot.number for slot in operands}
        exits = {slot.function: slot.number for slot in results}
        if len(entries) < len(operands) or len(exits) < len(results):
            continue
        links = _links(flow, entries, exits, dependences)
        if links is None:
            continue
        in_sums.operands.update(operands)
        chain = tuple(Slot(function, link.result) for function, link in links.items())
        in_sums.results.update(chain)
        in_sums.chains.append(chain)
        _check_chain(flow, links)
        for function, link in links.items():
            if (
                link.operand is None
                or link.operand in dependences.result_dependences(function)[link.result]
            ):
                continue
            said = (
                f"operand {link.operand} of @{function} is a sum that continues as result "
                f"{link.result}, but that result does not depend on it"
            )
            flow.findings.add(ProofRule.SUMS, said, flow.reading, flow.calls[function][0].op)
    return in_sums


class SumLink(NamedTuple):
    """The operand and the result of a function that a sum goes through.

    The operand is None for a function that is called once and begins the sum.
    """

    operand: int | None
    result: int


def _links(
    flow: RankFlow, entries: dict[str, int], exits: dict[str, int], dependences: Dependences
) -> dict[str, SumLink] | None:
    """Returns the link of a sum in each of its functions; None if this is not a sum.

    A function that is called once may begin the sum, without an operand, or end it, without a
    result.
    """
    calls = [call for call in flow.reading.calls if call.function in {*entries, *exits}]
    links: dict[str, SumLink] = {}
    for function in dict.fromkeys(call.function for call in calls):
        is_once = len(flow.calls[function]) == 1
        if function in entries and function in exits:
            links[function] = SumLink(entries[function], exits[function])
        elif function in exits and is_once and calls[0].function == function:
            links[function] = SumLink(None, exits[function])
        elif function in entries and is_once and calls[-1].function == function:
            result = _left_by(flow, calls[-1], entries[function], dependences)
            if result is None:
                return None
            links[function] = SumLink(entries[function], result)
        else:
            return None
    return links


def _left_by(flow: RankFlow, call: RankCall, entry: int, dependences: Dependences) -> int | None:
    """Returns the result of the last call that is the sum: it has its type and depends on it.
    Returns None if there is no such result."""
    type_ = call.op.operands[entry].type
    for number, depends in enumerate(dependences.result_dependences(call.function)):
        uses = flow.reading.origins.uses(call.results[number])
        is_behind = all(_user(flow, use) is None for use in uses)
        if entry in depends and call.op.results[number].type == type_ and uses and is_behind:
            return number
    return None


def _connected_groups(flow: RankFlow, uneven: Sequence[Slot]) -> list[Group]:
    """Returns groups of operands and results of actions that are connected by values."""
    feeding = {slot: _results_of(flow, slot) for slot in uneven}
    groups: list[Group] = []
    left = list(uneven)
    while left:
        operands, results = [left.pop(0)], list[Slot]()
        for slot in operands:  # the list grows in the loop
            results += [result for result in feeding[slot] if result not in results]
            linked = [other for other in left if any(r in results for r in feeding[other])]
            left = [other for other in left if other not in linked]
            operands += linked
        groups.append((operands, results))
    return groups


def _join_groups(groups: list[Group], dependences: Dependences) -> list[Group]:
    """Returns the groups, with the groups of one sum joined.

    Two groups are joined if a function reads the sum as an operand of one and returns it as a
    result of the other. This happens if several functions take turns.
    """
    closed: list[Group] = []
    for group in groups:
        joined = group
        for other in [one for one in closed if _continues(one, joined, dependences)]:
            closed.remove(other)
            joined = ([*other[0], *joined[0]], [*other[1], *joined[1]])
        closed.append(joined)
    return closed


def _with_turns(groups: list[Group], turns: list[Group], dependences: Dependences) -> list[Group]:
    """Returns the groups, with the `turns` that continue a sum in another function."""
    left = list(turns)
    joined = list(groups)
    for i in range(len(joined)):
        while True:
            fitting = next((t for t in left if _takes_turns(joined[i], t, dependences)), None)
            if fitting is None:
                break
            left.remove(fitting)
            joined[i] = ([*joined[i][0], *fitting[0]], [*joined[i][1], *fitting[1]])
    return joined


def _takes_turns(group: Group, turn: Group, dependences: Dependences) -> bool:
    """Returns True if an operand depends on the sum, and the sum on the operand."""
    operands, taken = group[0], turn[1]
    comes_from = any(
        slot.function == result.function
        and slot.number in dependences.result_dependences(slot.function)[result.number]
        for slot in operands
        for result in taken
    )
    return comes_from and _continues(group, turn, dependences)


def _continues(one: Group, other: Group, dependences: Dependences) -> bool:
    # A function links the groups if it has an operand but no result in one, and a result but no
    # operand in the other.
    for (operands, results), (others, left) in ((one, other), (other, one)):
        given = {slot.function for slot in left}
        taken = {slot.function for slot in operands}
        for entry in others:
            if entry.function in given:
                continue
            for result in results:
                is_open = result.function == entry.function and result.function not in taken
                if (
                    is_open
                    and entry.number
                    in dependences.result_dependences(entry.function)[result.number]
                ):
                    return True
    return False


def _results_of(flow: RankFlow, slot: Slot) -> list[Slot]:
    """Returns the results of actions that some call reads as this operand."""
    taken = [view.taken[slot.number] for view in chain(*flow.views[slot.function])]
    results = [Slot(one.name, one.number) for one in taken if phase_of(one.name) is not None]
    return list(dict.fromkeys(results))


def _check_chain(flow: RankFlow, links: dict[str, SumLink]) -> None:
    reading = flow.reading
    calls = [call for call in reading.calls if call.function in links]
    before: RankCall | None = None
    for call, behind in zip(calls, [*calls[1:], None], strict=True):
        entry, left = links[call.function]
        if entry is not None:
            taken, said = call.operands[entry], ""
            if before is None and flow.action_of(taken) is not None:
                said = "where the first action of the sum reads a prepared value"
            if before is not None:
                number = links[before.function].result
                if taken != before.results[number]:
                    said = f"where result {number} of {before.action} is expected"
            if said:
                value = reading.describe_origin(taken)
                what = f"{call.action} reads {value} as operand {entry}, {said}"
                flow.findings.add(ProofRule.SUMS, what, reading, call.op)
        _check_taken(flow, call, call.results[left], behind, links)
        before = call


def _check_taken(
    flow: RankFlow, call: RankCall, left: Origin, behind: RankCall | None, links: dict[str, SumLink]
) -> None:
    """Checks that only the next call reads a sum; after the last call, only the finish."""
    uses = flow.reading.origins.uses(left)
    if behind is not None:
        if uses == [Use(behind.index, links[behind.function].operand or 0)]:
            return
        expected = f"{behind.action} alone"
    else:
        if uses and all(_user(flow, use) is None for use in uses):
            return
        expected = "calls after the schedule only"
    said = f"{flow.reading.describe_origin(left)} is a sum that must be read by {expected}"
    flow.findings.add(ProofRule.SUMS, said, flow.reading, call.op)
