"""The work of a kernel: what its nodes compute, and the bytes that cross its boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.tasks.fusing import needs_memory
from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role
from stablehlo_tools.cost.work import Work, WorkKind


def kernel_work(kernel: Sequence[Node], written: Sequence[Node], nodes: Sequence[Node]) -> Work:
    """The work of the nodes of a kernel, of which those `written` leave their results in memory."""
    root = kernel[-1]
    read = sum(_reads(kernel, nodes).values())
    wrote = sum(_written_bytes(node, nodes) for node in written)
    return Work(
        kind=_kind(kernel),
        bytes=read + wrote,
        vector_flops=sum(node.vector_flops for node in kernel),
        matmuls=tuple(node.matmul for node in kernel if node.matmul is not None),
        dtype=root.dtype,
    )


def _kind(kernel: Sequence[Node]) -> WorkKind:
    root = kernel[-1]
    if root.role is Role.CHEAP:
        return WorkKind.COPY
    if root.role in (Role.FUSIBLE, Role.RESHAPE, Role.UPDATE):
        computes = any(node.vector_flops for node in kernel)
        return WorkKind.ELEMENTWISE if computes else WorkKind.COPY
    return root.kind


def _reads(kernel: Sequence[Node], nodes: Sequence[Node]) -> Mapping[Ref, float]:
    """Bytes read of each value from outside of the kernel: all that its nodes slice out of it, and
    no more than there is."""
    inside = {node.index for node in kernel}
    found: dict[Ref, float] = {}
    for node in kernel:
        for position, source in enumerate(node.sources):
            limit = node.reads[position] if position < len(node.reads) else None
            for ref in from_memory(node, source, nodes):
                if ref[0] not in inside:
                    size = _size(ref, nodes)
                    taken = found.get(ref, 0.0) + (size if limit is None else limit)
                    found[ref] = min(size, taken)
    return found


def from_memory(user: Node, source: Ref, nodes: Sequence[Node]) -> Sequence[Ref]:
    """What is read for a source: of what is made anew, what it is made of."""
    node = nodes[source[0]]
    if node.role is Role.NOTHING:
        return ()
    if node.role is Role.CHEAP and not needs_memory(user, source[0]):
        return node.made_of
    return (source,)


def _size(ref: Ref, nodes: Sequence[Node]) -> float:
    sizes = nodes[ref[0]].result_bytes
    return sizes[ref[1]] if ref[1] < len(sizes) else 0.0


def _written_bytes(node: Node, nodes: Sequence[Node]) -> float:
    if not node.passes or node.role not in (Role.UPDATE, Role.KERNEL):
        return sum(node.result_bytes)
    if node.role is Role.UPDATE:
        return _size(node.sources[1], nodes)
    return sum(limit or 0.0 for limit in node.reads)  # a scatter's
