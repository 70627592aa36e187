"""Groups the nodes of a block into kernels, the way the compilers fuse.

An op that is cheap to do as a kernel reads is fused into its user, where all its users are in one
kernel: elementwise ops, slices, transposes and reshapes into each other and into the reduction or
the update that they feed. What the program returns as well may be fused all the same (a kernel can
write several results). Broadcasts and iotas are made anew in every kernel that reads them. Matrix
products, gathers, sorts and collectives are kernels by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.tasks.nodes import Body, Node, Role

_JOINABLE = frozenset({Role.FUSIBLE, Role.RESHAPE, Role.REDUCTION, Role.UPDATE})
_FUSED = frozenset({Role.FUSIBLE, Role.RESHAPE})
_IGNORED = frozenset({Role.OUTPUT})


def kernels_of(body: Body) -> list[list[Node]]:
    """The kernels of a block, in the order of their last nodes; each one's nodes in order.

    Every node stands in one kernel, those that fuse with nothing alone; a CHEAP node is in one by
    itself, for those of its users that read it from memory.
    """
    users = users_of(body.nodes)
    kernel_of: dict[int, int] = {}  # by node, the index of the kernel's last node
    for node in reversed(body.nodes):
        kernel_of[node.index] = _joined(node, body.nodes, users, kernel_of)
    kernels: dict[int, list[Node]] = {}
    for node in body.nodes:
        kernels.setdefault(kernel_of[node.index], []).append(node)
    return [kernels[last] for last in sorted(kernels)]


def users_of(nodes: Sequence[Node]) -> list[list[int]]:
    """The nodes that read each node's results."""
    users: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        for source in dict.fromkeys(index for index, _ in node.sources):
            users[source].append(node.index)
    return users


def _joined(
    node: Node, nodes: Sequence[Node], users: Sequence[Sequence[int]], kernel_of: dict[int, int]
) -> int:
    """The kernel that a node belongs to, all its users being placed."""
    if node.role not in _FUSED:
        return node.index
    reading = _through_cheap(node.index, nodes, users)
    kernels = {kernel_of[u] for u in reading if nodes[u].role not in _IGNORED}
    if len(kernels) != 1 or not all(
        nodes[u].role in _JOINABLE or nodes[u].role in _IGNORED for u in reading
    ):
        return node.index
    (kernel,) = kernels
    return kernel if _writes_in_place(node, nodes[kernel]) else node.index


def _through_cheap(index: int, nodes: Sequence[Node], users: Sequence[Sequence[int]]) -> list[int]:
    """The users of a node; of a broadcast of it, those of the broadcast."""
    found: list[int] = []
    for user in users[index]:
        if nodes[user].role is Role.CHEAP:
            found += _through_cheap(user, nodes, users)
        else:
            found.append(user)
    return found


def _writes_in_place(node: Node, root: Node) -> bool:
    """Whether a node may be fused into a kernel that ends in this root.

    What an update writes into is not computed in its kernel, or it would have to write it whole.
    """
    return root.role is not Role.UPDATE or root.sources[0][0] != node.index
