"""The collectives, loops and branches of a program, and the order that is forced on them.

A block lists its nodes in text order, and for each node the earlier ones that it must come after. A
compiler may schedule the nodes in any order that respects that. A loop or a branch is one node:
its collectives are issued while it runs. Devices are flattened ids, as in `replica_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

from stablehlo_tools.diagnostics import Place

NOWHERE = Place()
UNKNOWN_CALL = "unknown custom_call"  # kind of a custom call that may or may not communicate


@dataclass(frozen=True)
class CollectiveSignature:
    """The attributes on which all participants of a collective must agree.

    `details` spells dimensions, reduction, channel of a transfer, source and target pairs.
    """

    kind: str
    types: tuple[str, ...] = ()
    details: str = ""

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.types, self.details))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[CollectiveSignature], tuple[object, ...]]:
        # Drops the cached hash: hashes of strings differ between processes.
        return CollectiveSignature, (self.kind, self.types, self.details)

    @cached_property
    def text(self) -> str:
        """`all_gather tensor<4xf32> -> tensor<8xf32> dim 0`."""
        return " ".join(part for part in (self.kind, *self.types, self.details) if part)


@dataclass(frozen=True)
class Rendezvous:
    """One group of devices that exchange data and wait for each other.

    `issuers` are the members that run the op: all of them, except for a transfer. The two ends of a
    transfer are two ops, a `send` on one device and a `recv` on the other.
    """

    members: tuple[int, ...]
    issuers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CollectiveIssue:
    """A collective and its rendezvous. `id` numbers the program's collectives.

    `beside` describes what a compiler may rewrite together with it; equal texts are rewritten
    equally. `doubt` says why a compiler may issue another collective or none; "" if it may not.
    `origins` are, in a schedule, the collectives of the program's text that this one came from.
    `groups` are all groups of the op, the components of a permute, or the pairs of a transfer,
    including those of other programs; empty if only its own are known.
    """

    id: int
    signature: CollectiveSignature
    rendezvous: tuple[Rendezvous, ...]
    place: Place = NOWHERE
    transfer: str = ""  # `send` or `recv`
    beside: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    doubt: str = ""
    origins: tuple[int, ...] = ()

    @cached_property
    def links(self) -> frozenset[tuple[int, ...]]:
        """The pairs of devices that a transfer links, including known pairs of other programs."""
        return frozenset(self.groups or (meeting.members for meeting in self.rendezvous))

    @cached_property
    def of_device(self) -> dict[int, Rendezvous]:
        """Maps each issuing device to its rendezvous."""
        return {device: meeting for meeting in self.rendezvous for device in meeting.issuers}


@dataclass(frozen=True, eq=False)
class Decision:
    """The known part of a predicate, a branch index or a trip count.

    `classes` maps each of the program's device ids to a class: devices of one class surely decide
    identically. `values` maps them to the values, if these are known before the run. Devices of
    separately compiled programs decide identically if their `symbols` are equal.
    `is_constant`: compilers know the value, because it does not depend on a device id.
    """

    classes: dict[int, int]
    values: dict[int, int] | None = None
    place: Place = NOWHERE
    symbols: dict[int, str] = field(default_factory=dict[int, str])
    is_constant: bool = False

    def agree(self, devices: Sequence[int]) -> bool:
        """Returns True if the devices of this program among `devices` surely decide identically."""
        known = self.classes if self.values is None else self.values
        return len({known[device] for device in devices if device in known}) <= 1


@dataclass(frozen=True, eq=False)
class ProgramLoop:
    """`condition (body condition)*`, the body `trips` times.

    `is_chained`: every collective of an iteration comes after all of the previous iteration.
    """

    trips: Decision
    condition: ProgramBlock
    body: ProgramBlock
    place: Place = NOWHERE
    is_chained: bool = True


@dataclass(frozen=True, eq=False)
class ProgramBranch:
    """A conditional; `choice` is the index of the branch that runs."""

    choice: Decision
    branches: tuple[ProgramBlock, ...]
    place: Place = NOWHERE


type Node = CollectiveIssue | ProgramLoop | ProgramBranch


@dataclass(frozen=True)
class TextOrder(Sequence[int]):
    """The `before` of a block of `nodes` nodes that come one after another."""

    nodes: int

    def __len__(self) -> int:
        return self.nodes

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        chosen = range(self.nodes)[index]
        if isinstance(chosen, int):
            return (1 << chosen) - 1
        return [(1 << position) - 1 for position in chosen]


@dataclass(frozen=True, eq=False)
class ProgramBlock:
    """Nodes in text order. Bit `j` of `before[i]`: node `j` ends before node `i` starts."""

    nodes: tuple[Node, ...] = ()
    before: Sequence[int] = ()

    def has_order(self, first: int, second: int) -> bool:
        """Returns True if two nodes, given by their positions, are forced into some order."""
        low, high = min(first, second), max(first, second)
        return bool(self.before[high] >> low & 1)

    @cached_property
    def is_total(self) -> bool:
        """True if the text order is the only order."""
        if isinstance(self.before, TextOrder):
            return True
        return all(before == (1 << i) - 1 for i, before in enumerate(self.before))

    @cached_property
    def rendezvous(self) -> frozenset[Rendezvous]:
        """Every rendezvous of the block and its nested blocks, except in blocks that never run."""
        return frozenset(r for node in self.nodes for r in footprint(node))


@dataclass(frozen=True, eq=False)
class CompiledOrder:
    """A compiled program: its devices, the block that it issues, the collectives deleted as dead.

    `may_run_on_gpu`: it is not known to be for another platform. `permutes_on_components`: it is
    compiled with the option `COMPONENTS` of `order.communicators`.
    """

    name: str
    devices: tuple[int, ...]
    block: ProgramBlock
    dead: tuple[CollectiveIssue, ...] = ()
    place: Place = NOWHERE
    may_run_on_gpu: bool = True
    permutes_on_components: bool = False


def bit_positions(bits: int) -> Iterator[int]:
    """Yields the positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def inner_blocks(node: Node) -> tuple[ProgramBlock, ...]:
    """Returns the blocks of a loop or a branch; none for a collective."""
    if isinstance(node, ProgramLoop):
        return (node.condition, node.body)
    return node.branches if isinstance(node, ProgramBranch) else ()


def with_blocks(
    node: ProgramLoop | ProgramBranch, blocks: Sequence[ProgramBlock]
) -> ProgramLoop | ProgramBranch:
    """Replaces the blocks of a loop or branch, given in the order of `inner_blocks`."""
    if isinstance(node, ProgramLoop):
        return replace(node, condition=blocks[0], body=blocks[1])
    return replace(node, branches=tuple(blocks))


def compiled_blocks(node: Node) -> tuple[ProgramBlock, ...]:
    """Returns the blocks that a compiled program has: compilers delete a body that never runs."""
    if isinstance(node, ProgramLoop) and node.trips.is_constant:
        return reached_blocks(node)
    return inner_blocks(node)


def issues_of(
    block: ProgramBlock, inside: Callable[[Node], Iterable[ProgramBlock]] = inner_blocks
) -> Iterator[CollectiveIssue]:
    """Yields the collectives of the block in text order; `inside` gives the blocks to descend."""
    for node in block.nodes:
        if isinstance(node, CollectiveIssue):
            yield node
            continue
        for inner in inside(node):
            yield from issues_of(inner, inside)


def blocks_of(block: ProgramBlock) -> Iterator[ProgramBlock]:
    """Yields the block and every block nested in it."""
    yield block
    for node in block.nodes:
        for inner in inner_blocks(node):
            yield from blocks_of(inner)


def reached_blocks(node: Node) -> tuple[ProgramBlock, ...]:
    """Returns the blocks of a node that may run, without bodies of 0 trips and untaken branches."""
    if isinstance(node, CollectiveIssue):
        return ()
    values = decision_of(node).values
    if values is None:
        return inner_blocks(node)
    if isinstance(node, ProgramBranch):
        taken = set(values.values())
        return tuple(branch for i, branch in enumerate(node.branches) if i in taken)
    return (node.condition, node.body) if any(values.values()) else (node.condition,)


def reached_blocks_of(block: ProgramBlock) -> Iterator[ProgramBlock]:
    """Yields the block and every block nested in it that may run."""
    yield block
    for node in block.nodes:
        for inner in reached_blocks(node):
            yield from reached_blocks_of(inner)


def decision_of(node: ProgramLoop | ProgramBranch) -> Decision:
    """Returns the trip count of a loop or the branch index of a branch."""
    return node.trips if isinstance(node, ProgramLoop) else node.choice


def footprint(node: Node) -> frozenset[Rendezvous]:
    """Returns every rendezvous of the node, including those of blocks inside that may run."""
    if isinstance(node, CollectiveIssue):
        return frozenset(node.rendezvous)
    return frozenset(r for block in reached_blocks(node) for r in block.rendezvous)


def rebuilt(
    block: ProgramBlock,
    issue: Callable[[CollectiveIssue], CollectiveIssue],
    decision: Callable[[Decision], Decision] = lambda kept: kept,
) -> ProgramBlock:
    """Maps the collectives and the decisions of a block, including nested ones."""

    def rebuild_node(node: Node) -> Node:
        if isinstance(node, CollectiveIssue):
            return issue(node)
        node = with_blocks(node, [rebuilt(each, issue, decision) for each in inner_blocks(node)])
        if isinstance(node, ProgramLoop):
            return replace(node, trips=decision(node.trips))
        return replace(node, choice=decision(node.choice))

    return replace(block, nodes=tuple(rebuild_node(node) for node in block.nodes))


def in_text_order(block: ProgramBlock) -> ProgramBlock:
    """Returns the block of a scheduled program, which issues in text order.

    No compiler runs on it again, so no collective is rewritten, moved or unrolled.
    """

    def freeze_node(node: Node) -> Node:
        if isinstance(node, CollectiveIssue):
            return replace(node, beside="", doubt="")
        node = with_blocks(node, [in_text_order(each) for each in inner_blocks(node)])
        return replace(node, is_chained=True) if isinstance(node, ProgramLoop) else node

    return ProgramBlock(
        tuple(freeze_node(node) for node in block.nodes), TextOrder(len(block.nodes))
    )


def shift_devices(program: CompiledOrder, first: int) -> CompiledOrder:
    """Adds `first` to every device id of the program."""

    def shift_issue(issue: CollectiveIssue) -> CollectiveIssue:
        meetings = (
            Rendezvous(
                tuple(d + first for d in meeting.members), tuple(d + first for d in meeting.issuers)
            )
            for meeting in issue.rendezvous
        )
        groups = tuple(tuple(d + first for d in group) for group in issue.groups)
        return replace(issue, rendezvous=tuple(meetings), groups=groups)

    def shift_decision(decision: Decision) -> Decision:
        values = decision.values
        return replace(
            decision,
            classes={d + first: known for d, known in decision.classes.items()},
            values=None if values is None else {d + first: v for d, v in values.items()},
            symbols={d + first: symbol for d, symbol in decision.symbols.items()},
        )

    return replace(
        program,
        devices=tuple(d + first for d in program.devices),
        block=rebuilt(program.block, shift_issue, shift_decision),
        dead=tuple(shift_issue(issue) for issue in program.dead),
    )


def connected_components(
    meetings: Iterable[Sequence[int]], devices: Iterable[int]
) -> list[tuple[int, ...]]:
    """Returns the connected components of the devices, which meetings link.

    Each component is sorted, and the components are sorted by their first device.
    """
    parent = {device: device for device in devices}

    def root(device: int) -> int:
        parent.setdefault(device, device)
        while parent[device] != device:
            # Path halving keeps the trees flat.
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    for members in dict.fromkeys(tuple(meeting) for meeting in meetings):
        first = root(members[0])
        for member in members[1:]:
            parent[root(member)] = first
    classes: dict[int, list[int]] = {}
    for device in sorted(parent):
        classes.setdefault(root(device), []).append(device)
    return [tuple(members) for members in classes.values()]


def parts_without(meetings: Sequence[tuple[int, ...]], device: int) -> dict[int, int]:
    """Maps each other device to its connected component after one device is removed."""
    rest = [tuple(d for d in members if d != device) for members in dict.fromkeys(meetings)]
    listed = connected_components([members for members in rest if members], ())
    return {d: number for number, members in enumerate(listed) for d in members}
