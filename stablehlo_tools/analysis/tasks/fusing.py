"""Groups the nodes of a block into kernels, the way the compilers fuse.

An op that is cheap to do as a kernel reads is fused into its user, where all its users are in one
kernel: elementwise ops, slices, transposes and reshapes into each other and into the reduction or
the update that they feed. What the program returns as well may be fused all the same (a kernel can
write several results). Broadcasts and iotas are made anew in every kernel that reads them. Matrix
products, gathers, sorts and collectives are kernels by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.tasks.nodes import Node, Role

_JOINABLE = frozenset({Role.FUSIBLE, Role.RESHAPE, Role.REDUCTION, Role.UPDATE})
_FUSED = frozenset({Role.FUSIBLE, Role.RESHAPE})
_MAKES_ANEW = _JOINABLE | {Role.CHEAP}


@dataclass(frozen=True, slots=True)
class _Readers:
    """The kernels that read a value: none, one, or too many to be fused into."""

    kernel: int = -1
    many: bool = False

    def and_(self, other: _Readers) -> _Readers:
        """Both."""
        if self.many or other.many or self.kernel == -1 or other.kernel == -1:
            return _Readers(max(self.kernel, other.kernel), self.many or other.many)
        return self if self.kernel == other.kernel else _MANY


_NONE, _MANY = _Readers(), _Readers(many=True)


def kernels_of(nodes: Sequence[Node], users: Sequence[Sequence[int]]) -> list[list[Node]]:
    """The kernels of a block's nodes, in the order of their last nodes; each one's nodes in order.

    Every node stands in one kernel, those that fuse with nothing alone. `users` are those of each
    node, as `users_of` gives them.
    """
    by_index = {node.index: node for node in nodes}
    kernel_of: dict[int, int] = {}  # by node, the index of the kernel's last node
    readers_of: dict[int, _Readers] = {}  # of nodes made anew, what reads them in the end
    for node in reversed(nodes):
        readers = _NONE
        for user in users[node.index]:
            readers = readers.and_(_reader(node, by_index[user], kernel_of, readers_of))
        joins = node.role in _FUSED and not readers.many and readers.kernel >= 0
        kernel_of[node.index] = readers.kernel if joins else node.index
        if node.role is Role.CHEAP and not is_read(node, by_index, users):
            readers_of[node.index] = readers
    kernels: dict[int, list[Node]] = {}
    for node in nodes:
        kernels.setdefault(kernel_of[node.index], []).append(node)
    return [kernels[last] for last in sorted(kernels)]


def users_of(nodes: Sequence[Node], count: int) -> list[list[int]]:
    """For each of `count` indices the nodes, of those given, that read its results."""
    users: list[list[int]] = [[] for _ in range(count)]
    for node in nodes:
        for source in dict.fromkeys(index for index, _ in node.sources):
            users[source].append(node.index)
    return users


def is_read(node: Node, nodes: Mapping[int, Node], users: Sequence[Sequence[int]]) -> bool:
    """Whether what could be made anew is read from memory by a user."""
    return any(needs_memory(nodes[user], node.index) for user in users[node.index])


def needs_memory(user: Node, index: int) -> bool:
    """Whether a user of a broadcast or an iota reads it from memory, not made anew."""
    into = user.role is Role.UPDATE and user.sources[0][0] == index
    return into or user.role not in _MAKES_ANEW


def live_nodes(nodes: Sequence[Node], kept: Iterable[Node]) -> set[int]:
    """The nodes that those kept need, themselves included: compilers delete the others."""
    live = {node.index for node in kept}
    for node in reversed(nodes):
        if node.index in live:
            live.update(index for index, _ in node.sources)
    return live


def _reader(
    node: Node, user: Node, kernel_of: dict[int, int], readers_of: dict[int, _Readers]
) -> _Readers:
    """What reads a node through one of its users."""
    if user.role is Role.OUTPUT:
        return _NONE
    if user.index in readers_of:
        return readers_of[user.index]
    # What an update writes into is not computed in its kernel: it would have to be written whole.
    into = user.role is Role.UPDATE and user.sources[0][0] == node.index
    if user.role not in _JOINABLE or into:
        return _MANY
    return _Readers(kernel_of[user.index])
