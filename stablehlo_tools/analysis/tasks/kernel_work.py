"""The work of a kernel: what its nodes compute, and the bytes that cross its boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from stablehlo_tools.analysis.tasks.fusing import needs_memory, size_of
from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role
from stablehlo_tools.cost.work import Work, WorkKind


def members_of(kernel: Sequence[Node], nodes: Mapping[int, Node], anew: Set[int]) -> list[Node]:
    """The nodes of a kernel and those that it repeats, in order."""
    found = {node.index: node for node in kernel}
    pending = list(kernel)
    while pending:
        node = pending.pop()
        for source in node.sources:
            for index, _ in from_memory(node, source, nodes):
                if index in anew and index not in found:
                    found[index] = nodes[index]
                    pending.append(nodes[index])
    return [found[index] for index in sorted(found)]


def kernel_work(
    members: Sequence[Node], written: Sequence[Node], nodes: Mapping[int, Node]
) -> Work:
    """The work of the nodes of a kernel, of which those `written` leave their results in memory."""
    root = members[-1]
    read = sum(_reads(members, nodes).values())
    wrote = sum(_written_bytes(node, nodes) for node in written)
    return Work(
        kind=_kind(members),
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


def _kind(members: Sequence[Node]) -> WorkKind:
    root = members[-1]
    if root.role is Role.CHEAP:
        return WorkKind.COPY
    if root.role in (Role.FUSIBLE, Role.RESHAPE, Role.UPDATE):
        computes = any(node.vector_flops for node in members)
        return WorkKind.ELEMENTWISE if computes else WorkKind.COPY
    return root.kind


def _reads(members: Sequence[Node], nodes: Mapping[int, Node]) -> Mapping[Ref, float]:
    """Bytes read of each value from outside of the kernel: all that its nodes slice out of it, and
    no more than there is."""
    inside = {node.index for node in members}
    found: dict[Ref, float] = {}
    for node in members:
        for position, source in enumerate(node.sources):
            limit = node.reads[position] if position < len(node.reads) else None
            for ref in from_memory(node, source, nodes):
                if ref[0] not in inside:
                    size = size_of(ref, nodes)
                    taken = found.get(ref, 0.0) + (size if limit is None else limit)
                    found[ref] = min(size, taken)
    return found


def _written_bytes(node: Node, nodes: Mapping[int, Node]) -> float:
    if not node.passes or node.role not in (Role.UPDATE, Role.KERNEL):
        return sum(node.result_bytes)
    if node.role is Role.UPDATE:
        return size_of(node.sources[1], nodes)
    return sum(limit or 0.0 for limit in node.reads)  # a scatter's
