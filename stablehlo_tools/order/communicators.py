"""Whether XLA:GPU can open the communicators of programs compiled apart.

XLA:GPU opens a communicator (a clique) for each group of devices, one for collectives and one for
permutes. Before a program starts, each device opens all that the program's text has, whether what
uses them will run or not: larger ones first, equally large ones in the order of the text ("XLA
compiler guarantees that all collective operations have the same order on all replicas. We rely on
this property", xla/backends/gpu/runtime/collective_clique_requests.cc, `OrderedRequestedCliques`).
To open one takes all its devices. So programs compiled apart wait for each other for ever where

- one opens a communicator that the program of another member never does, for a collective in a
  branch that is not taken;
- two of one size have two devices of different programs in common, which open them in another
  order, again for what does not run: what runs is in order by the rest of the verdict;
- a communicator is split off a larger one (`ncclCommSplit`), which is left to all devices of that
  one, where all are in the groups of the collective (openxla/xla#36981, #38105), and a program of
  one of them has no such collective.

Under the option `COMPONENTS`, a permute has a communicator for each connected component of its
pairs, where a device without a pair is one. XLA:GPU refuses one that two permutes ask for with
other components beside it. Its devices alone see that (openxla/xla#44530); here device 3, for {3}:

    pairs (0, 1): {0, 1} {2} {3}    pairs (2, 3): {0} {1} {2, 3}    pairs (1, 2): {0} {1, 2} {3}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.order.findings import (
    Actor,
    Finding,
    Verdict,
    actor_of,
    at,
    devices_text,
    name,
)
from stablehlo_tools.order.program import (
    UNKNOWN_CALL,
    Block,
    Issue,
    Program,
    compiled_blocks,
    inner_blocks,
    issues_of,
)

COMPONENTS = "xla_gpu_collective_permute_connected_components"

_PERMUTE = "collective_permute"
_OTHERS = frozenset({"custom_call", UNKNOWN_CALL, "transfer"})


@dataclass(frozen=True)
class _Communicator:
    """A group of devices; those of permutes are apart from those of other collectives."""

    members: tuple[int, ...]
    is_of_permutes: bool

    def __str__(self) -> str:
        kind = "of permutes " if self.is_of_permutes else ""
        return f"the communicator {kind}of {devices_text(self.members)}"


@dataclass(frozen=True, eq=False)
class _Use:
    """A collective, and where it stands: from the outermost block in, each with a position."""

    issue: Issue
    path: tuple[tuple[Block, int], ...]

    def is_before(self, other: _Use) -> bool:
        """Whether it comes before another one in every schedule."""
        for (block, here), (theirs, there) in zip(self.path, other.path, strict=False):
            if block is not theirs:
                return _number(block, self, other) < _number(theirs, other, self)
            if here != there:
                return here < there and block.ordered(here, there)
        return False


@dataclass(frozen=True)
class _Opened:
    """The communicators of a program and what uses them, in the order of its text."""

    uses: dict[_Communicator, list[_Use]] = field(default_factory=dict[_Communicator, "list[_Use]"])

    def opens_first(self, one: _Communicator, other: _Communicator) -> bool:
        """Whether one is surely used before the other."""
        return any(
            all(use.is_before(later) for later in self.uses[other]) for use in self.uses[one]
        )


def find_communicator_conflict(programs: Sequence[Program]) -> Finding | None:
    """Communicators that the devices of programs compiled apart cannot open on XLA:GPU."""
    conflict = find_component_conflict(programs)
    if conflict is not None and any(program.permutes_on_components for program in programs):
        return conflict
    # One program is compiled once: its devices open the same, in the same order.
    if len(programs) < 2 or not all(program.may_run_on_gpu for program in programs):
        return None
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    opened = [_opened(program) for program in programs]
    for number, mine in enumerate(opened):
        for communicator, (use, *_) in mine.uses.items():
            own = next((d for d in communicator.members if program_of.get(d) == number), None)
            for device in communicator.members:
                theirs = program_of.get(device, number)
                if own is not None and communicator not in opened[theirs].uses:
                    return _missing(programs, number, own, use, communicator, device, theirs)
    for number, mine in enumerate(opened):
        conflict = _split(programs, program_of, opened, number) or _turned(
            programs, program_of, opened, number, list(mine.uses)
        )
        if conflict is not None:
            return conflict
    return None


def find_component_conflict(programs: Sequence[Program]) -> Finding | None:
    """Two permutes of a program of which XLA:GPU would refuse the second under `COMPONENTS`."""
    for number, program in enumerate(programs):
        asked: dict[tuple[int, ...], Issue] = {}
        permutes = (i for i in issues_of(program.block) if i.signature.kind == _PERMUTE)
        for groups, issue in {issue.groups: issue for issue in permutes}.items():
            for group in groups:
                first = asked.setdefault(group, issue)
                device = next((d for d in group if d in program.devices), None)
                if first is issue or device is None:
                    continue
                places = " and ".join(at(programs, number, i.place) for i in (first, issue))
                message = (
                    f"under {COMPONENTS}, XLA:GPU gives each component of a permute's pairs a "
                    f"communicator. The permutes at {places} ask for that of {devices_text(group)} "
                    "with other components beside it: it may refuse this, and other devices hang"
                )
                actors = tuple(actor_of(number, device, each) for each in (first, issue))
                return Finding(Verdict.MAY_DEADLOCK, "permute-components", message, actors)
    return None


def _opened(program: Program) -> _Opened:
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


def _uses(block: Block, path: tuple[tuple[Block, int], ...]) -> Iterator[_Use]:
    for position, node in enumerate(block.nodes):
        here = (*path, (block, position))
        if isinstance(node, Issue):
            yield _Use(node, here)
        for inner in compiled_blocks(node):
            yield from _uses(inner, here)


def _number(block: Block, use: _Use, other: _Use) -> int:
    """Which of the blocks of a loop or branch it is, of which two uses have different ones."""
    depth = next(i for i, (here, _) in enumerate(use.path) if here is block)
    around, position = use.path[depth - 1]
    assert other.path[depth - 1][0] is around
    return next(i for i, b in enumerate(inner_blocks(around.nodes[position])) if b is block)


def _turned(
    programs: Sequence[Program],
    program_of: dict[int, int],
    opened: Sequence[_Opened],
    number: int,
    listed: Sequence[_Communicator],
) -> Finding | None:
    """Two communicators of one size that this program and another may open in opposite order."""
    for position, one in enumerate(listed):
        for other in listed[position + 1 :]:
            if len(one.members) != len(other.members):
                continue
            both = [d for d in one.members if d in other.members and d in program_of]
            own = next((d for d in both if program_of[d] == number), None)
            for device in both if own is not None else ():
                theirs = program_of[device]
                both_open = (opened[number], opened[theirs])
                if (
                    theirs == number
                    or all(each.opens_first(one, other) for each in both_open)
                    or all(each.opens_first(other, one) for each in both_open)
                ):
                    continue
                assert own is not None
                return _in_two_orders(programs, opened, (number, theirs), (own, device), one, other)
    return None


def _split(
    programs: Sequence[Program],
    program_of: dict[int, int],
    opened: Sequence[_Opened],
    number: int,
) -> Finding | None:
    """A communicator that is split off a larger one, of which another program knows nothing."""
    uses = opened[number].uses
    for part, listed in uses.items():
        for whole in uses:
            if whole.is_of_permutes != part.is_of_permutes or not set(part.members) < set(
                whole.members
            ):
                continue
            for use in listed:
                groups = {d: group for group in use.issue.groups for d in group}
                # It is split off only where the op names every device of the larger in some group.
                if not groups.keys() >= set(whole.members):
                    continue
                for device in whole.members:
                    theirs = program_of.get(device, number)
                    group = tuple(sorted(groups[device]))
                    own = _Communicator(group, part.is_of_permutes)
                    if len(group) > 1 and own not in opened[theirs].uses:
                        return _one_sided(programs, number, use, part, whole, device, theirs)
    return None


def _missing(
    programs: Sequence[Program],
    number: int,
    own: int,
    use: _Use,
    communicator: _Communicator,
    device: int,
    theirs: int,
) -> Finding:
    place = at(programs, number, use.issue.place)
    message = (
        f"XLA:GPU opens {communicator} for {name(use.issue)} at {place} before the program starts, "
        f"though it may not run, and {programs[theirs].name}, which runs on device {device}, has "
        "no collective of these devices"
    )
    told = (f"device {own} opens {communicator} and waits for device {device} for ever",)
    actors = (
        actor_of(number, own, use.issue),
        Actor(theirs, device, "no such communicator", programs[theirs].place),
    )
    return Finding(Verdict.MAY_DEADLOCK, "communicator-missing", message, actors, told)


def _in_two_orders(
    programs: Sequence[Program],
    opened: Sequence[_Opened],
    numbers: tuple[int, int],
    devices: tuple[int, int],
    one: _Communicator,
    other: _Communicator,
) -> Finding:
    uses = [opened[numbers[0]].uses[communicator][0].issue for communicator in (one, other)]
    places = [at(programs, numbers[0], issue.place) for issue in uses]
    message = (
        "XLA:GPU opens communicators of one size in the order of the program before it starts, and "
        f"nothing shows that {programs[numbers[0]].name} and {programs[numbers[1]].name} have "
        f"{name(uses[0])} at {places[0]} and {name(uses[1])} at {places[1]}, one of which may not "
        "run, in one order"
    )
    told = (
        f"device {devices[0]} opens {one} and waits for device {devices[1]}",
        f"device {devices[1]} opens {other} and waits for device {devices[0]}",
    )
    actors = (
        *(actor_of(numbers[0], devices[0], issue) for issue in uses),
        Actor(numbers[1], devices[1], "compiled apart", programs[numbers[1]].place),
    )
    return Finding(Verdict.MAY_DEADLOCK, "communicator-order", message, actors, told)


def _one_sided(
    programs: Sequence[Program],
    number: int,
    use: _Use,
    part: _Communicator,
    whole: _Communicator,
    device: int,
    theirs: int,
) -> Finding:
    own = next(d for d in part.members if d in programs[number].devices)
    place = at(programs, number, use.issue.place)
    message = (
        f"XLA:GPU splits {part} for {name(use.issue)} at {place} off {whole}, which all of these "
        f"devices must do together, and {programs[theirs].name}, which runs on device {device}, "
        "has no collective of its group: give it one, name only the groups that communicate, or "
        "run with --xla_gpu_enable_nccl_comm_splitting=false"
    )
    told = (f"device {own} splits {whole} and waits for device {device} for ever",)
    actors = (
        actor_of(number, own, use.issue),
        Actor(theirs, device, "no such communicator", programs[theirs].place),
    )
    return Finding(Verdict.MAY_DEADLOCK, "communicator-split", message, actors, told)
