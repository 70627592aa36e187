"""Kernels: which nodes of a block the compilers fuse, and the work of what they fuse.

An op that is cheap to do as a kernel reads is fused into its user, where all its users are in one
kernel: elementwise ops, slices, transposes and reshapes into each other and into the reduction or
the update that they feed. Where they are in a few kernels, it is repeated in each, if that moves
fewer bytes than writing its result once and reading it in each. What the program returns as well
may be fused all the same (a kernel can write several results). Broadcasts and iotas are made anew
in every kernel that reads them. Matrix products, gathers, sorts and collectives are kernels by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role
from stablehlo_tools.cost.kernels import Work, WorkKind


def members_of(kernel: Sequence[Node], nodes: Mapping[int, Node], anew: Set[int]) -> list[Node]:
    """The nodes of a kernel and those that it repeats, in order."""
    members = {node.index: node for node in kernel}
    pending = list(kernel)
    while pending:
        node = pending.pop()
        for source in node.sources:
            for index, _ in from_memory(node, source, nodes):
                if index in anew and index not in members:
                    members[index] = nodes[index]
                    pending.append(nodes[index])
    return [members[index] for index in sorted(members)]


def kernel_work(
    members: Sequence[Node], written: Sequence[Node], nodes: Mapping[int, Node]
) -> Work:
    """The work of the nodes of a kernel, of which those `written` leave their results in memory."""
    root = members[-1]
    if root.known is not None:
        return root.known
    # Bytes read of each value from outside of the kernel: all that its nodes slice out of it, and
    # no more than there is.
    inside = {node.index for node in members}
    read_bytes: dict[Ref, float] = {}
    for node in members:
        for position, source in enumerate(node.sources):
            limit = node.reads[position] if position < len(node.reads) else None
            for ref in from_memory(node, source, nodes):
                if ref[0] not in inside:
                    size = size_of(ref, nodes)
                    taken = read_bytes.get(ref, 0.0) + (size if limit is None else limit)
                    read_bytes[ref] = min(size, taken)
    read = sum(read_bytes.values())
    wrote = 0.0
    for node in written:
        if not node.passes or node.role not in (Role.UPDATE, Role.KERNEL):
            wrote += sum(node.result_bytes)
        elif node.role is Role.UPDATE:
            wrote += size_of(node.sources[1], nodes)
        else:
            wrote += sum(limit or 0.0 for limit in node.reads)  # a scatter's
    kind = root.kind
    if root.role is Role.CHEAP:
        kind = WorkKind.COPY
    elif root.role in (Role.FUSIBLE, Role.RESHAPE, Role.UPDATE):
        computes = any(node.vector_flops for node in members)
        kind = WorkKind.ELEMENTWISE if computes else WorkKind.COPY
    return Work(
        kind=kind,
        bytes=read + wrote,
        vector_flops=sum(node.vector_flops for node in members),
        matmuls=tuple(node.matmul for node in members if node.matmul is not None),
        dtype=root.dtype,
    )


def from_memory(user: Node, source: Ref, nodes: Mapping[int, Node]) -> Sequence[Ref]:
    """What is read for a source: of what is made anew, what it is made of."""
    node = nodes[source[0]]
    if node.role is Role.NOTHING:
        return ()
    if node.role is Role.CHEAP and not needs_memory(user, source[0]):
        return node.made_of
    return (source,)


_JOINABLE = frozenset({Role.FUSIBLE, Role.RESHAPE, Role.REDUCTION, Role.UPDATE})
_FUSED = frozenset({Role.FUSIBLE, Role.RESHAPE})
_MAKES_ANEW = _JOINABLE | {Role.CHEAP}
# Tens of instructions for each element, where exp is one of the hardware's.
_POLYNOMIALS = frozenset(
    {"tanh", "erf", "erf_inv", "erfc", "sine", "cosine", "tan", "power", "atan2"}
)


@dataclass(frozen=True, slots=True)
class Fusing:
    """The fusing of a compiler: the ops that are dear to compute again in several kernels, and if
    a gather computes what it reads."""

    dear: frozenset[str]
    into_gathers: bool


XLA_GPU = Fusing(dear=_POLYNOMIALS, into_gathers=True)
XLA_TPU = Fusing(dear=frozenset(), into_gathers=False)
_MOST_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Fusion:
    """The kernels of a block in the order of their last nodes, each one's nodes in order.

    Nodes that are `anew` are in none: each kernel that reads them makes them for itself.
    """

    kernels: Sequence[Sequence[Node]]
    anew: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Readers:
    """The kernels that read a value; `blocked` where one of them has to find it in memory."""

    kernels: frozenset[int] = frozenset()
    blocked: bool = False

    def and_(self, other: _Readers) -> _Readers:
        """Both; too many to repeat it in each are as good as blocked."""
        kernels = self.kernels | other.kernels
        return _Readers(kernels, self.blocked or other.blocked or len(kernels) > _MOST_REPEATS)


_NONE, _BLOCKED = _Readers(), _Readers(blocked=True)


def fuse(nodes: Mapping[int, Node], users: Sequence[Sequence[int]], fusing: Fusing) -> Fusion:
    """The kernels of a block's nodes, given in order; `users` as `users_of` gives them."""
    kernel_of: dict[int, int] = {}  # by node, the index of the kernel's last node
    # The nodes that take too many instructions to be run in each reader, and what alone is made of
    # one of them, as its convert.
    long: set[int] = set()
    for node in nodes.values():
        made_of_one = len(node.sources) == 1 and len(users[node.sources[0][0]]) == 1
        if (
            node.reordered
            or node.name in fusing.dear
            or (made_of_one and node.sources[0][0] in long)
        ):
            long.add(node.index)
    readers_of: dict[int, _Readers] = {}  # of what is made anew, what reads it in the end
    for node in reversed(list(nodes.values())):
        readers = _NONE
        for user in users[node.index]:
            reader = _reader(node, nodes[user], kernel_of, readers_of, fusing)
            readers = readers.and_(reader)
        kernel_of[node.index] = node.index
        fits = node.role in _FUSED and not readers.blocked and readers.kernels
        if fits and len(readers.kernels) == 1:
            (kernel_of[node.index],) = readers.kernels
        elif node.role is Role.CHEAP:
            if not any(needs_memory(nodes[user], node.index) for user in users[node.index]):
                readers_of[node.index] = readers
        elif (
            fits
            and node.index not in long
            and _repeating_pays(node, nodes, users, len(readers.kernels))
        ):
            readers_of[node.index] = readers
    kernels: dict[int, list[Node]] = {}
    for node in nodes.values():
        if node.index not in readers_of:
            kernels.setdefault(kernel_of[node.index], []).append(node)
    return Fusion([kernels[last] for last in sorted(kernels)], frozenset(readers_of))


def users_of(nodes: Sequence[Node], count: int) -> list[list[int]]:
    """For each of `count` indices the nodes, of those given, that read its results."""
    users: list[list[int]] = [[] for _ in range(count)]
    for node in nodes:
        for source in dict.fromkeys(index for index, _ in node.sources):
            users[source].append(node.index)
    return users


def needs_memory(user: Node, index: int) -> bool:
    """Whether a user of a broadcast or an iota reads it from memory, not made anew."""
    into = user.role is Role.UPDATE and user.sources[0][0] == index
    return into or user.role not in _MAKES_ANEW


def _reader(
    node: Node,
    user: Node,
    kernel_of: dict[int, int],
    readers_of: dict[int, _Readers],
    fusing: Fusing,
) -> _Readers:
    """The kernels that read a node through one of its users: the user's own or, where the user is
    made anew wherever it is read, those that read that."""
    if user.role is Role.OUTPUT:
        return _NONE  # a kernel writes it as one more result
    if user.index in readers_of:
        return readers_of[user.index]
    # What an update writes into is not computed in its kernel: it would have to be written whole.
    into = user.role is Role.UPDATE and user.sources[0][0] == node.index
    joins = user.role in _JOINABLE or (fusing.into_gathers and user.name == "gather")
    if not joins or into:
        return _BLOCKED
    return _Readers(frozenset({kernel_of[user.index]}))


def _repeating_pays(
    node: Node, nodes: Mapping[int, Node], users: Sequence[Sequence[int]], times: int
) -> bool:
    """Whether to read what a node reads so many times moves less than to keep its result."""
    if any(nodes[user].role is Role.OUTPUT for user in users[node.index]):
        return False
    refs: dict[Ref, None] = {}  # its sources, or what they are made of where they are made anew
    for source in node.sources:
        inner = nodes[source[0]]
        if inner.role is Role.CHEAP:
            refs.update(dict.fromkeys(inner.made_of))
        elif inner.role is not Role.NOTHING:
            refs[source] = None
    result, read = sum(node.result_bytes), sum(size_of(ref, nodes) for ref in refs)
    return times * read < read + (1 + times) * result


def size_of(ref: Ref, nodes: Mapping[int, Node]) -> float:
    """Bytes of a result."""
    sizes = nodes[ref[0]].result_bytes
    return sizes[ref[1]] if ref[1] < len(sizes) else 0.0
