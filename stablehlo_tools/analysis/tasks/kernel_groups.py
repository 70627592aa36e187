"""Groups the nodes of a block into kernels, as compilers fuse them, and counts their work.

A cheap op is fused into its user if all its users are in one kernel. Elementwise ops, slices,
transposes and reshapes are fused into each other, and into the reduction or update that they feed.
If the users are in a few kernels, the op can be recomputed in each. It is, if this moves fewer
bytes than writing its result once and reading it in each. An op may be fused even if the program
also returns its result, because a kernel can write several results. Broadcasts and iotas are
recomputed in every kernel that reads them. Matrix products, gathers, sorts and collectives are
separate kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.analysis.tasks.nodes import KernelRole, Ref, TaskNode
from stablehlo_tools.cost.kernels import KernelWork, WorkKind


def members_of(
    kernel: Sequence[TaskNode], nodes: Mapping[int, TaskNode], anew: Set[int]
) -> list[TaskNode]:
    """Returns the nodes of a kernel, with recomputed ones, in order."""
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
    members: Sequence[TaskNode], written: Sequence[TaskNode], nodes: Mapping[int, TaskNode]
) -> KernelWork:
    """Returns the work of a kernel's nodes; `written` are those with results in memory."""
    root = members[-1]
    if root.known is not None:
        return root.known
    # Bytes read of each value from outside of the kernel: the sum of all slices, limited by the
    # value's size.
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
        if not node.passes or node.role not in (KernelRole.UPDATE, KernelRole.KERNEL):
            wrote += sum(node.result_bytes)
        elif node.role is KernelRole.UPDATE:
            wrote += size_of(node.sources[1], nodes)
        else:
            wrote += sum(limit or 0.0 for limit in node.reads)  # a scatter's
    kind = root.kind
    if root.role is KernelRole.CHEAP:
        kind = WorkKind.COPY
    elif root.role in (KernelRole.FUSIBLE, KernelRole.RESHAPE, KernelRole.UPDATE):
        computes = any(node.vector_flops for node in members)
        kind = WorkKind.ELEMENTWISE if computes else WorkKind.COPY
    return KernelWork(
        kind=kind,
        bytes=read + wrote,
        vector_flops=sum(node.vector_flops for node in members),
        matmuls=tuple(node.matmul for node in members if node.matmul is not None),
        dtype=root.dtype,
    )


def from_memory(user: TaskNode, source: Ref, nodes: Mapping[int, TaskNode]) -> Sequence[Ref]:
    """Returns the operands read; recomputed producers are replaced by their own operands."""
    node = nodes[source[0]]
    if node.role is KernelRole.NOTHING:
        return ()
    if node.role is KernelRole.CHEAP and not needs_memory(user, source[0]):
        return node.made_of
    return (source,)


_JOINABLE = frozenset(
    {KernelRole.FUSIBLE, KernelRole.RESHAPE, KernelRole.REDUCTION, KernelRole.UPDATE}
)
_FUSED = frozenset({KernelRole.FUSIBLE, KernelRole.RESHAPE})
_MAKES_ANEW = _JOINABLE | {KernelRole.CHEAP}
# Ops with tens of instructions for each element, unlike exp, which the hardware has.
_POLYNOMIALS = frozenset(
    {"tanh", "erf", "erf_inv", "erfc", "sine", "cosine", "tan", "power", "atan2"}
)


@dataclass(frozen=True, slots=True)
class Fusing:
    """The fusing of a compiler.

    `dear` are ops that are too expensive to recompute in several kernels. `into_gathers` is True if
    a gather computes its operands.
    """

    dear: frozenset[str]
    into_gathers: bool


XLA_GPU = Fusing(dear=_POLYNOMIALS, into_gathers=True)
XLA_TPU = Fusing(dear=frozenset(), into_gathers=False)
_MOST_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Fusion:
    """The kernels of a block in the order of their last nodes, each kernel's nodes in order.

    Nodes in `anew` are in no kernel: each kernel that reads them recomputes them.
    """

    kernels: Sequence[Sequence[TaskNode]]
    anew: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Readers:
    """The kernels that read a value; `blocked` if one of them must read it from memory."""

    kernels: frozenset[int] = frozenset()
    blocked: bool = False

    def and_(self, other: _Readers) -> _Readers:
        """Returns the readers of both; `blocked` if they are too many to recompute in each."""
        kernels = self.kernels | other.kernels
        return _Readers(kernels, self.blocked or other.blocked or len(kernels) > _MOST_REPEATS)


_NONE, _BLOCKED = _Readers(), _Readers(blocked=True)


def fuse(nodes: Mapping[int, TaskNode], users: Sequence[Sequence[int]], fusing: Fusing) -> Fusion:
    """Returns the kernels of a block's nodes, which are in order; `users` is from `users_of`."""
    kernel_of: dict[int, int] = {}  # by node, the index of the kernel's last node
    # Nodes with too many instructions to be recomputed in each reader, and the only user of such a
    # node if it has no other operand, such as its convert.
    long: set[int] = set()
    for node in nodes.values():
        made_of_one = len(node.sources) == 1 and len(users[node.sources[0][0]]) == 1
        if (
            node.reordered
            or node.name in fusing.dear
            or (made_of_one and node.sources[0][0] in long)
        ):
            long.add(node.index)
    readers_of: dict[int, _Readers] = {}  # of recomputed nodes, the kernels that finally read them
    for node in reversed(list(nodes.values())):
        readers = _NONE
        for user in users[node.index]:
            reader = _reader(node, nodes[user], kernel_of, readers_of, fusing)
            readers = readers.and_(reader)
        kernel_of[node.index] = node.index
        fits = node.role in _FUSED and not readers.blocked and readers.kernels
        if fits and len(readers.kernels) == 1:
            (kernel_of[node.index],) = readers.kernels
        elif node.role is KernelRole.CHEAP:
            if not any(needs_memory(nodes[user], node.index) for user in users[node.index]):
                readers_of[node.index] = readers
        elif (
            fits
            and node.index not in long
            and _repeating_pays(node, nodes, users, len(readers.kernels))
        ):
            readers_of[node.index] = readers
    kernels: dict[int, list[TaskNode]] = {}
    for node in nodes.values():
        if node.index not in readers_of:
            kernels.setdefault(kernel_of[node.index], []).append(node)
    return Fusion([kernels[last] for last in sorted(kernels)], frozenset(readers_of))


def users_of(nodes: Sequence[TaskNode], count: int) -> list[list[int]]:
    """Returns, for each of `count` indices, the given nodes that read its results."""
    users: list[list[int]] = [[] for _ in range(count)]
    for node in nodes:
        for source in dict.fromkeys(index for index, _ in node.sources):
            users[source].append(node.index)
    return users


def needs_memory(user: TaskNode, index: int) -> bool:
    """Returns True if a user of a broadcast or an iota reads it from memory."""
    into = user.role is KernelRole.UPDATE and user.sources[0][0] == index
    return into or user.role not in _MAKES_ANEW


def _reader(
    node: TaskNode,
    user: TaskNode,
    kernel_of: dict[int, int],
    readers_of: dict[int, _Readers],
    fusing: Fusing,
) -> _Readers:
    """Returns the kernels that read a node through one of its users.

    That is the user's own kernel. If the user is recomputed in its readers, it is the readers'
    kernels.
    """
    if user.role is KernelRole.OUTPUT:
        return _NONE  # a kernel writes it as an additional result
    if user.index in readers_of:
        return readers_of[user.index]
    # An update's buffer is not fused into its kernel: it would have to be written whole.
    into = user.role is KernelRole.UPDATE and user.sources[0][0] == node.index
    joins = user.role in _JOINABLE or (fusing.into_gathers and user.name == "gather")
    if not joins or into:
        return _BLOCKED
    return _Readers(frozenset({kernel_of[user.index]}))


def _repeating_pays(
    node: TaskNode, nodes: Mapping[int, TaskNode], users: Sequence[Sequence[int]], times: int
) -> bool:
    """Returns True if recomputing a node in each kernel moves fewer bytes than storing it."""
    if any(nodes[user].role is KernelRole.OUTPUT for user in users[node.index]):
        return False
    refs: dict[Ref, None] = {}  # its sources, or their operands if they are recomputed
    for source in node.sources:
        inner = nodes[source[0]]
        if inner.role is KernelRole.CHEAP:
            refs.update(dict.fromkeys(inner.made_of))
        elif inner.role is not KernelRole.NOTHING:
            refs[source] = None
    result, read = sum(node.result_bytes), sum(size_of(ref, nodes) for ref in refs)
    # To store the result, its operands are read once, it is written once and read in each kernel.
    return times * read < read + (1 + times) * result


def size_of(ref: Ref, nodes: Mapping[int, TaskNode]) -> float:
    """Returns the bytes of a result."""
    sizes = nodes[ref[0]].result_bytes
    return sizes[ref[1]] if ref[1] < len(sizes) else 0.0
