"""Checks that every participant of a collective reaches it, and equally often.

`pair_transfers` first pairs sends and recvs without devices, by the channel that they share. Within
one program, devices may decide a loop or a branch differently (`find_divergence`). A decision made
at run time may concern another program (`find_foreign_decision`). Over all programs, each
participant must issue each collective as often as the others do (`find_missing_program`,
`find_disagreement`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.order.order_findings import (
    Actor,
    OrderFinding,
    Verdict,
    actor_of,
    describe,
    name,
    place_text,
)
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    Rendezvous,
    decision_of,
    footprint,
    issues_of,
    reached_blocks,
    rebuilt,
)

type _Channel = dict[
    str, dict[int, CollectiveIssue]
]  # for `send` and `recv`: a transfer by program


def pair_transfers(
    programs: Sequence[CompiledOrder],
) -> tuple[tuple[CompiledOrder, ...], OrderFinding | None]:
    """Pairs the ends of every transfer; also returns a finding if a channel cannot be paired.

    One program sends on a channel and another receives. Device i of the sender is paired with
    device i of the receiver, in the order of `CompiledOrder.devices`.
    """
    channels: dict[str, _Channel] = {}
    for number, program in enumerate(programs):
        for issue in issues_of(program.block):
            if issue.transfer and not issue.rendezvous:
                channel = channels.setdefault(issue.signature.details, {"send": {}, "recv": {}})
                channel[issue.transfer].setdefault(number, issue)
    meetings: dict[str, list[tuple[int, int]]] = {}
    for channel_name, channel in channels.items():
        finding = _channel_mismatch(programs, channel_name, channel)
        if finding is not None:
            return tuple(programs), finding
        (sender,), (receiver,) = channel["send"], channel["recv"]
        pairs = zip(programs[sender].devices, programs[receiver].devices, strict=True)
        meetings[channel_name] = list(pairs)

    def with_rendezvous(issue: CollectiveIssue) -> CollectiveIssue:
        if not issue.transfer or issue.rendezvous:
            return issue
        end = 0 if issue.transfer == "send" else 1
        pairs = meetings[issue.signature.details]
        return replace(issue, rendezvous=tuple(Rendezvous(p, (p[end],)) for p in pairs))

    if not meetings:
        return tuple(programs), None
    return tuple(replace(p, block=rebuilt(p.block, with_rendezvous)) for p in programs), None


def _channel_mismatch(
    programs: Sequence[CompiledOrder], channel_name: str, channel: _Channel
) -> OrderFinding | None:
    """Returns the error of a channel, or None if it has one sender and one receiver that match."""
    senders, receivers = channel["send"], channel["recv"]
    number, issue = next(iter((senders or receivers).items()))
    device = programs[number].devices[0]
    place = place_text(programs, number, issue.place)
    actors = [actor_of(number, device, issue)]
    if not senders or not receivers:
        missing = "recv" if senders else "send"
        message = f"{issue.transfer} on {channel_name} at {place}: no program has the {missing}"
    # Programs are paired by their devices, which needs exactly one on each side.
    elif len(senders) > 1 or len(receivers) > 1 or set(senders) == set(receivers):
        message = (
            f"{issue.transfer} on {channel_name} at {place}: several programs, or one at both "
            "ends, use the channel, and no source_target_pairs name the devices that meet"
        )
    else:
        (other,) = receivers
        if len(programs[number].devices) == len(programs[other].devices):
            return None
        message = (
            f"send on {channel_name} at {place}: {programs[number].name} runs on "
            f"{len(programs[number].devices)} devices, and {programs[other].name}, which receives, "
            f"on {len(programs[other].devices)}"
        )
        actors.append(actor_of(other, programs[other].devices[0], receivers[other]))
    return OrderFinding(Verdict.MISMATCH, "unmatched-transfer", message, tuple(actors))


def find_divergence(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds the first collective in a loop or branch that its participants decide differently."""
    for number, program in enumerate(programs):
        for issue, meeting, node in _doubtful(program.block, (), frozenset(program.devices)):
            return _divergent(programs, number, issue, meeting, node)
    return None


def find_foreign_decision(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds a decision made at run time around a collective that involves another program.

    A decision with a symbol is accepted if the other device has equally many with that symbol.
    """
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    symbols = {
        device: Counter(decision_of(node).symbols.get(device) for node in nodes)
        for program, nodes in ((p, list(_undecided_nodes(p.block))) for p in programs)
        for device in program.devices
    }
    for number, program in enumerate(programs):
        for node in _undecided_nodes(program.block):
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
    block: ProgramBlock, around: tuple[ProgramLoop | ProgramBranch, ...], devices: frozenset[int]
) -> Iterator[tuple[CollectiveIssue, Rendezvous, ProgramLoop | ProgramBranch]]:
    for node in block.nodes:
        if not isinstance(node, CollectiveIssue):
            for inner in reached_blocks(node):
                yield from _doubtful(inner, (*around, node), devices)
            continue
        for meeting in node.rendezvous if around else ():
            for above in around:
                decision = decision_of(above)
                # The other end of a transfer is another op, possibly outside this loop or branch.
                together = meeting.members if decision.values is None else meeting.issuers
                if not decision.agree([device for device in together if device in devices]):
                    yield node, meeting, above


def _undecided_nodes(block: ProgramBlock) -> Iterator[ProgramLoop | ProgramBranch]:
    for node in block.nodes:
        if isinstance(node, CollectiveIssue):
            continue
        if decision_of(node).values is None:
            yield node
        else:
            for inner in reached_blocks(node):
                yield from _undecided_nodes(inner)


def _divergent(
    programs: Sequence[CompiledOrder],
    number: int,
    issue: CollectiveIssue,
    meeting: Rendezvous,
    node: ProgramLoop | ProgramBranch,
) -> OrderFinding:
    decision = decision_of(node)
    inside = [device for device in meeting.members if device in decision.classes]
    # Two participants that may decide differently.
    classes = decision.classes if decision.values is None else decision.values
    one = inside[0]
    other = next(device for device in inside if classes[device] != classes[one])
    what = "the trip count" if isinstance(node, ProgramLoop) else "the branch to take"
    known = decision.values is not None
    where = place_text(programs, number, node.place)
    message = (
        f"{name(issue)} at {place_text(programs, number, issue.place)} is inside a "
        f"{describe(node)} at {where}, and {what} "
        + ("differs between" if known else "may differ between")
        + f" its participants {one} and {other}"
    )
    is_certain = False
    if decision.values is not None:
        verb = "runs the loop {} times" if isinstance(node, ProgramLoop) else "takes branch {}"
        told = tuple(f"device {d} {verb.format(decision.values[d])}" for d in (one, other))
        key = issue.signature, meeting.members
        often = [
            sum(each.times for each in _occurrences(programs[number].block, d) if each.key == key)
            for d in (one, other)
        ]
        # Different branches may hold equal collectives: with equal counts, no device surely waits.
        is_certain = often[0] != often[1]
        if is_certain:
            first, second = (one, other) if often[0] > often[1] else (other, one)
            told += (f"device {first} waits in {name(issue)} for device {second} for ever",)
    else:
        told = (
            f"nothing shows that device {one} and device {other} decide the same way",
            f"device {one} reaches the {name(issue)} and waits for device {other}, which does not",
        )
    actors = (actor_of(number, one, issue), Actor(number, other, describe(node), node.place))
    return OrderFinding(
        Verdict.MAY_DEADLOCK, "divergent-control-flow", message, actors, told, confirmed=is_certain
    )


def _foreign(
    programs: Sequence[CompiledOrder],
    number: int,
    node: ProgramLoop | ProgramBranch,
    own: int,
    other: int,
    theirs: int,
) -> OrderFinding:
    what = "the trip count" if isinstance(node, ProgramLoop) else "the branch to take"
    place = place_text(programs, number, node.place)
    message = (
        f"the {describe(node)} at {place} communicates with {programs[theirs].name}, and {what} is "
        "decided at run time: nothing shows that the other program decides the same way"
    )
    told = (
        f"device {own} enters the {describe(node)} and waits for device {other}",
        f"device {other}, in {programs[theirs].name}, does not meet it there",
    )
    actors = (
        actor_of(number, own, node),
        Actor(theirs, other, "another program", programs[theirs].place),
    )
    return OrderFinding(Verdict.MAY_DEADLOCK, "decided-at-run-time", message, actors, told)


type _Key = tuple[CollectiveSignature, tuple[int, ...]]


@dataclass(frozen=True)
class _Occurrence:
    """A collective that a device issues `times` times."""

    device: int
    issue: CollectiveIssue
    key: _Key
    times: int


def find_missing_program(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds the first collective, in text order, with a participant that runs no program."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    complete: set[tuple[int, ...]] = set()  # members who all run a program
    for number, program in enumerate(programs):
        for issue in issues_of(program.block, reached_blocks):
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


def find_disagreement(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds the first collective, in text order, that its participants issue unequally often."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    counts: defaultdict[_Key, dict[int, int]] = defaultdict(dict)
    first: dict[_Key, _Occurrence] = {}
    for program in programs:
        for device in program.devices:
            for occurrence in _occurrences(program.block, device):
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


def _occurrences(block: ProgramBlock, device: int, times: int = 1) -> Iterator[_Occurrence]:
    """Yields the collectives of a block that a device issues.

    Loops and branches decided at run time are skipped.
    """
    for node in block.nodes:
        if isinstance(node, CollectiveIssue):
            meeting = node.of_device.get(device)
            if meeting is not None and times:
                yield _Occurrence(device, node, (node.signature, meeting.members), times)
            continue
        values = decision_of(node).values
        if values is None:
            continue
        if isinstance(node, ProgramBranch):
            yield from _occurrences(node.branches[values[device]], device, times)
        else:
            yield from _occurrences(node.body, device, times * values[device])
            # The condition runs once more than the body: its last run ends the loop.
            yield from _occurrences(node.condition, device, times * (values[device] + 1))


def _no_program(
    programs: Sequence[CompiledOrder], number: int, device: int, issue: CollectiveIssue, member: int
) -> OrderFinding:
    message = (
        f"{name(issue)} at {place_text(programs, number, issue.place)} waits for device {member}, "
        "which runs none of the programs"
    )
    actors = (actor_of(number, device, issue),)
    return OrderFinding(Verdict.MISMATCH, "missing-program", message, actors, confirmed=True)


def _explain(
    programs: Sequence[CompiledOrder],
    program_of: dict[int, int],
    counts: defaultdict[_Key, dict[int, int]],
    occurrence: _Occurrence,
    member: int,
) -> OrderFinding:
    """Reports that two participants differ, with the collective issued instead, if any."""
    key, device = occurrence.key, occurrence.device
    here, there = counts[key].get(device, 0), counts[key].get(member, 0)
    more, less = (device, member) if here > there else (member, device)
    own = _occurrences(programs[program_of[more]].block, more)
    issue = next((each.issue for each in own if each.key == key), occurrence.issue)
    most, least = max(here, there), min(here, there)
    number, other = program_of[more], program_of[less]
    place = place_text(programs, number, issue.place)
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
    return OrderFinding(
        Verdict.MISMATCH,
        rule,
        message,
        (actor_of(number, more, issue), *actors),
        told,
        confirmed=True,
    )


def _instead(
    programs: Sequence[CompiledOrder],
    number: int,
    device: int,
    key: _Key,
    counts: defaultdict[_Key, dict[int, int]],
) -> tuple[str, str, tuple[Actor, ...]]:
    """Finds the collective that a device issues instead of `key`: a rule, a hint and its actor.

    The hint is "" and the actors are empty if the device has no similar collective.
    """
    signature, members = key
    program = programs[number]
    for issue in program.dead:
        meeting = issue.of_device.get(device)
        if issue.signature == signature and meeting is not None and meeting.members == members:
            where = place_text(programs, number, issue.place)
            hint = f"{program.name} has it ({where}), but nothing reads its results: XLA deletes it"
            return "dead-collective", hint, (actor_of(number, device, issue),)
    for occurrence in _occurrences(program.block, device):
        other, others = occurrence.key
        same = all(
            counts[occurrence.key].get(m, 0) == counts[occurrence.key][device] for m in others
        )
        is_this = occurrence.key == key  # the device issues this collective, but less often
        # A substitute shares the kind or the members; other collectives explain nothing.
        if same or is_this or (other.kind != signature.kind and others != members):
            continue
        rule = _difference(signature, other, members, others)
        where = place_text(programs, number, occurrence.issue.place)
        hint = f"{program.name} issues {describe(occurrence.issue)} among {list(others)} at {where}"
        return rule, hint, (actor_of(number, device, occurrence.issue),)
    kind = "unmatched-transfer" if signature.kind == "transfer" else "missing-collective"
    return kind, "", ()


def _difference(
    one: CollectiveSignature,
    other: CollectiveSignature,
    members: tuple[int, ...],
    others: tuple[int, ...],
) -> str:
    """Names the most serious difference between two collectives, as a rule of a finding."""
    if one.kind != other.kind:
        return "kind"
    if members != others:
        return "groups"
    if one.types != other.types:
        same = [_element_type(a) for a in one.types] == [_element_type(b) for b in other.types]
        return "shape" if same else "element-type"
    return "reduction-or-dimensions"


def _element_type(text: str) -> str:
    """Returns `f32` for `tensor<4x8xf32>`; several types are joined by spaces."""
    return " ".join(part.split("x")[-1].rstrip(">,").split("<")[-1] for part in text.split())
