"""Collectives that some of their participants may reach and others not, within one program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stablehlo_tools.order.agreement import occurrences
from stablehlo_tools.order.findings import Actor, Finding, Verdict, actor_of, at, describe, name
from stablehlo_tools.order.program import (
    Block,
    Branch,
    Decision,
    Issue,
    Loop,
    Program,
    Rendezvous,
    decision_of,
    footprint,
    reached_blocks,
)


def find_divergence(programs: Sequence[Program]) -> Finding | None:
    """The first collective under a decision that its participants may take differently."""
    for number, program in enumerate(programs):
        for issue, meeting, node in _doubtful(program.block, (), frozenset(program.devices)):
            return _finding(programs, number, issue, meeting, node)
    return None


def find_foreign_decision(programs: Sequence[Program]) -> Finding | None:
    """A decision made at run time around a collective that another program takes part in.

    One with a symbol is no such, where the other device has as many with the same.
    """
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    symbols = {
        device: Counter(decision_of(node).symbols.get(device) for node in nodes)
        for program, nodes in ((p, list(_undecided(p.block))) for p in programs)
        for device in program.devices
    }
    for number, program in enumerate(programs):
        for node in _undecided(program.block):
            known = decision_of(node).symbols
            for meeting in sorted(footprint(node), key=lambda m: m.members):
                own = next((d for d in meeting.issuers if program_of.get(d) == number), None)
                for other in meeting.members:
                    theirs = program_of.get(other, number)
                    if own is None or theirs == number:
                        continue
                    symbol = known.get(own)
                    if symbol is None or symbols[own][symbol] != symbols[other][symbol]:
                        return _foreign(programs, number, node, own, other, theirs)
    return None


def _doubtful(
    block: Block, around: tuple[Loop | Branch, ...], devices: frozenset[int]
) -> Iterator[tuple[Issue, Rendezvous, Loop | Branch]]:
    for node in block.nodes:
        if not isinstance(node, Issue):
            for inner in reached_blocks(node):
                yield from _doubtful(inner, (*around, node), devices)
            continue
        for meeting in node.rendezvous if around else ():
            for above in around:
                decision = decision_of(above)
                # The other end of a transfer is another op, which may stand elsewhere.
                together = meeting.members if decision.values is None else meeting.issuers
                if not decision.agree([device for device in together if device in devices]):
                    yield node, meeting, above


def _undecided(block: Block) -> Iterator[Loop | Branch]:
    for node in block.nodes:
        if isinstance(node, Issue):
            continue
        if decision_of(node).values is None:
            yield node
        else:
            for inner in reached_blocks(node):
                yield from _undecided(inner)


def _finding(
    programs: Sequence[Program], number: int, issue: Issue, meeting: Rendezvous, node: Loop | Branch
) -> Finding:
    decision = decision_of(node)
    inside = [device for device in meeting.members if device in decision.classes]
    one, other = _disagreeing(decision, inside)
    what = "how often the loop runs" if isinstance(node, Loop) else "which branch is taken"
    known = decision.values is not None
    where = at(programs, number, node.place)
    message = (
        f"{name(issue)} at {at(programs, number, issue.place)} stands inside a "
        f"{describe(node)} at {where}, and {what} "
        + ("differs between" if known else "may differ between")
        + f" its participants {one} and {other}"
    )
    is_certain = False
    if decision.values is not None:
        verb = "runs the loop {} times" if isinstance(node, Loop) else "takes branch {}"
        told = tuple(f"device {d} {verb.format(decision.values[d])}" for d in (one, other))
        often = [_times(programs[number].block, d, issue, meeting) for d in (one, other)]
        is_certain = often[0] != often[1]
        if is_certain:
            first, second = (one, other) if often[0] > often[1] else (other, one)
            told += (f"device {first} waits in {name(issue)} for device {second} for ever",)
    else:
        told = (
            f"nothing shows that device {one} and device {other} decide alike",
            f"device {one} reaches the {name(issue)} and waits for device {other}, which does not",
        )
    actors = (actor_of(number, one, issue), Actor(number, other, describe(node), node.place))
    return Finding(
        Verdict.MAY_DEADLOCK,
        "divergent-control-flow",
        message,
        actors,
        told,
        confirmed=is_certain,
    )


def _times(block: Block, device: int, issue: Issue, meeting: Rendezvous) -> int:
    """How often a device issues what could meet in a rendezvous of a collective."""
    key = issue.signature, meeting.members
    return sum(
        occurrence.times for occurrence in occurrences(block, device) if occurrence.key == key
    )


def _foreign(
    programs: Sequence[Program], number: int, node: Loop | Branch, own: int, other: int, theirs: int
) -> Finding:
    what = "how often the loop runs" if isinstance(node, Loop) else "which branch is taken"
    place = at(programs, number, node.place)
    message = (
        f"the {describe(node)} at {place} communicates with {programs[theirs].name}, and {what} is "
        "decided at run time: nothing shows that the other program decides alike"
    )
    told = (
        f"device {own} goes into the {describe(node)} and waits for device {other}",
        f"device {other}, in {programs[theirs].name}, does not meet it there",
    )
    actors = (
        actor_of(number, own, node),
        Actor(theirs, other, "another program", programs[theirs].place),
    )
    return Finding(Verdict.MAY_DEADLOCK, "decided-at-run-time", message, actors, told)


def _disagreeing(decision: Decision, devices: Sequence[int]) -> tuple[int, int]:
    """Two of the devices that need not decide alike."""
    known = decision.classes if decision.values is None else decision.values
    return devices[0], next(d for d in devices if known[d] != known[devices[0]])
