"""What of a block is needed: compilers delete the rest, collectives included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from stablehlo_tools.analysis.tasks.nodes import Body, Node, Role
from stablehlo_tools.overlap.task_graph import COLLECTIVES

_DELETABLE = COLLECTIVES - {"send", "recv"}  # where nobody reads their results


def live_nodes(nodes: Sequence[Node]) -> set[int]:
    """The nodes that outputs, inputs and ops with an effect need, and these themselves."""
    return _behind(nodes, (node.index for node in nodes if has_effect(node)))


def has_effect(node: Node) -> bool:
    """Whether a node stays though nobody reads it."""
    if node.body is not None:
        return any(map(has_effect, _inner(node.body)))
    sends = node.role is Role.COLLECTIVE and node.name not in _DELETABLE
    return sends or node.role in (Role.INPUT, Role.OUTPUT, Role.DECISION)


def drop_dead_carries(body: Body, wanted: Set[int]) -> None:
    """Lets those carries of a loop stay as they are that only lead to themselves.

    `wanted` are the results that are read after the loop.
    """
    kept = [node.index for node in _inner(body) if has_effect(node)]
    needed: set[int] = set()
    found = set(wanted)
    while found != needed:
        needed = found
        ends = [body.carries[i][1][0] for i in needed]
        live = _behind(body.nodes[:-1], [*kept, *ends])
        found = needed | {i for i, (argument, _) in enumerate(body.carries) if argument in live}
    body.carries = [
        carry if i in needed else (carry[0], (carry[0], 0)) for i, carry in enumerate(body.carries)
    ]
    body.nodes[-1].sources = tuple(result for _, result in body.carries)


def _inner(body: Body) -> Iterable[Node]:
    """The nodes of a loop's body that are not its inputs and outputs."""
    return (n for n in body.nodes if n.role not in (Role.INPUT, Role.OUTPUT))


def _behind(nodes: Sequence[Node], kept: Iterable[int]) -> set[int]:
    live = set(kept)
    for node in reversed(nodes):
        if node.index in live:
            live.update(index for index, _ in node.sources)
    return live
