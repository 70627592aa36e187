"""Whether all participants of every collective issue it, and equally often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.order.findings import Actor, Finding, Verdict, actor_of, at, describe, name
from stablehlo_tools.order.program import (
    Block,
    Branch,
    Issue,
    Program,
    Signature,
    decision_of,
    reached_blocks,
)

type Key = tuple[Signature, tuple[int, ...]]


@dataclass(frozen=True)
class Occurrence:
    """A collective that a device issues, so many times."""

    device: int
    issue: Issue
    key: Key
    times: int


def find_missing_program(programs: Sequence[Program]) -> Finding | None:
    """The first collective, in text order, with a participant that runs none of the programs."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    complete: set[tuple[int, ...]] = set()  # members who all run a program
    for number, program in enumerate(programs):
        for issue in _reached(program.block):
            for meeting in issue.rendezvous:
                if meeting.members in complete:
                    continue
                own = next((d for d in meeting.issuers if program_of.get(d) == number), None)
                missing = next((d for d in meeting.members if d not in program_of), None)
                if own is not None and missing is not None:
                    return _no_program(programs, number, own, issue, missing)
                if missing is None:
                    complete.add(meeting.members)
    return None


def _reached(block: Block) -> Iterator[Issue]:
    for node in block.nodes:
        if isinstance(node, Issue):
            yield node
        for inner in reached_blocks(node):
            yield from _reached(inner)


def find_disagreement(programs: Sequence[Program]) -> Finding | None:
    """The first collective, in text order, that its participants do not issue equally often."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    counts: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    first: dict[Key, Occurrence] = {}
    for program in programs:
        for device in program.devices:
            for occurrence in occurrences(program.block, device):
                at_key = counts[occurrence.key]
                at_key[device] = at_key.get(device, 0) + occurrence.times
                first.setdefault(occurrence.key, occurrence)
    for key, occurrence in first.items():
        _, members = key
        expected = counts[key].get(occurrence.device, 0)
        for member in members:
            if member not in program_of:
                number = program_of[occurrence.device]
                return _no_program(programs, number, occurrence.device, occurrence.issue, member)
            if counts[key].get(member, 0) != expected:
                return _explain(programs, program_of, counts, occurrence, member)
    return None


def occurrences(block: Block, device: int, times: int = 1) -> Iterator[Occurrence]:
    """What a device issues of a block; what is decided at run time is left aside."""
    for node in block.nodes:
        if isinstance(node, Issue):
            meeting = node.of_device.get(device)
            if meeting is not None and times:
                yield Occurrence(device, node, (node.signature, meeting.members), times)
            continue
        values = decision_of(node).values
        if values is None:
            continue
        if isinstance(node, Branch):
            yield from occurrences(node.branches[values[device]], device, times)
        else:
            yield from occurrences(node.body, device, times * values[device])
            yield from occurrences(node.condition, device, times * (values[device] + 1))


def _no_program(
    programs: Sequence[Program], number: int, device: int, issue: Issue, member: int
) -> Finding:
    message = (
        f"{name(issue)} at {at(programs, number, issue.place)} waits for device {member}, which "
        "runs none of the programs"
    )
    actors = (actor_of(number, device, issue),)
    return Finding(Verdict.MISMATCH, "missing-program", message, actors, confirmed=True)


def _explain(
    programs: Sequence[Program],
    program_of: dict[int, int],
    counts: defaultdict[Key, dict[int, int]],
    occurrence: Occurrence,
    member: int,
) -> Finding:
    """Says how two participants differ, and what the other one has in its place."""
    key, device = occurrence.key, occurrence.device
    here, there = counts[key].get(device, 0), counts[key].get(member, 0)
    more, less = (device, member) if here > there else (member, device)
    issue = _issue_of(programs[program_of[more]], more, key) or occurrence.issue
    most, least = max(here, there), min(here, there)
    number, other = program_of[more], program_of[less]
    place = at(programs, number, issue.place)
    often = "" if most == 1 else f" {most} times"
    rather = "never does" if not least else f"does {least} times"
    message = (
        f"device {more} issues {describe(issue)}{often} ({place}); its participant device {less} "
        f"{rather} ({programs[other].name})"
    )
    if issue.transfer and not least:
        wanted = "recv" if issue.transfer == "send" else "send"
        message = (
            f"device {more} issues {describe(issue)}{often} ({place}); device {less} has no "
            f"{wanted} for it ({programs[other].name})"
        )
    rule, hint, actors = _instead(programs, other, less, key, counts)
    told = (
        f"device {more} waits in {name(issue)} for device {less} for ever",
        *([hint] if hint else []),
    )
    actors = actors or (Actor(other, less, "the end of the program", programs[other].place),)
    return Finding(
        Verdict.MISMATCH,
        rule,
        message,
        (actor_of(number, more, issue), *actors),
        told,
        confirmed=True,
    )


def _issue_of(program: Program, device: int, key: Key) -> Issue | None:
    listed = occurrences(program.block, device)
    return next((occurrence.issue for occurrence in listed if occurrence.key == key), None)


def _instead(
    programs: Sequence[Program],
    number: int,
    device: int,
    key: Key,
    counts: defaultdict[Key, dict[int, int]],
) -> tuple[str, str, tuple[Actor, ...]]:
    """What a device that lacks a collective has in its place: a rule, a hint, an actor."""
    signature, members = key
    program = programs[number]
    for issue in program.dead:
        meeting = issue.of_device.get(device)
        if issue.signature == signature and meeting is not None and meeting.members == members:
            where = at(programs, number, issue.place)
            hint = f"{program.name} has it ({where}), but nobody uses its results: XLA deletes it"
            return "dead-collective", hint, (actor_of(number, device, issue),)
    for occurrence in occurrences(program.block, device):
        other, others = occurrence.key
        same = all(
            counts[occurrence.key].get(m, 0) == counts[occurrence.key][device] for m in others
        )
        is_this = occurrence.key == key  # it has the same one too, but not as often
        if same or is_this or (other.kind != signature.kind and others != members):
            continue
        rule = _difference(signature, other, members, others)
        where = at(programs, number, occurrence.issue.place)
        hint = f"{program.name} issues {describe(occurrence.issue)} among {list(others)} at {where}"
        return rule, hint, (actor_of(number, device, occurrence.issue),)
    kind = "unmatched-transfer" if signature.kind == "transfer" else "missing-collective"
    return kind, "", ()


def _difference(
    one: Signature, other: Signature, members: tuple[int, ...], others: tuple[int, ...]
) -> str:
    """In what two collectives differ, the gravest first."""
    if one.kind != other.kind:
        return "kind"
    if members != others:
        return "groups"
    if one.types != other.types:
        same = [_element_type(a) for a in one.types] == [_element_type(b) for b in other.types]
        return "shape" if same else "element-type"
    return "reduction-or-dimensions"


def _element_type(text: str) -> str:
    """`f32` of `tensor<4x8xf32>`; of several types, all of them."""
    return " ".join(part.split("x")[-1].rstrip(">,").split("<")[-1] for part in text.split())
