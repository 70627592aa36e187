"""The work of a kernel: what its nodes compute, and the bytes that cross its boundary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role
from stablehlo_tools.cost.work import Work, WorkKind

_MAKES_ANEW = frozenset({Role.FUSIBLE, Role.RESHAPE, Role.REDUCTION, Role.UPDATE, Role.CHEAP})


def needs_memory(user: Node, index: int) -> bool:
    """Whether a user of a broadcast or an iota reads it from memory, not made anew."""
    into = user.role is Role.UPDATE and user.sources[0][0] == index
    return into or user.role not in _MAKES_ANEW


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
    """Bytes read of each value from outside of the kernel: the most that any of its nodes reads."""
    inside = {node.index for node in kernel}
    found: dict[Ref, float] = {}
    for node in kernel:
        for position, source in enumerate(node.sources):
            limit = node.reads[position] if position < len(node.reads) else None
            for ref in from_memory(node, source, nodes):
                if ref[0] in inside:
                    continue
                size = _size(ref, nodes)
                taken = size if limit is None else min(size, limit)
                found[ref] = max(found.get(ref, 0.0), taken)
    return found


def from_memory(user: Node, source: Ref, nodes: Sequence[Node]) -> Iterator[Ref]:
    """What is read for a source: of a broadcast that is made anew, what it is made of."""
    node = nodes[source[0]]
    if node.role is Role.CHEAP and not needs_memory(user, source[0]):
        for inner in node.sources:
            yield from from_memory(node, inner, nodes)
    elif node.role is not Role.NOTHING:
        yield source


def _size(ref: Ref, nodes: Sequence[Node]) -> float:
    sizes = nodes[ref[0]].result_bytes
    return sizes[ref[1]] if ref[1] < len(sizes) else 0.0


def _written_bytes(node: Node, nodes: Sequence[Node]) -> float:
    if node.role is Role.UPDATE:
        return _size(node.sources[1], nodes)
    if node.name == "scatter":
        return node.reads[0] or 0.0 if node.reads else 0.0
    return sum(node.result_bytes)
