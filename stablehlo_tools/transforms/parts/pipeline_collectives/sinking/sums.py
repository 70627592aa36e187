"""Sinks collectives whose results are accumulated: one collective of the total suffices.

    %g = "stablehlo.all_reduce"(%x)                  // in the loop
    %next = stablehlo.add %sum, %g                   // %sum is read by nothing else
  ==>
    %next = stablehlo.add %local, %x                 // in the loop, from zero
    %g = "stablehlo.all_reduce"(%local_at_the_end)   // after it
    %total = stablehlo.add %sum_at_the_start, %g

The accumulation is a tree of ops of one kind (`Tree`), for example `%next = %sum + (%a + %b) - %c`.
A chain f of ops leads from the collective to a leaf of it. It must be linear for the accumulation
⊕: f(x) ⊕ f(y) = f(x ⊕ y). It must also map the identity of ⊕ to the identity, so that the rewrite
holds for a loop that never ran.

If ⊕ is an addition, these ops are linear: ops that move or drop elements, negation, multiplication
and division by an invariant of the loop, and collectives that add or move. A device that receives
no message has zeros, the identity. A factor that changes in the loop stays there: if all devices of
a group have the same, each scales its own summand before the all_reduce. If ⊕ is a maximum, a
minimum, `and` or `or`, the linear ops are those that move elements, and collectives that do so or
combine by ⊕.

The rewritten chain has the accumulator's element type throughout. Conversions to it from a narrower
type of the same kind are allowed and disappear. They are exact for floats, and for integers too
unless an earlier op may have wrapped around.

Integers are exact, and so are maxima and minima. A sum of floats is re-associated. Let u be the
unit roundoff of the accumulator's type (2⁻⁵³ for f64). There are T iterations, L terms in each, D
members of a group and k roundings of the chain. Each of the two results is a sum with at most
n = T·L·D + k roundings. With γ = n·u / (1 − n·u) (Higham, Accuracy and Stability of Numerical
Algorithms, section 4.2)

    |before − after| ≤ 2 γ (|start| + Σ |terms|)

where Σ is over iterations, terms and members. If the chain computed in a narrower type than the
accumulator's, it now computes in the accumulator's, so `before` has the rounding of the narrower
type besides. A sum that overflows in one order may not in another.

A sum may also continue from one device's carry (`masked_sum`). A partitioner writes
`sum.at[indices].add(updates)` of sharded updates like this. The carry stays local, one all_reduce
follows the loop, and the same bound holds:

    %own = stablehlo.select %first, %sum, %zeros     // %first: on one device of each group
    %next = "stablehlo.all_reduce"(stablehlo.scatter(%own, %indices, %updates))   // adds
  ==>
    %start = stablehlo.select %first, %sum_at_the_start, %zeros    // before the loop
    %next = stablehlo.scatter(%local, %indices, %updates)          // in the loop
    %total = "stablehlo.all_reduce"(%local_at_the_end)             // after it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective, channel_number
from stablehlo_tools.analysis.loop_carries import (
    AccumulatedTerm,
    Tree,
    Trees,
    is_sum,
    only_adds,
    only_user,
    tree_reducer,
)
from stablehlo_tools.analysis.loop_values import AlikeInGroups
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ALL_REDUCE,
    COLLECTIVE_BROADCAST,
    COLLECTIVE_PERMUTE,
    CONVERT,
    DIVIDE,
    GATHER,
    MULTIPLY,
    NEGATE,
    PAD,
    RESHAPE,
    SELECT,
    WHILE,
)
from stablehlo_tools.dialect.reducers import identity_of, reducer_kind
from stablehlo_tools.dialect.traits import Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.clone import emptied_clone
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import describe_op, is_identity_of, maker_of, producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import OpenedLoop, frame_before
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    is_static_tensor,
)

_REDUCING = ops_with(Trait.ACROSS_DEVICES)
# A device that receives no message has zeros, which are the identity of a sum only.
_SENDING = frozenset({COLLECTIVE_PERMUTE, COLLECTIVE_BROADCAST})
# Ops that move elements; if across devices, to all of a group. A gather is costly, so excluded.
_MOVING = ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.EXCHANGE) - _SENDING - {GATHER}
_SCALING = frozenset({MULTIPLY, DIVIDE})
# Ops that may precede a factor that is moved before the collective.
_ON_SUMMANDS = _SCALING | {ALL_REDUCE, CONVERT, NEGATE}
_LEAST_FLOAT = 16  # bits of an accumulator of floats
_WIDER = {"bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",)}


@dataclass(frozen=True, eq=False)
class ChainOp:
    """An op of a chain, and the number of its operand that belongs to the chain."""

    op: ir.Operation
    through: int

    @property
    def others(self) -> list[ir.Value]:
        """The operands that do not belong to the chain."""
        return [value for i, value in enumerate(self.op.operands) if i != self.through]


def why_not_linear(
    body: LoopBody,
    steps: Sequence[ChainOp],
    reducer: str,
    element: ir.Type,
    scaled: Sequence[ChainOp] = (),
) -> str | None:
    """Says why a chain is not linear for accumulation by `reducer` in elements of a type.

    None if it is linear. The steps in `scaled` run in the loop, so their factors may change there.
    """
    # The identity must be known, and a total well defined.
    if isinstance(element, ir.FloatType):
        accumulates = element.width >= _LEAST_FLOAT and reducer in ("add", "maximum", "minimum")
    else:
        is_number = isinstance(element, ir.IntegerType) and (reducer, element.width) != ("add", 1)
        accumulates = is_number and identity_of(reducer, element) is not None
    if not accumulates:
        return f"an accumulation by {reducer} of {element} cannot be sunk"
    for step in steps:
        reason = _why_not(body, step, reducer, is_in_loop=step in scaled)
        if reason:
            return reason
    # Integers that wrap around before they are widened would not do so afterwards.
    if reducer != "add" or not isinstance(element_of(steps[0].op.operands[0]), ir.IntegerType):
        return None
    computed: ir.Operation | None = None
    for step in steps:
        if step.op.name == CONVERT and computed is not None:
            return f"the {describe_op(computed)} may wrap around before the {describe_op(step.op)}"
        if step.op.name in _REDUCING | _SCALING or step.op.name == NEGATE:
            computed = step.op
    return None


def signature(step: ChainOp) -> tuple[object, ...]:
    """Returns a key that is equal for steps that compute the same.

    Types may differ. Channels may differ too, if both number partitions or both replicas.
    """
    op = step.op
    attributes = [
        (name, str(value)) for name, value in op.attributes.items() if name != "channel_handle"
    ]
    others: list[object] = []
    for value in step.others:
        splat = splat_of(value)
        others.append(value if splat is None else (repr(splat), str(value.type)))
    in_partitions = channel_number(op) > 0
    shape = tuple(shape_of(op.results[0]))
    return (op.name, step.through, tuple(sorted(attributes)), in_partitions, tuple(others), shape)


def _changes(body: LoopBody, value: ir.Value) -> bool:
    return not body.is_indexed(value) or body.is_moving(value)


def takes_number(op: ir.Operation) -> bool:
    """Returns True if the other operands of a chain's op must have the chain's element type."""
    return op.name in _SCALING or op.name == PAD


def _why_not(
    body: LoopBody, step: ChainOp, reducer: str, *, is_in_loop: bool = False
) -> str | None:
    op = step.op
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return f"the {describe_op(op)} has a value without a static shape"
    others = step.others
    if not is_in_loop and any(_changes(body, value) for value in others):
        return f"the {describe_op(op)} has another operand that changes in the loop"
    if op.name in _REDUCING:
        if len(op.operands) != 1:
            return f"the {describe_op(op)} has several operands"
        if reducer_kind(Combining(op).combiner) != reducer:
            return f"the {describe_op(op)} does not reduce by {reducer}"
        if element_of(op.operands[0]) != element_of(op.results[0]):
            return f"the {describe_op(op)} changes the element type"
        return None
    if op.name in _MOVING:
        return None if step.through == 0 else f"the {describe_op(op)} reads it as an index"
    if op.name == CONVERT:
        # A conversion must be to a type of the same kind that represents all values.
        before, after = element_of(op.operands[0]), element_of(op.results[0])
        if isinstance(before, ir.FloatType) and isinstance(after, ir.FloatType):
            is_wider = before == after or str(after) in _WIDER.get(str(before), ())
            return None if is_wider else f"the {describe_op(op)} rounds"
        if isinstance(before, ir.IntegerType) and isinstance(after, ir.IntegerType):
            from_unsigned = before.is_unsigned or before.width == 1
            keeps = from_unsigned == after.is_unsigned or from_unsigned
            if keeps and before.width < after.width:
                return None
            return f"the {describe_op(op)} does not keep every integer"
        return f"the {describe_op(op)} changes the kind of number"
    # These are linear for addition alone.
    is_additive = op.name in (NEGATE, MULTIPLY) or op.name in _SENDING
    if op.name == PAD:
        is_additive = step.through == 0 and is_identity_of("add", others[0])
    if op.name == DIVIDE:
        is_float = isinstance(element_of(op.results[0]), ir.FloatType)
        is_additive = step.through == 0 and is_float
    if reducer == "add" and is_additive:
        return None
    return f"the {describe_op(op)} is not linear for {reducer}"


@dataclass(frozen=True, eq=False)
class Accumulated:
    """A leaf of a tree that a chain of ops, collectives among them, computes from a local value.

    `steps` run after the loop. Those in `scaled` stay in it, before the others.
    """

    tree: Tree
    leaf: AccumulatedTerm
    steps: Sequence[ChainOp]
    scaled: Sequence[ChainOp] = ()

    @property
    def local(self) -> ir.Value:
        """The value that the loop accumulates, after `scaled`, instead of the chain's result."""
        first = self.steps[0]
        return first.op.operands[first.through]

    def write_local(self, build: Builder, element: ir.Type) -> ir.Value:
        """Writes the value that the loop accumulates."""
        value = build.convert(self.local, element)
        for step in self.scaled:
            factor = build.convert(step.others[0], element)
            value = build.same(step.op.name.removeprefix("stablehlo."), value, factor)
        return value

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for leaves that one local accumulator can hold together."""
        shape = tuple(shape_of(self.local))
        steps = [signature(step) for step in self.steps if step.op.name != CONVERT]
        return (self.tree.carry, self.leaf.negative, shape, tuple(steps))


def chain_from(
    body: LoopBody, collective: Collective, ends: Callable[[ir.Operation], bool]
) -> tuple[list[ChainOp], ir.Operation, ir.Value] | str:
    """Returns the ops that lead from a collective, each read by the next alone, to an op that
    `ends` accepts.

    Returns the steps, that op, and its operand from the chain; or the reason why none exists.
    """
    steps: list[ChainOp] = []
    op, value = collective.op, collective.op.operands[0]
    while not ends(op):
        if len(op.results) != 1 or list(op.operands).count(value) != 1:
            return f"the {describe_op(op)} is not linear"
        steps.append(ChainOp(op, list(op.operands).index(value)))
        value = op.results[0]
        following = only_user(body, value)
        if isinstance(following, str):
            return following
        op = following
    return steps, op, value


def plan_accumulation(
    body: LoopBody, collective: Collective, trees: Trees, alike: AlikeInGroups
) -> Accumulated | str:
    """Plans to run a collective on an accumulator, or says why it cannot."""
    chain = chain_from(body, collective, lambda op: tree_reducer(op) is not None)
    if isinstance(chain, str):
        return chain
    steps, op, value = chain
    tree = trees.over(op)
    if isinstance(tree, str):
        return tree
    element = element_of(body.arguments[tree.carry])
    scaled = _factors_in_loop(body, steps, alike)
    reason = why_not_linear(body, steps, tree.reducer, element, scaled)
    if reason:
        return reason
    leaves = [leaf for leaf in tree.leaves if leaf.value == value]
    if len(leaves) != 1:
        return f"carry {tree.carry} accumulates its result more than once"
    after = [step for step in steps if step not in scaled]
    return Accumulated(tree, leaves[0], after, scaled)


def _factors_in_loop(
    body: LoopBody, steps: Sequence[ChainOp], alike: AlikeInGroups
) -> list[ChainOp]:
    """Returns the multiplications of a chain by factors that change in the loop, and that can run
    on each device before the collectives: a group has one factor, so it scales each summand."""
    scaled: list[ChainOp] = []
    for number, step in enumerate(steps):
        before = [each.op for each in steps[:number]]
        keeps_shape = all(shape_of(op.results[0]) == shape_of(op.operands[0]) for op in before)
        if not keeps_shape or step.op.name not in _ON_SUMMANDS:
            break
        is_scaling = step.op.name in _SCALING and any(_changes(body, v) for v in step.others)
        if is_scaling and alike(body.loop, before, step.others):
            scaled.append(step)
    return scaled


class SumWriter:
    """Writes leaves of one tree; leaves that other ops compute stay in it."""

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
        steps = (step.op for leaf in leaves for step in (*leaf.steps, *leaf.scaled))
        self.removed = [*self._tree.nodes, *steps]
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves a local accumulator for each kind of chain."""
        identity = identity_of(self._tree.reducer, self._element)
        assert identity is not None, "of an accumulation that was planned"
        for leaves in self._alike.values():
            type_ = ir.RankedTensorType.get(
                shape_of(leaves[0].local), self._element, loc=self._body.loop.location
            )
            self._numbers.append(opened.carry(type_, identity))

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the local sums in the body, and the chains and totals after the loop."""
        carry, where = self._tree.carry, self._tree.nodes[0].location
        inside = Builder(opened.inside, where)
        if self._staying:
            opened.hand_on(carry, self._add_leaves(inside, opened.argument(carry), self._staying))
        total = opened.result(carry) if self._staying else self._start
        collectives: list[ir.Operation] = []
        for number, leaves in zip(self._numbers, self._alike.values(), strict=True):
            # An inner loop that sums from zero can continue the outer sum: one addition less.
            if (
                len(leaves) == 1
                and not leaves[0].scaled
                and self._goes_on(leaves[0].local, opened.argument(number))
            ):
                opened.hand_on(number, leaves[0].local)
            else:
                locals_ = [leaf.write_local(inside, self._element) for leaf in leaves]
                parts = [AccumulatedTerm(value, False) for value in locals_]
                opened.hand_on(number, self._add_leaves(inside, opened.argument(number), parts))
            # The chain runs on the total in the accumulator's type, so conversions are dropped.
            value = opened.result(number)
            for step in leaves[0].steps:
                if step.op.name == CONVERT:
                    continue
                value = self._run(opened, step, value)
                if self._body.communicates(step.op):
                    collectives.append(maker_of(value))
            sign = leaves[0].leaf.negative
            total = self._add_leaves(opened.behind(where), total, [AccumulatedTerm(value, sign)])
        return {carry: total}, collectives

    def _goes_on(self, local: ir.Value, total: ir.Value) -> bool:
        """Lets an inner loop that sums up `local` start from `total` in place of zero.

        Returns False if it cannot.
        """
        maker = producer(local)
        source = maker.operands[0] if maker is not None and maker.name == RESHAPE else local
        loop = producer(source)
        if loop is None or loop.name != WHILE or self._tree.reducer != "add":
            return False
        carry = ir.OpResult(source).result_number
        start = loop.operands[carry]
        alone = all(len(list(value.uses)) == 1 for value in {local, source})
        if not alone or local.type != total.type or not is_identity_of("add", start):
            return False
        if not only_adds(LoopBody(loop, self._body.effects), carry):
            return False
        builder = Builder(ir.InsertionPoint(loop), loop.location)
        same = start.type == total.type
        loop.operands[carry] = total if same else builder.reshape(total, shape_of(start))
        return True

    def _add_leaves(
        self, builder: Builder, total: ir.Value, leaves: Sequence[AccumulatedTerm]
    ) -> ir.Value:
        for leaf in leaves:
            total = builder.same(
                "subtract" if leaf.negative else self._tree.reducer, total, leaf.value
            )
        return total

    def _run(self, opened: OpenedLoop, step: ChainOp, value: ir.Value) -> ir.Value:
        op = step.op
        builder = opened.behind(op.location)
        operands = [opened.after.get(other, 0) for other in step.others]
        if takes_number(op):
            operands = [builder.convert(other, self._element) for other in operands]
        operands.insert(step.through, value)
        type_ = builder.tensor(shape_of(op.results[0]), self._element)
        new = emptied_clone(op, operands, [type_], opened.point, keep_shardings=True)
        if op.name in _REDUCING:
            write_reducer(self._tree.reducer, self._element, new.regions[0], op.location)
        return new.results[0]


@dataclass(frozen=True, eq=False)
class MaskedSum:
    """An all_reduce whose result is a carry that the next iteration reads in one select only."""

    op: ir.Operation
    select: ir.Operation
    carry: int


def masked_sum(
    body: LoopBody, collective: Collective, trips: int | None, alike: AlikeInGroups
) -> MaskedSum | None:
    """Plans to run a collective on local sums; None if it cannot."""
    op = collective.op
    carries = body.carries_of(op.results[0])
    if op.name != ALL_REDUCE or not trips or len(carries) != 1 or body.users.get(op.results[0]):
        return None
    argument = body.arguments[carries[0]]
    select = only_user(body, argument)
    if isinstance(select, str) or select.name != SELECT or select.operands[0] == argument:
        return None
    first, *either = select.operands
    zeros = either[either[0] == argument]
    fits = (
        reducer_kind(Combining(op).combiner) == "add"
        and is_identity_of("add", zeros)
        and not body.is_read_by_condition(carries[0])
        and all(body.is_indexed(value) and not body.is_moving(value) for value in (first, zeros))
        and is_sum(op.operands[0], select.results[0])
        and alike.picks_one(collective, first, by=either[0] == argument)
    )
    return MaskedSum(op, select, carries[0]) if fits else None


class MaskedSumWriter:
    """Lets a loop carry local sums; the first device's sum begins with the carry's start value."""

    def __init__(self, body: LoopBody, plan: MaskedSum) -> None:
        self._plan = plan
        self.dead: list[int] = []
        self.removed = [plan.select, plan.op]
        before = frame_before(body)
        before.bind(body.arguments[plan.carry], 0, body.loop.operands[plan.carry])
        before.run(plan.select, 0)
        body.loop.operands[plan.carry] = before.get(plan.select.results[0], 0)

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves no carry: the old one holds the local sum."""

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Yields the local sums from each iteration, and reduces the last ones after the loop."""
        op, carry = self._plan.op, self._plan.carry
        opened.hand_on(carry, op.operands[0])
        self._plan.select.results[0].replace_all_uses_with(opened.argument(carry))
        total = copy_with(op, {op.operands[0]: opened.result(carry)}, opened.point)
        return {carry: total.results[0]}, [total]
