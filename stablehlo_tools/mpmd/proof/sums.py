"""What goes from microbatch to microbatch: sums of gradients, above all. M4.

Such a value is an operand and a result of every function that adds to it. The calls of these
functions, in the order of the text, make one chain: the first takes what was prepared, every other
one what the call before left, and nobody but the next call, or for the last one what comes behind
the schedule, takes a result. In the function itself the result depends on the operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stablehlo_tools.mpmd.proof.dependence import Dependences
from stablehlo_tools.mpmd.proof.findings import Rule
from stablehlo_tools.mpmd.proof.relative import Flow
from stablehlo_tools.mpmd.reading import RETURN, Call, Origin, Source, Use
from stablehlo_tools.schedules.table import Action


class Slot(NamedTuple):
    """An operand, or a result, of a function of the schedule."""

    function: str
    number: int


type Group = tuple[list[Slot], list[Slot]]  # operands and results


@dataclass(frozen=True)
class InSums:
    """The operands and the results that belong to sums.

    `chains` are the results of each sum: one for every function that adds to it.
    """

    operands: set[Slot] = field(default_factory=set[Slot])
    results: set[Slot] = field(default_factory=set[Slot])
    chains: list[tuple[Slot, ...]] = field(default_factory=list[tuple[Slot, ...]])


def check_sums(
    flow: Flow, uneven: Sequence[tuple[str, int]], even: Sequence[tuple[str, int]]
) -> InSums:
    """Finds the sums among the operands that are not the same for all calls, and checks them.

    Where stages of the rank take turns, some of these operands are always what another stage left
    for the same microbatch: one of the `even`.
    """
    found = InSums()
    dependences = Dependences(flow.reading.module)
    groups = _linked(flow, [Slot(*slot) for slot in uneven])
    turns = [([Slot(*slot)], _results_of(flow, Slot(*slot))) for slot in even]
    groups = _with_turns(groups, [group for group in turns if group[1]], dependences)
    for operands, results in _closed(groups, dependences):
        entries = {slot.function: slot.number for slot in operands}
        exits = {slot.function: slot.number for slot in results}
        if len(entries) < len(operands) or len(exits) < len(results):
            continue
        links = _links(flow, entries, exits, dependences)
        if links is None:
            continue
        found.operands.update(operands)
        chain = tuple(Slot(function, link.result) for function, link in links.items())
        found.results.update(chain)
        found.chains.append(chain)
        _check_chain(flow, links)
        for function, link in links.items():
            if link.operand is None or link.operand in dependences.of(function)[link.result]:
                continue
            said = (
                f"operand {link.operand} of @{function} is a sum that goes on as its result "
                f"{link.result}, which is not computed from it"
            )
            flow.findings.add(Rule.SUMS, said, flow.reading, flow.calls[function][0].op)
    return found


class Link(NamedTuple):
    """The operand and the result of a function that a sum goes through.

    The operand is not known of the function that begins the sum, and is called but once.
    """

    operand: int | None
    result: int


def _links(
    flow: Flow, entries: dict[str, int], exits: dict[str, int], dependences: Dependences
) -> dict[str, Link] | None:
    """How a sum goes through each of its functions; None where this is no sum.

    No link leads into a function that is called once, and first, nor out of one called once, last.
    """
    calls = [call for call in flow.reading.calls if call.function in {*entries, *exits}]
    links: dict[str, Link] = {}
    for function in dict.fromkeys(call.function for call in calls):
        is_once = len(flow.calls[function]) == 1
        if function in entries and function in exits:
            links[function] = Link(entries[function], exits[function])
        elif function in exits and is_once and calls[0].function == function:
            links[function] = Link(None, exits[function])
        elif function in entries and is_once and calls[-1].function == function:
            result = _left_by(flow, calls[-1], entries[function], dependences)
            if result is None:
                return None
            links[function] = Link(entries[function], result)
        else:
            return None
    return links


def _left_by(flow: Flow, call: Call, entry: int, dependences: Dependences) -> int | None:
    """The result that the last call leaves of a sum: of its type, and computed from it."""
    kind = call.op.operands[entry].type
    for number, depends in enumerate(dependences.of(call.function)):
        uses = flow.reading.uses.get(Origin(Source.CALL, number, call.index), [])
        is_behind = all(_user(flow, use) is None for use in uses)
        if entry in depends and call.op.results[number].type == kind and uses and is_behind:
            return number
    return None


def _linked(flow: Flow, uneven: Sequence[Slot]) -> list[Group]:
    """Groups of operands and results of actions that values go between."""
    feeding = {slot: _results_of(flow, slot) for slot in uneven}
    groups: list[Group] = []
    left = list(uneven)
    while left:
        operands, results = [left.pop(0)], list[Slot]()
        for slot in operands:  # which grows
            results += [result for result in feeding[slot] if result not in results]
            linked = [other for other in left if any(r in results for r in feeding[other])]
            left = [other for other in left if other not in linked]
            operands += linked
        groups.append((operands, results))
    return groups


def _closed(groups: list[Group], dependences: Dependences) -> list[Group]:
    """The groups, those joined that are parts of one sum: a function takes it as one of the one
    group, and gives it as one of the other. So it is where several functions take turns."""
    closed: list[Group] = []
    for group in groups:
        joined = group
        for other in [one for one in closed if _continues(one, joined, dependences)]:
            closed.remove(other)
            joined = ([*other[0], *joined[0]], [*other[1], *joined[1]])
        closed.append(joined)
    return closed


def _with_turns(groups: list[Group], turns: list[Group], dependences: Dependences) -> list[Group]:
    """The groups, with the operands that go on with a sum in another function."""
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
    """Whether what an operand takes was computed from the sum, and leads to it."""
    operands, taken = group[0], turn[1]
    comes_from = any(
        slot.function == result.function
        and slot.number in dependences.of(slot.function)[result.number]
        for slot in operands
        for result in taken
    )
    return comes_from and _continues(group, turn, dependences)


def _continues(one: Group, other: Group, dependences: Dependences) -> bool:
    for (operands, results), (others, left) in ((one, other), (other, one)):
        given = {slot.function for slot in left}
        taken = {slot.function for slot in operands}
        for entry in others:
            if entry.function in given:
                continue
            for result in results:
                is_open = result.function == entry.function and result.function not in taken
                if is_open and entry.number in dependences.of(entry.function)[result.number]:
                    return True
    return False


def _results_of(flow: Flow, slot: Slot) -> list[Slot]:
    """The results of actions that an operand takes in one call or another."""
    found: dict[Slot, None] = {}
    for call in flow.calls[slot.function]:
        origin = call.operands[slot.number]
        maker = flow.reading.events[origin.event] if origin.source is Source.CALL else None
        if isinstance(maker, Call) and maker.action is not None:
            found[Slot(maker.function, origin.number)] = None
    return list(found)


def _check_chain(flow: Flow, links: dict[str, Link]) -> None:
    reading = flow.reading
    calls = [call for call in reading.calls if call.function in links]
    before: Call | None = None
    for call, behind in zip(calls, [*calls[1:], None], strict=True):
        entry, left = links[call.function]
        if entry is not None:
            said = _wrongly_taken(flow, call.operands[entry], before, links)
            if said:
                what = f"{call.action} takes {reading.described(call.operands[entry])}"
                finding = f"{what} as operand {entry}, {said}"
                flow.findings.add(Rule.SUMS, finding, reading, call.op)
        _check_taken(flow, call, Origin(Source.CALL, left, call.index), behind, links)
        before = call


def _wrongly_taken(flow: Flow, taken: Origin, before: Call | None, links: dict[str, Link]) -> str:
    if before is None:
        is_first = flow.action_of(taken) is None
        return "" if is_first else "where the first action of the sum takes what was prepared"
    left = links[before.function].result
    if taken == Origin(Source.CALL, left, before.index):
        return ""
    return f"where it is to take result {left} of {before.action}"


def _check_taken(
    flow: Flow, call: Call, left: Origin, behind: Call | None, links: dict[str, Link]
) -> None:
    """What a call leaves of a sum is taken by the next call alone, or by what is behind them."""
    uses = flow.reading.uses.get(left, [])
    if behind is not None:
        is_right = uses == [Use(behind.index, links[behind.function].operand or 0)]
        expected = f"{behind.action} alone"
    else:
        is_right = bool(uses) and all(_user(flow, use) is None for use in uses)
        expected = "what comes behind the schedule alone"
    if not is_right:
        said = f"{flow.reading.described(left)} is a sum that is to be taken by {expected}"
        flow.findings.add(Rule.SUMS, said, flow.reading, call.op)


def _user(flow: Flow, use: Use) -> Action | None:
    if use.event == RETURN:
        return None
    event = flow.reading.events[use.event]
    if isinstance(event, Call):
        return event.action
    label = flow.labels.of(flow.reading, use.event)
    return None if label is None else label.action
