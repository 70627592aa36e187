"""Takes devices of a program that do the same for one device, so that fewer are left to look at.

    rank 0 on devices 0 to 63, rank 1 on 64 to 127, device i sends to device 64 + i
==>
    device 0 sends to device 64

Devices of a class run one program, issue the same collectives and decide alike. What the classes
issue together then counts as one meeting of all of them, in which everyone waits for more than in
truth. Where the programs end so in one order of meetings, each device comes to its own meetings in
that order too, and they end: what is ordered so is ordered. The converse does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.order.components import connected
from stablehlo_tools.order.program import (
    Decision,
    Issue,
    Program,
    Rendezvous,
    blocks_of,
    decision_of,
    issues_of,
    rebuilt,
)


def by_classes(programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs with one device for each class; None where there are no fewer.

    Also where a transfer links devices of one class, or one class to several.
    """
    first = {d: members[0] for p in programs for members in _classes(p) for d in members}
    if all(device == kept for device, kept in first.items()):
        return None
    merged: list[Program] = []
    for program in programs:
        issues = {issue: _merged(issue, first) for issue in issues_of(program.block)}
        if None in issues.values():
            return None
        block = rebuilt(
            program.block,
            lambda issue, issues=issues: issues[issue] or issue,
            lambda decision: _of_first(decision, first),
        )
        devices = tuple(dict.fromkeys(first[device] for device in program.devices))
        merged.append(replace(program, devices=devices, block=block, dead=()))
    return tuple(merged)


def _classes(program: Program) -> list[list[int]]:
    """The devices of a program that issue the same and decide alike."""
    told: dict[int, list[object]] = {device: [] for device in program.devices}
    for issue in issues_of(program.block):
        for device in program.devices:
            told[device].append(device in issue.of_device)
    for block in blocks_of(program.block):
        for node in block.nodes:
            if isinstance(node, Issue):
                continue
            known = decision_of(node)
            for device in program.devices:
                value = None if known.values is None else known.values[device]
                told[device].append((known.classes[device], value, known.symbols.get(device)))
    alike: dict[tuple[object, ...], list[int]] = {}
    for device in program.devices:
        alike.setdefault(tuple(told[device]), []).append(device)
    return list(alike.values())


def _merged(issue: Issue, first: Mapping[int, int]) -> Issue | None:
    """A collective of the classes; None for a transfer that is none between two of them."""
    if issue.transfer:
        return _transfer(issue, first)
    linked = [tuple({first.get(d, d) for d in meeting.members}) for meeting in issue.rendezvous]
    parts = connected(linked, ())
    return replace(issue, rendezvous=tuple(Rendezvous(part, part) for part in parts))


def _transfer(issue: Issue, first: Mapping[int, int]) -> Issue | None:
    meetings = dict.fromkeys(
        Rendezvous(_firsts(meeting.members, first), _firsts(meeting.issuers, first))
        for meeting in issue.rendezvous
    )
    links = tuple(dict.fromkeys(_firsts(pair, first) for pair in issue.groups))
    issuers = [device for meeting in meetings for device in meeting.issuers]
    if len(set(issuers)) < len(issuers) or any(one == other for one, other in links):
        return None
    if any(len(set(meeting.members)) < 2 for meeting in meetings):
        return None
    return replace(issue, rendezvous=tuple(meetings), groups=links)


def _firsts(devices: Sequence[int], first: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(first.get(device, device) for device in devices)


def _of_first(decision: Decision, first: Mapping[int, int]) -> Decision:
    """A decision of the devices that stand for their classes."""
    kept = [device for device in decision.classes if first.get(device) == device]
    values = decision.values
    return replace(
        decision,
        classes={device: decision.classes[device] for device in kept},
        values=None if values is None else {device: values[device] for device in kept},
        symbols={d: decision.symbols[d] for d in kept if d in decision.symbols},
    )
