"""Finds the two ends of sends and recvs that name no devices: they share a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stablehlo_tools.order.findings import Finding, Verdict, actor_of, at
from stablehlo_tools.order.program import Issue, Program, Rendezvous, issues_of, rebuilt


@dataclass
class _Channel:
    """The programs on either side, and a transfer of each."""

    ends: dict[str, dict[int, Issue]] = field(
        default_factory=lambda: {"send": dict[int, Issue](), "recv": dict[int, Issue]()}
    )


def pair_transfers(programs: Sequence[Program]) -> tuple[tuple[Program, ...], Finding | None]:
    """The programs with every transfer between two devices, or what stands in the way.

    One program sends on a channel and another receives: device i of the one to device i of the
    other, in the order of their devices.
    """
    channels: dict[str, _Channel] = {}
    for number, program in enumerate(programs):
        for issue in issues_of(program.block):
            if issue.transfer and not issue.rendezvous:
                channel = channels.setdefault(issue.signature.details, _Channel())
                channel.ends[issue.transfer].setdefault(number, issue)
    meetings: dict[str, list[tuple[int, int]]] = {}
    for name, channel in channels.items():
        finding = _check(programs, name, channel)
        if finding is not None:
            return tuple(programs), finding
        (sender,), (receiver,) = channel.ends["send"], channel.ends["recv"]
        pairs = zip(programs[sender].devices, programs[receiver].devices, strict=True)
        meetings[name] = list(pairs)

    def paired(issue: Issue) -> Issue:
        if not issue.transfer or issue.rendezvous:
            return issue
        end = 0 if issue.transfer == "send" else 1
        pairs = meetings[issue.signature.details]
        return replace(issue, rendezvous=tuple(Rendezvous(p, (p[end],)) for p in pairs))

    if not meetings:
        return tuple(programs), None
    return tuple(replace(p, block=rebuilt(p.block, paired)) for p in programs), None


def _check(programs: Sequence[Program], name: str, channel: _Channel) -> Finding | None:
    """What is wrong with a channel, if anything is."""
    senders, receivers = channel.ends["send"], channel.ends["recv"]
    number, issue = next(iter((senders or receivers).items()))
    device = programs[number].devices[0]
    place = at(programs, number, issue.place)
    actors = [actor_of(number, device, issue)]
    if not senders or not receivers:
        missing = "recv" if senders else "send"
        message = f"{issue.transfer} on {name} at {place}: no program has the {missing}"
    elif len(senders) > 1 or len(receivers) > 1 or set(senders) == set(receivers):
        message = (
            f"{issue.transfer} on {name} at {place}: several programs, or one at both ends, use "
            "the channel, and no source_target_pairs say which devices meet"
        )
    else:
        (other,) = receivers
        if len(programs[number].devices) == len(programs[other].devices):
            return None
        message = (
            f"send on {name} at {place}: {programs[number].name} runs on "
            f"{len(programs[number].devices)} devices, and {programs[other].name}, which receives, "
            f"on {len(programs[other].devices)}"
        )
        actors.append(actor_of(other, programs[other].devices[0], receivers[other]))
    return Finding(Verdict.MISMATCH, "unmatched-transfer", message, tuple(actors))
