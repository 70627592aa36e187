"""Which updates and loop carries may lie where their operands lay, and which need a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.tasks.nodes import Node, Ref, Role

_WRITERS = frozenset({Role.UPDATE, Role.LOOP, Role.KERNEL})


def settle_overwriting(nodes: Mapping[int, Node], users: Sequence[Sequence[int]]) -> None:
    """Gives updates and changed carries storages of their own where the old value is still needed.

    That is where it is an argument that was not donated, where the program returns it, or where an
    op that comes later reads it. An update that cannot be in place reads and writes all of it.
    """
    for node in nodes.values():
        if node.role not in _WRITERS or not node.passes:
            continue
        kept = tuple(
            ref
            if ref is None or not _changes(node, i) or _is_last(node, ref, nodes, users)
            else None
            for i, ref in enumerate(node.passes)
        )
        if node.role is Role.LOOP:
            node.copied = sum(
                size
                for size, before, after in zip(node.result_bytes, node.passes, kept, strict=False)
                if before is not None and after is None
            )
        if None in kept and node.role is not Role.LOOP:
            node.passes, node.reads = (), ()
        else:
            node.passes = kept


def _changes(node: Node, result: int) -> bool:
    """Whether a result differs from what it lies in: not an invariant operand of a loop."""
    if node.body is None:
        return True
    argument, ref = node.body.carries[result]
    return ref != (argument, 0)


def _is_last(
    node: Node, ref: Ref, nodes: Mapping[int, Node], users: Sequence[Sequence[int]]
) -> bool:
    """Whether nobody reads a value, or what it is a view of, once a node has written into it."""
    step: Ref | None = ref
    while step is not None:
        source = nodes[step[0]]
        if source.role is Role.CHEAP and not source.made_of:
            return True  # each reader has its own
        if source.role is Role.INPUT and source.persistent:
            return False
        if any(_reads_later(user, node, step, nodes) for user in users[step[0]]):
            return False
        step = source.passes[step[1]] if step[1] < len(source.passes) else None
    return True


def _reads_later(user: int, node: Node, ref: Ref, nodes: Mapping[int, Node]) -> bool:
    return user > node.index and ref in nodes[user].sources
