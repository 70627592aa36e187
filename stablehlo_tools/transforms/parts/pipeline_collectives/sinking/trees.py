"""Trees of ops of one kind by which a loop accumulates: `%next = %sum + (%a + %b) - %c`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import named

_ADD, _SUBTRACT = "stablehlo.add", "stablehlo.subtract"
TREES = frozenset(
    f"stablehlo.{name}" for name in ("add", "and", "maximum", "minimum", "or", "subtract")
)


@dataclass(frozen=True)
class Leaf:
    """A value that a tree combines; `negative` where it is subtracted."""

    value: ir.Value
    negative: bool


@dataclass(frozen=True)
class Tree:
    """How a carry is accumulated: `leaves` without the carry itself, which stands in it once."""

    carry: int
    kind: str
    leaves: Sequence[Leaf]
    nodes: Sequence[ir.Operation]  # from the root down


class Trees:
    """The trees of a body, each looked at once."""

    def __init__(self, body: LoopBody) -> None:
        self._body = body
        self._over: dict[Key, Tree | str] = {}

    def over(self, op: ir.Operation) -> Tree | str:
        """The whole tree that an op of TREES is a node of; why it is none of an accumulator."""
        path: list[ir.Operation] = []
        while key_of(op) not in self._over:
            path.append(op)
            above = self._above(op)
            if not isinstance(above, ir.Operation):
                self._over[key_of(op)] = above
            else:
                op = above
        found = self._over[key_of(op)]
        self._over.update((key_of(node), found) for node in path)
        return found

    def _above(self, op: ir.Operation) -> ir.Operation | Tree | str:
        """The node above one, or the tree that it is the root of."""
        body, value = self._body, op.results[0]
        carries, users = body.carries_of(value), body.users.get(value, [])
        if carries:
            if len(carries) > 1 or users:
                return f"more than carry {carries[0]} reads what the {named(op)} adds up"
            return _tree(body, op, carries[0])
        above = only_user(body, value)
        if isinstance(above, str) or _kind(above) == _kind(op):
            return above
        return f"it is added up, but the {named(above)} reads that in the same iteration"


def only_user(body: LoopBody, value: ir.Value) -> ir.Operation | str:
    """The only op that reads a value, or who else does."""
    users, carries = body.users.get(value, []), body.carries_of(value)
    if len(users) == 1 and not carries:
        return users[0]
    if carries:
        return f"carry {carries[0]} takes its result as it is"
    if not users:
        return "nothing reads its result"
    return f"its result is read by the {named(users[0])} and by the {named(users[1])}"


def is_read_by_condition(body: LoopBody, carry: int) -> bool:
    """Whether how often the loop runs depends on a carry."""
    condition = body.loop.regions[0].blocks[0]
    return bool(list(condition.arguments[carry].uses))


def _tree(body: LoopBody, root: ir.Operation, carry: int) -> Tree | str:
    accumulator, kind = body.arguments[carry], _kind(root)
    assert kind is not None, "one of the trees"
    nodes, leaves = _below(body, root, kind)
    here = [leaf for leaf in leaves if leaf.value == accumulator]
    if len(here) != 1 or here[0].negative:
        return f"the {named(root)} does not add it to carry {carry}"
    reason = _why_not_private(body, carry, nodes)
    if reason:
        return reason
    return Tree(carry, kind, [leaf for leaf in leaves if leaf != here[0]], nodes)


def _below(body: LoopBody, root: ir.Operation, kind: str) -> tuple[list[ir.Operation], list[Leaf]]:
    """The nodes of a tree, from the root down, and what it combines, from left to right."""
    nodes, leaves = [root], list[Leaf]()
    pending = _operands(root, negative=False)
    while pending:
        leaf = pending.pop()
        maker = producer(leaf.value)
        if maker is None or _kind(maker) != kind or not _is_read_once(body, leaf.value):
            leaves.append(leaf)
            continue
        nodes.append(maker)
        pending += _operands(maker, negative=leaf.negative)
    return nodes, leaves


def _operands(node: ir.Operation, *, negative: bool) -> list[Leaf]:
    """What a node combines, the right operand first."""
    left, right = node.operands
    flips = node.name == _SUBTRACT
    return [Leaf(right, negative != flips), Leaf(left, negative)]


def _is_read_once(body: LoopBody, value: ir.Value) -> bool:
    """Whether a value of the body is one operand of one op."""
    users = body.users.get(value, [])
    if not body.is_inside(value) or len(users) != 1 or body.carries_of(value):
        return False
    return list(users[0].operands).count(value) == 1


def _kind(op: ir.Operation) -> str | None:
    """What an op accumulates by; None for ops that do not."""
    if op.name not in TREES:
        return None
    return (_ADD if op.name == _SUBTRACT else op.name).removeprefix("stablehlo.")


def _why_not_private(body: LoopBody, carry: int, nodes: Sequence[ir.Operation]) -> str | None:
    """Whether anything but its own tree could tell how far an accumulator has come."""
    accumulator = body.arguments[carry]
    own = {key_of(node) for node in nodes}
    other = next((u for u in body.users.get(accumulator, []) if key_of(u) not in own), None)
    if other is not None:
        return f"the accumulator, carry {carry}, is also read by the {named(other)}"
    if body.carries_of(accumulator):
        return f"the accumulator is also handed on as carry {body.carries_of(accumulator)[0]}"
    if is_read_by_condition(body, carry):
        return f"the condition reads the accumulator, carry {carry}"
    return None
