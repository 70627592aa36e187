"""Checks that XLA:GPU can open the communicators of separately compiled programs.

XLA:GPU opens a communicator (a clique) for each group of devices, one for collectives and one for
permutes. Before a program starts, each device opens all communicators of the program's text, even
if their collectives never run: larger ones first, equally large ones in text order ("XLA
compiler guarantees that all collective operations have the same order on all replicas. We rely on
this property", xla/backends/gpu/runtime/collective_clique_requests.cc, `OrderedRequestedCliques`).
Opening a communicator needs all its devices. So separately compiled programs wait forever if

- a program opens a communicator that the program of another member never opens, for a collective
  in a branch that is not taken;
- two communicators of one size share two devices of different programs, which open them in
  opposite order. This concerns collectives that do not run; the rest of the verdict orders those
  that do;
- a communicator is split off a larger one (`ncclCommSplit`), and the program of one member of the
  larger one lacks that collective. XLA splits if all these members are in the groups of the
  collective (openxla/xla#36981, #38105), and all of them must take part in the split.

Under the option `COMPONENTS`, a permute has a communicator for each connected component of its
pairs; a device without a pair is a component. XLA:GPU refuses a communicator that two permutes
request with different other components. Only its own devices see the error (openxla/xla#44530).
Here that is device 3, for {3}:

    pairs (0, 1): {0, 1} {2} {3}    pairs (2, 3): {0} {1} {2, 3}    pairs (1, 2): {0} {1, 2} {3}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from stablehlo_tools.order.order_findings import (
    Actor,
    OrderFinding,
    Verdict,
    actor_of,
    devices_text,
    name,
    place_text,
)
from stablehlo_tools.order.program import (
    UNKNOWN_CALL,
    CollectiveIssue,
    CompiledOrder,
    ProgramBlock,
    compiled_blocks,
    inner_blocks,
    issues_of,
)

COMPONENTS = "xla_gpu_collective_permute_connected_components"

_PERMUTE = "collective_permute"
_OTHERS = frozenset({"custom_call", UNKNOWN_CALL, "transfer"})


@dataclass(frozen=True)
class _Communicator:
    """A group of devices; permutes and other collectives have separate communicators."""

    members: tuple[int, ...]
    is_of_permutes: bool

    def __str__(self) -> str:
        kind = "of permutes " if self.is_of_permutes else ""
        return f"the communicator {kind}of {devices_text(self.members)}"


@dataclass(frozen=True, eq=False)
class _CommunicatorUse:
    """A collective and its path: a block and a position in it, from the outermost block inwards."""

    issue: CollectiveIssue
    path: tuple[tuple[ProgramBlock, int], ...]

    def is_before(self, other: _CommunicatorUse) -> bool:
        """Returns True if this use comes before `other` in every schedule."""
        for (block, here), (theirs, there) in zip(self.path, other.path, strict=False):
            if block is not theirs:
                return _number(block, self, other) < _number(theirs, other, self)
            if here != there:
                return here < there and block.has_order(here, there)
        return False


@dataclass(frozen=True)
class _Opened:
    """The communicators of a program and the collectives that use them, in text order."""

    uses: dict[_Communicator, list[_CommunicatorUse]] = field(
        default_factory=dict[_Communicator, "list[_CommunicatorUse]"]
    )

    def opens_first(self, one: _Communicator, other: _Communicator) -> bool:
        """Returns True if the first use of `one` surely comes before every use of `other`."""
        return any(
            all(use.is_before(later) for later in self.uses[other]) for use in self.uses[one]
        )


def find_communicator_conflict(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds communicators that separately compiled programs cannot open together on XLA:GPU."""
    conflict = find_component_conflict(programs)
    if conflict is not None and any(program.permutes_on_components for program in programs):
        return conflict
    # One program is compiled once: its devices open the same, in the same order.
    if len(programs) < 2 or not all(program.may_run_on_gpu for program in programs):
        return None
    # The missing ones of all programs first: `find_turned` needs each communicator in the
    # programs of all its members.
    openings = _Openings(programs)
    for number in range(len(programs)):
        conflict = openings.find_missing(number)
        if conflict is not None:
            return conflict
    for number in range(len(programs)):
        conflict = openings.find_split(number) or openings.find_turned(number)
        if conflict is not None:
            return conflict
    return None


def find_component_conflict(programs: Sequence[CompiledOrder]) -> OrderFinding | None:
    """Finds two permutes of a program such that XLA:GPU refuses the second under `COMPONENTS`."""
    for number, program in enumerate(programs):
        asked: dict[tuple[int, ...], CollectiveIssue] = {}
        permutes = (i for i in issues_of(program.block) if i.signature.kind == _PERMUTE)
        for groups, issue in {issue.groups: issue for issue in permutes}.items():
            for group in groups:
                first = asked.setdefault(group, issue)
                device = next((d for d in group if d in program.devices), None)
                if first is issue or device is None:
                    continue
                places = " and ".join(place_text(programs, number, i.place) for i in (first, issue))
                message = (
                    f"under {COMPONENTS}, XLA:GPU opens a communicator for each component of a "
                    f"permute's pairs. The permutes at {places} request {devices_text(group)} with "
                    "different other components: XLA may refuse the second, and devices hang"
                )
                actors = tuple(actor_of(number, device, each) for each in (first, issue))
                return OrderFinding(Verdict.MAY_DEADLOCK, "permute-components", message, actors)
    return None


def _collect_communicators(program: CompiledOrder) -> _Opened:
    opened = _Opened()
    for use in _uses(program.block, ()):
        if use.issue.signature.kind in _OTHERS:
            continue
        is_of_permutes = use.issue.signature.kind == _PERMUTE
        groups = [meeting.members for meeting in use.issue.rendezvous]
        if is_of_permutes and program.permutes_on_components:
            groups = use.issue.groups
        for group in groups:
            if len(group) > 1 and not set(group).isdisjoint(program.devices):
                key = _Communicator(tuple(sorted(group)), is_of_permutes)
                opened.uses.setdefault(key, []).append(use)
    return opened


def _uses(
    block: ProgramBlock, path: tuple[tuple[ProgramBlock, int], ...]
) -> Iterator[_CommunicatorUse]:
    for position, node in enumerate(block.nodes):
        here = (*path, (block, position))
        if isinstance(node, CollectiveIssue):
            yield _CommunicatorUse(node, here)
        for inner in compiled_blocks(node):
            yield from _uses(inner, here)


def _number(block: ProgramBlock, use: _CommunicatorUse, other: _CommunicatorUse) -> int:
    """Returns the index of `block` in the loop or branch where the paths of two uses diverge."""
    depth = next(i for i, (here, _) in enumerate(use.path) if here is block)
    around, position = use.path[depth - 1]
    assert other.path[depth - 1][0] is around
    return next(i for i, b in enumerate(inner_blocks(around.nodes[position])) if b is block)


class _Openings:
    """The communicators of separately compiled programs; finds conflicts of one, by its number."""

    def __init__(self, programs: Sequence[CompiledOrder]) -> None:
        self._programs = programs
        self._program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
        self._opened = [_collect_communicators(program) for program in programs]

    def find_missing(self, number: int) -> OrderFinding | None:
        """Finds a communicator that the program of another member never opens."""
        for communicator, (use, *_) in self._opened[number].uses.items():
            members = communicator.members
            own = next((d for d in members if self._program_of.get(d) == number), None)
            for device in members:
                theirs = self._program_of.get(device, number)
                if own is None or communicator in self._opened[theirs].uses:
                    continue
                message = (
                    f"XLA:GPU opens {communicator} for {self._name(number, use.issue)} before the "
                    f"program starts, even if it never runs. {self._programs[theirs].name}, "
                    f"which runs on device {device}, has no collective of these devices"
                )
                told = f"device {own} opens {communicator} and waits for device {device} for ever"
                ends = (own, device)
                return self._lacking("communicator-missing", message, told, number, use, ends)
        return None

    def find_split(self, number: int) -> OrderFinding | None:
        """Finds a communicator split off a larger one, one of whose members does not split."""
        uses = self._opened[number].uses
        for part, listed in uses.items():
            for whole in uses:
                of_one_kind = whole.is_of_permutes == part.is_of_permutes
                if not of_one_kind or not set(part.members) < set(whole.members):
                    continue
                for use in listed:
                    device = self._without_its_group(use, part, whole, number)
                    if device is None:
                        continue
                    own = next(d for d in part.members if d in self._programs[number].devices)
                    theirs = self._programs[self._program_of.get(device, number)]
                    message = (
                        f"XLA:GPU splits {part} for {self._name(number, use.issue)} off {whole}, "
                        f"and all of these devices must take part. But {theirs.name}, which "
                        f"runs on device {device}, has no collective of its group: add one, "
                        "list only the groups that communicate, or run with "
                        "--xla_gpu_enable_nccl_comm_splitting=false"
                    )
                    told = f"device {own} splits {whole} and waits for device {device} for ever"
                    ends = (own, device)
                    return self._lacking("communicator-split", message, told, number, use, ends)
        return None

    def _without_its_group(
        self, use: _CommunicatorUse, part: _Communicator, whole: _Communicator, number: int
    ) -> int | None:
        """Finds a device of the larger communicator whose program lacks the group to split off."""
        groups = {d: group for group in use.issue.groups for d in group}
        # XLA splits only if the op names every device of the larger communicator in some group.
        if not groups.keys() >= set(whole.members):
            return None
        for device in whole.members:
            group = tuple(sorted(groups[device]))
            own = _Communicator(group, part.is_of_permutes)
            theirs = self._program_of.get(device, number)
            if len(group) > 1 and own not in self._opened[theirs].uses:
                return device
        return None

    def find_turned(self, number: int) -> OrderFinding | None:
        """Finds two communicators of one size that another program may open in opposite order."""
        mine = self._opened[number]
        for one, other in combinations(mine.uses, 2):
            if len(one.members) != len(other.members):
                continue
            both = [d for d in one.members if d in other.members and d in self._program_of]
            own = next((d for d in both if self._program_of[d] == number), None)
            for device in both if own is not None else ():
                theirs = self._program_of[device]
                pair = (mine, self._opened[theirs])
                if (
                    theirs == number
                    or all(each.opens_first(one, other) for each in pair)
                    or all(each.opens_first(other, one) for each in pair)
                ):
                    continue
                program, second = self._programs[number], self._programs[theirs]
                issues = [mine.uses[communicator][0].issue for communicator in (one, other)]
                names = [self._name(number, issue) for issue in issues]
                message = (
                    "XLA:GPU opens communicators of one size in program order, even if one of them "
                    f"is never used. Nothing shows that {program.name} and {second.name} have "
                    f"{names[0]} and {names[1]} in the same order"
                )
                told = (
                    f"device {own} opens {one} and waits for device {device}",
                    f"device {device} opens {other} and waits for device {own}",
                )
                assert own is not None
                actors = (
                    *(actor_of(number, own, issue) for issue in issues),
                    Actor(theirs, device, "compiled separately", second.place),
                )
                return OrderFinding(
                    Verdict.MAY_DEADLOCK, "communicator-order", message, actors, told
                )
        return None

    def _name(self, number: int, issue: CollectiveIssue) -> str:
        return f"{name(issue)} at {place_text(self._programs, number, issue.place)}"

    def _lacking(
        self,
        rule: str,
        message: str,
        told: str,
        number: int,
        use: _CommunicatorUse,
        ends: tuple[int, int],
    ) -> OrderFinding:
        """Reports a communicator that the first device of `ends` opens and the second does not."""
        own, device = ends
        theirs = self._program_of.get(device, number)
        actors = (
            actor_of(number, own, use.issue),
            Actor(theirs, device, "no such communicator", self._programs[theirs].place),
        )
        return OrderFinding(Verdict.MAY_DEADLOCK, rule, message, actors, (told,))
