"""Collectives of what an accumulator takes in: one collective of the whole suffices.

    %g = "stablehlo.all_reduce"(%x)                  // in the loop
    %next = stablehlo.add %sum, %g                   // %sum is read by nothing else
  ==>
    %next = stablehlo.add %local, %x                 // in the loop, from zero
    %g = "stablehlo.all_reduce"(%local_at_the_end)   // behind it
    %total = stablehlo.add %sum_at_the_start, %g

What accumulates is a tree of ops of one kind (`Tree`), `%next = %sum + (%a + %b) - %c`; what leads
from the collective to a leaf of it is a chain f of ops that is linear for the accumulation ⊕: f(x)
⊕ f(y) = f(x ⊕ y), and f makes the identity of ⊕ of the identity, for then a loop that never ran is
no exception. With ⊕ an addition: whatever moves elements or drops some, negation, multiplication
and division by what does not change in the loop, and collectives that add or move; a device that is
sent nothing has zeros, the identity. With ⊕ a maximum, a minimum, `and` or `or`: what moves
elements, and collectives that do so or combine by ⊕.

The rewritten chain has the accumulator's element type throughout. Conversions to it from a
narrower type of its own kind are no obstacle, and fall away: of floats they are exact, of integers
too unless something before them may have wrapped around.

Integers are exact, and so are maxima and minima. A sum of floats is taken in another order. With u
the unit roundoff of the accumulator's type (2⁻⁵³ for f64), T iterations, L terms in each, D members
of a group and k roundings of the chain, each of the two results is a sum of at most n = T·L·D + k
roundings away from the exact one, so that for γ = n·u / (1 − n·u) (Higham, Accuracy and Stability
of Numerical Algorithms, section 4.2)

    |before − after| ≤ 2 γ (|start| + Σ |terms|)

where Σ is over iterations, terms and members. What the chain computed in a narrower type than the
accumulator's it now computes in that one, so that `before` has its own rounding besides. A sum
that overflows in one order may not in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.channels import channel_number
from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.analysis.reducers import identity_of, is_identity_of, reducer_kind
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.constants import splat_of
from stablehlo_tools.ir.values import key_of, maker_of, producer
from stablehlo_tools.transforms.parts.pipeline_collectives.moves import is_static_tensor, named
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import (
    OpenedLoop,
    build_at,
    converted,
)

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


REDUCING = frozenset({"stablehlo.all_reduce", "stablehlo.reduce_scatter"})
_COMPLETE = frozenset({"stablehlo.all_gather", "stablehlo.all_to_all"})
_SENDING = frozenset({"stablehlo.collective_permute", "stablehlo.collective_broadcast"})
_MOVING = frozenset(
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "dynamic_slice", "reshape", "reverse", "slice", "transpose")
)
_SCALING = frozenset({"stablehlo.multiply", "stablehlo.divide"})
CONVERT = "stablehlo.convert"
_LEAST_FLOAT = 16  # bits of an accumulator of floats
_WIDER = {"bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",)}


@dataclass(frozen=True, eq=False)
class ChainOp:
    """An op of a chain, and the number of the operand that the chain comes through."""

    op: ir.Operation
    through: int


def why_not_linear(
    body: LoopBody, steps: Sequence[ChainOp], kind: str, element: ir.Type
) -> str | None:
    """Why a chain is not linear for accumulation by `kind` in elements of a type."""
    if not _accumulates(kind, element):
        return f"it is accumulated by {kind} of {element}"
    for step in steps:
        reason = _why_not(body, step, kind)
        if reason:
            return reason
    return _why_not_widened(steps, kind)


def signature(step: ChainOp) -> tuple[object, ...]:
    """What two steps have in common that do the same; their types may differ, and their channels,
    as long as ids count the same."""
    op = step.op
    attributes = [
        (name, str(value)) for name, value in op.attributes.items() if name != "channel_handle"
    ]
    others = [_described(value) for i, value in enumerate(op.operands) if i != step.through]
    in_partitions = channel_number(op) > 0
    shape = tuple(shape_of(op.results[0]))
    return (op.name, step.through, tuple(sorted(attributes)), in_partitions, tuple(others), shape)


def takes_number(op: ir.Operation) -> bool:
    """Whether what an op of a chain reads besides is of the chain's element type."""
    return op.name in _SCALING or op.name == "stablehlo.pad"


def _described(value: ir.Value) -> object:
    splat = splat_of(value)
    return value if splat is None else (repr(splat), str(value.type))


def _accumulates(kind: str, element: ir.Type) -> bool:
    """Whether the identity of an accumulation is known, and a total of it is well defined."""
    if isinstance(element, ir.FloatType):
        wide = element.width >= _LEAST_FLOAT
        return wide and kind in ("add", "maximum", "minimum")
    if not isinstance(element, ir.IntegerType) or (kind == "add" and element.width == 1):
        return False
    return identity_of(kind, element) is not None


def _why_not(body: LoopBody, step: ChainOp, kind: str) -> str | None:
    op = step.op
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return f"the {named(op)} has a value without a static shape"
    others = [value for i, value in enumerate(op.operands) if i != step.through]
    if not all(body.is_indexed(value) and not body.is_moving(value) for value in others):
        return f"the {named(op)} has another operand that changes in the loop"
    if op.name in REDUCING:
        return _why_not_reduced(op, kind)
    if op.name in _MOVING | _COMPLETE:
        return None if step.through == 0 else f"the {named(op)} reads it as an index"
    if op.name == CONVERT:
        return _why_not_converted(op)
    if kind == "add" and _is_additive(step, others):
        return None
    return f"the {named(op)} is not linear for {kind}"


def _why_not_reduced(op: ir.Operation, kind: str) -> str | None:
    if len(op.operands) != 1:
        return f"the {named(op)} has several operands"
    if reducer_kind(op.regions[0].blocks[0]) != kind:
        return f"the {named(op)} reduces otherwise than by {kind}"
    if element_of(op.operands[0]) != element_of(op.results[0]):
        return f"the {named(op)} changes the element type"
    return None


def _is_additive(step: ChainOp, others: Sequence[ir.Value]) -> bool:
    """Whether an op is linear for addition alone."""
    op = step.op
    if op.name == "stablehlo.negate" or op.name in _SENDING:
        return True
    if op.name == "stablehlo.pad":
        return step.through == 0 and is_identity_of("add", others[0])
    if op.name not in _SCALING:
        return False
    if op.name == "stablehlo.multiply":
        return True
    return step.through == 0 and isinstance(element_of(op.results[0]), ir.FloatType)


def _why_not_converted(op: ir.Operation) -> str | None:
    """Conversions are to a type that has all values of the one before, and is of its kind."""
    before, after = element_of(op.operands[0]), element_of(op.results[0])
    if isinstance(before, ir.FloatType) and isinstance(after, ir.FloatType):
        return None if _is_wider(before, after) else f"the {named(op)} rounds"
    if isinstance(before, ir.IntegerType) and isinstance(after, ir.IntegerType):
        from_unsigned = before.is_unsigned or before.width == 1
        keeps = from_unsigned == after.is_unsigned or from_unsigned
        if keeps and before.width < after.width:
            return None
        return f"the {named(op)} does not keep every integer"
    return f"the {named(op)} changes the kind of number"


def _is_wider(before: ir.FloatType, after: ir.FloatType) -> bool:
    """Whether every float of one type is one of the other."""
    return before == after or str(after) in _WIDER.get(str(before), ())


def _why_not_widened(steps: Sequence[ChainOp], kind: str) -> str | None:
    """Integers that wrap around before they are widened would not do so afterwards."""
    if kind != "add" or not isinstance(element_of(steps[0].op.operands[0]), ir.IntegerType):
        return None
    computed: ir.Operation | None = None
    for step in steps:
        if step.op.name == CONVERT and computed is not None:
            return f"the {named(computed)} may wrap around before the {named(step.op)}"
        if step.op.name in REDUCING | _SCALING or step.op.name == "stablehlo.negate":
            computed = step.op
    return None


@dataclass(frozen=True, eq=False)
class Accumulated:
    """A leaf of a tree that a chain of ops, collectives among them, makes of a local value."""

    tree: Tree
    leaf: Leaf
    steps: Sequence[ChainOp]

    @property
    def local(self) -> ir.Value:
        """What is accumulated in the loop instead."""
        first = self.steps[0]
        return first.op.operands[first.through]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for leaves that one local accumulator can hold together."""
        shape = tuple(shape_of(self.local))
        steps = [signature(step) for step in self.steps if step.op.name != "stablehlo.convert"]
        return (self.tree.carry, self.leaf.negative, shape, tuple(steps))


def accumulated(body: LoopBody, collective: Collective, trees: Trees) -> Accumulated | str:
    """How a collective can run on an accumulator, or why it cannot."""
    steps: list[ChainOp] = []
    op, value = collective.op, collective.op.operands[0]
    while op.name not in TREES:
        if len(op.results) != 1 or list(op.operands).count(value) != 1:
            return f"the {named(op)} is not linear"
        steps.append(ChainOp(op, list(op.operands).index(value)))
        value = op.results[0]
        following = only_user(body, value)
        if isinstance(following, str):
            return following
        op = following
    tree = trees.over(op)
    if isinstance(tree, str):
        return tree
    element = element_of(body.arguments[tree.carry])
    reason = why_not_linear(body, steps, tree.kind, element)
    if reason:
        return reason
    found = [leaf for leaf in tree.leaves if leaf.value == value]
    if len(found) != 1:
        return f"carry {tree.carry} takes its result in more than once"
    return Accumulated(tree, found[0], steps)


class SumWriter:
    """Writes leaves of one tree; those that other ops make stay in it."""

    def __init__(self, body: LoopBody, leaves: Sequence[Accumulated]) -> None:
        self._body = body
        self._tree = leaves[0].tree
        self._start = body.loop.operands[self._tree.carry]
        self._element = element_of(self._start)
        self._alike: dict[tuple[object, ...], list[Accumulated]] = {}
        for leaf in leaves:
            self._alike.setdefault(leaf.signature, []).append(leaf)
        gone = {leaf.leaf.value for leaf in leaves}
        self._staying = [leaf for leaf in self._tree.leaves if leaf.value not in gone]
        self.dead = [] if self._staying else [self._tree.carry]
        self.removed = [*self._tree.nodes, *(step.op for leaf in leaves for step in leaf.steps)]
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """A local accumulator for each kind of chain."""
        identity = identity_of(self._tree.kind, self._element)
        assert identity is not None, "of an accumulation that was planned"
        for leaves in self._alike.values():
            kind = ir.RankedTensorType.get(
                shape_of(leaves[0].local), self._element, loc=self._body.loop.location
            )
            self._numbers.append(opened.carry(kind, identity))

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the body's share, and the totals."""
        carry, where = self._tree.carry, self._tree.nodes[0].location
        inside = Builder(opened.inside, where)
        if self._staying:
            opened.hand_on(carry, self._added(inside, opened.argument(carry), self._staying))
        total = opened.result(carry) if self._staying else self._start
        collectives: list[ir.Operation] = []
        for number, leaves in zip(self._numbers, self._alike.values(), strict=True):
            parts = [Leaf(converted(inside, p.local, self._element), False) for p in leaves]
            opened.hand_on(number, self._added(inside, opened.argument(number), parts))
            value = self._finished(opened, opened.result(number), leaves[0].steps, collectives)
            sign = leaves[0].leaf.negative
            total = self._added(build_at(opened, where), total, [Leaf(value, sign)])
        return {carry: total}, collectives

    def _added(self, builder: Builder, total: ir.Value, leaves: Sequence[Leaf]) -> ir.Value:
        for leaf in leaves:
            total = builder.same(
                "subtract" if leaf.negative else self._tree.kind, total, leaf.value
            )
        return total

    def _finished(
        self,
        opened: OpenedLoop,
        value: ir.Value,
        steps: Sequence[ChainOp],
        collectives: list[ir.Operation],
    ) -> ir.Value:
        """What a chain makes of a total, in the accumulator's element type."""
        for step in steps:
            if step.op.name == CONVERT:
                continue
            value = self._run(opened, step, value)
            if self._body.communicates(step.op):
                collectives.append(maker_of(value))
        return value

    def _run(self, opened: OpenedLoop, step: ChainOp, value: ir.Value) -> ir.Value:
        op = step.op
        builder = build_at(opened, op.location)
        operands = [opened.after.get(other, 0) for other in _others(step)]
        if takes_number(op):
            operands = [converted(builder, other, self._element) for other in operands]
        operands.insert(step.through, value)
        kind = builder.tensor(shape_of(op.results[0]), self._element)
        new = ir.Operation.create(
            op.name,
            results=[kind],
            operands=operands,
            attributes=dict(op.attributes.items()),
            regions=len(op.regions),
            loc=op.location,
            ip=opened.point,
        )
        if op.name in REDUCING:
            write_reducer(self._tree.kind, self._element, new.regions[0], op.location)
        return new.results[0]


def _others(step: ChainOp) -> list[ir.Value]:
    return [value for i, value in enumerate(step.op.operands) if i != step.through]
