"""Merges sums of reductions over devices into the reduction of a sum: one collective for several.

Terms of microbatches, of tied weights and of branches of a model may each be reduced before they
are added. This pass adds them on each device first, and reduces the sum once.

    %a = "stablehlo.all_reduce"(%x)                            // a sum over devices
    %b = "stablehlo.all_reduce"(%y)
    %c = stablehlo.add %a, %b
    ==>
    %xy = stablehlo.add %x, %y
    %c = "stablehlo.all_reduce"(%xy)

The same holds for products, maxima, minima, `and`, `or` and `xor`, each of its own kind, and for
reduce_scatter. Terms may form chains and trees, with other values among them. These ops may be
between a collective and the sum:

- slices, reshapes, transposes, broadcasts, pads with a value that the reduction ignores, negations
  and converts to wider types: they may differ between the terms, and then run before the
  collective;
- a dynamic_slice or a scale (the division of a mean), the same in both terms: it stays after the
  collective.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; lower mhlo and sdy first.
  P2  Replica groups name processes and mesh axes that the module has, none of them twice.
  P3  No op has a token: collectives are made fewer before they are ordered.

Guarantees: the signature stays. No more bytes are moved than before, by fewer collectives unless a
term is added to itself. A second run changes nothing. Integers, booleans, maxima and minima have
the same values. Sums of n floats, over devices and terms, are added in another order, in the wider
type if a convert came before. They differ by at most 2 (n - 1) u (|x1| + … + |xn|), where u is the
unit roundoff of that type (2^-24 for f32); means by two more roundings. A product differs by a
factor within 1 + 2 (n - 1) u. Both hold as long as nothing overflows.

Left unchanged: terms that differ in kind, process groups, scatter dimension, or attributes that
steer XLA; a term with other users; sums of narrow integers that are widened, which wrap around;
terms in different blocks; collectives of several operands. `explain` names the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from stablehlo_tools.analysis.collective_likeness import (
    REDUCING,
    CollectiveTraits,
    Groups,
    traits_of,
    why_not_alike,
)
from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    classify_communication,
    element_bits,
    find_collectives,
    tensor_bytes,
)
from stablehlo_tools.analysis.shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, to_place
from stablehlo_tools.dialect.frontend_attributes import (
    FRONTEND_ATTRIBUTES,
    LAYOUTS,
    shared_attributes,
)
from stablehlo_tools.dialect.names import SLICE
from stablehlo_tools.dialect.reducers import IDEMPOTENT, REDUCERS, reducer_kind
from stablehlo_tools.dialect.traits import LAYOUT, full_names, short_names
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.values import maker_of, producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import ops_where
from stablehlo_tools.passes.base import Pass

type Classify = Callable[[ir.Operation], Collective | None]

_COMBINING = full_names(" ".join(REDUCERS))
_LONGEST = 16  # ops between a collective and the sum that it is a term of
_MOVES = short_names(LAYOUT | {SLICE})
_SCALES = frozenset({"divide", "multiply"})
_PASSED = full_names("convert dynamic_slice negate pad slice divide multiply") | LAYOUT
_GROUPING = "_scheduling_group_id"  # dropped: the merged op is scheduled with no other one
_OF_ONE = frozenset({SHARDING, FRONTEND_ATTRIBUTES, *LAYOUTS})  # not copied to the merged op


@dataclass(frozen=True)
class ReassociateCollectivesPass(Pass):
    """Sums of reductions over devices become the reduction of a sum.

    `explain`: a note for each sum of two reductions, merged or not.
    """

    name: ClassVar[str] = "reassociate-collectives"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and replaces the module by it if anything changed."""
        if not find_collectives(module):
            return
        refuse_tokens(module, self.name, "P3")
        draft = copy_module(module)
        # Terms are found within one block.
        inline_all_calls(draft)
        classify = classify_communication(module.context)
        groups = Groups(ModuleFacts.from_module(draft))
        changed = False
        # Visits the ops that combine two values as a reduction would, in program order.
        for op in ops_where(
            draft.operation,
            lambda op: (
                op.name in _COMBINING and isinstance(op.results[0].type, ir.RankedTensorType)
            ),
        ):
            place = to_place(op.location)
            kind = op.name.removeprefix("stablehlo.")

            def find(value: ir.Value, user: ir.Operation, kind: str = kind) -> Term | None:
                return term_of(value, user, kind, classify, groups)

            combine = pair_terms(op, find)
            one, other = (find(value, combine) for value in combine.operands)
            if one is None or other is None:
                continue
            reason = why_not_merged(one, other)
            if reason is None:
                write_merged(combine, one, other)
                changed = True
            if self.explain:
                said = f"stay separate: {reason}" if reason else "became one"
                message = f"two reductions over devices that are combined {said}"
                diagnostics.collected.append(Diagnostic(Severity.NOTE, message, place))
        if changed:
            take_over(module, draft)


@dataclass(frozen=True)
class Term:
    """`after(collective(before(operand)))`: each is a chain of ops, the innermost first.

    A reduction over devices combines elements in place. So an op that moves all elements in the
    same way, or widens them, may as well run before it:

        slice(all_reduce(x))  =  all_reduce(slice(x))

    Ops that depend on the device (dynamic_slice) or round (a scale) stay after it; two terms may
    share them. Each device has only a part of a reduce_scatter's result, so only elementwise ops
    may run before that.
    """

    collective: Collective
    before: tuple[ir.Operation, ...]
    after: tuple[ir.Operation, ...]
    traits: CollectiveTraits

    @property
    def between(self) -> ir.Value:
        """The result of the collective and the ops of `before`, in the original order."""
        return (self.before[-1] if self.before else self.collective.op).results[0]

    @property
    def ops(self) -> tuple[ir.Operation, ...]:
        """All ops that are erased if the term is merged, users before their operands."""
        return (*reversed((*self.before, *self.after)), self.collective.op)


def term_of(
    value: ir.Value, combine: ir.Operation, kind: str, classify: Classify, groups: Groups
) -> Term | None:
    """Returns a value that only `combine` uses as a term of its kind; None if it is not one.

    Raises a located ToolError for groups that the module does not have.
    """
    passed: list[ir.Operation] = []
    user = combine
    for _ in range(_LONGEST):
        op = producer(value)
        if op is None or op.block != combine.block or len(op.results) != 1:
            return None
        # Another user needs the reduced value, so the term would be reduced twice.
        if any(use.owner.operation != user for use in value.uses):
            return None
        collective = classify(op)
        if collective is not None:
            return _reduction(collective, passed[::-1], kind, groups)
        if op.name not in _PASSED:
            return None
        passed.append(op)
        value, user = op.operands[through(op)], op
        if sum(operand == value for operand in op.operands) > 1:
            return None  # a square
    return None


def pair_terms(
    combine: ir.Operation, find: Callable[[ir.Value, ir.Operation], Term | None]
) -> ir.Operation:
    """Returns an op that combines two terms, if they are parts of a sum with another value.

    `find` returns the term that a value is for its user. Returns `combine` if there are no two.

        %1 = add %a, %term        ==>    %1 = add %term, %other
        %2 = add %1, %other              %2 = add %a, %1
    """
    for number, inner in enumerate(map(producer, combine.operands)):
        if inner is None or inner.name != combine.name or inner.block != combine.block:
            continue
        last = combine.operands[1 - number]
        other = find(last, combine)
        if other is None or len(list(inner.results[0].uses)) != 1:
            continue
        for place, value in enumerate(inner.operands):
            term = find(value, inner)
            rest = inner.operands[1 - place]
            if term is None or find(rest, inner) is not None or why_not_merged(term, other):
                continue
            build = Builder(ir.InsertionPoint(combine), combine.location)
            pair = build.same(combine.name.removeprefix("stablehlo."), value, last)
            combine.operands[0], combine.operands[1] = rest, pair
            inner.erase()
            return maker_of(pair)
    return combine


def why_not_merged(one: Term, other: Term) -> str | None:
    """Says why two terms cannot be merged; None if they can without moving more bytes."""
    unlike = why_not_alike(_without_grouping(one.traits), _without_grouping(other.traits))
    if unlike is not None:
        return unlike
    if _dimension(one) != _dimension(other):
        return "they scatter along different dimensions"
    if one.between.type != other.between.type:
        return "their results have different types"
    after = zip(one.after, other.after, strict=False)
    if len(one.after) != len(other.after) or not all(_is_same(*pair) for pair in after):
        return "the ops on their results differ"
    removed = {term.collective.op.operands[0] for term in (one, other)}
    if merged_bytes(one) > sum(_bytes(value.type) for value in removed):
        return "one collective would move more bytes than both do"
    return None


def merged_bytes(term: Term) -> int:
    """Returns the operand bytes of a collective after the ops of `before` are moved before it."""
    if term.collective.kind == "all_reduce":
        return _bytes(term.between.type)
    operand = term.collective.op.operands[0]
    widened = element_bits(element_of(term.between)) // element_bits(element_of(operand))
    return _bytes(operand.type) * widened


def _reduction(
    collective: Collective, passed: list[ir.Operation], kind: str, groups: Groups
) -> Term | None:
    if collective.kind not in REDUCING or collective.is_async:
        return None
    op = collective.op
    if len(op.operands) != 1 or reducer_kind(Combining(op).combiner) != kind:
        return None
    if element_of(op.operands[0]) != element_of(op.results[0]):
        return None  # a reduction that promotes its operand's element type
    traits = traits_of(collective, groups)
    if isinstance(traits, str):
        return None
    split = next(
        (i for i, inner in enumerate(passed) if not _commutes(inner, kind, collective.kind)),
        len(passed),
    )
    before, after = tuple(passed[:split]), tuple(passed[split:])
    for inner in after:  # `op(a) + op(b)` must equal `op(a + b)`, with the same op
        name = inner.name.removeprefix("stablehlo.")
        if name in _SCALES:
            floats = isinstance(element_of(inner.results[0]), ir.FloatType)
            if kind != "add" or not (floats or name == "multiply"):
                return None
        elif name not in _MOVES and name != "dynamic_slice":
            return None
    return Term(collective, before, after, traits)


def through(op: ir.Operation) -> int:
    """Returns the number of the operand that a term continues through; for a scale, the one not a
    splat."""
    scale = op.name == "stablehlo.multiply" and splat_of(op.operands[0]) is not None
    return 1 if scale else 0


def _commutes(op: ir.Operation, kind: str, collective: str) -> bool:
    """Returns True if an op may as well run before the reduction."""
    name = op.name.removeprefix("stablehlo.")
    if name == "convert":
        # A convert must keep every value; a sum of its results is then the same, or closer.
        # Sums of narrow integers wrap around where those of wider ones do not.
        narrow, wide = element_of(op.operands[0]), element_of(op.results[0])
        if isinstance(narrow, ir.FloatType) and isinstance(wide, ir.F32Type | ir.F64Type):
            return narrow.width < wide.width
        if not (isinstance(narrow, ir.IntegerType) and isinstance(wide, ir.IntegerType)):
            return False
        extends = narrow.is_unsigned == wide.is_unsigned and 1 < narrow.width < wide.width
        return extends and kind in IDEMPOTENT
    if name == "negate":
        return kind == "add"
    if collective != "all_reduce":
        return False
    if name == "pad":
        filled = splat_of(op.operands[1])
        return filled is not None and (kind in IDEMPOTENT or (kind == "add" and filled == 0))
    return name in _MOVES


def _is_same(one: ir.Operation, other: ir.Operation) -> bool:
    """Returns True if ops compute the same on their terms; other operands may be equal
    constants."""
    if one.name != other.name or one.results[0].type != other.results[0].type:
        return False
    if _attributes(one) != _attributes(other) or through(one) != through(other):
        return False
    for number, (first, second) in enumerate(zip(one.operands, other.operands, strict=True)):
        if number == through(one) or first == second:
            continue
        splat = splat_of(first)
        if splat is None or first.type != second.type or splat != splat_of(second):
            return False
    return True


def _attributes(op: ir.Operation) -> dict[str, str]:
    return {name: str(value) for name, value in op.attributes.items() if name != SHARDING}


def _without_grouping(traits: CollectiveTraits) -> CollectiveTraits:
    kept = tuple(entry for entry in traits.attributes if not entry[0].endswith(_GROUPING))
    return replace(traits, attributes=kept)


def _dimension(term: Term) -> ir.Attribute | None:
    return term.collective.op.attributes.get("scatter_dimension")


def _bytes(type_: ir.Type) -> int:
    return tensor_bytes(ir.RankedTensorType(type_)) or 0


def write_merged(combine: ir.Operation, one: Term, other: Term) -> None:
    """Combines the operands of two terms' collectives, and replaces the op by one collective.

    Erases the op, and the terms' ops.
    """
    point = ir.InsertionPoint(combine)
    operands = [_before(term, point) for term in (one, other)]
    summed = _create(combine, operands, operands[0].type, point)
    value = _collective(summed, one, other, point)
    for op in one.after:
        values = list(op.operands)
        values[through(op)] = value
        value = _create(op, values, op.results[0].type, point)
    if SHARDING in combine.attributes:
        maker = value.owner
        assert isinstance(maker, ir.Operation | ir.OpView), "the result of an op"
        maker.operation.attributes[SHARDING] = combine.attributes[SHARDING]
    combine.results[0].replace_all_uses_with(value)
    combine.erase()
    # A term that is added to itself is both terms.
    terms = [one] if one.collective.op == other.collective.op else [one, other]
    for op in [op for term in terms for op in term.ops]:
        op.erase()


def _before(term: Term, point: ir.InsertionPoint) -> ir.Value:
    """Writes the operand of a term's collective, after the ops that may run before it."""
    value = term.collective.op.operands[0]
    for op in term.before:
        type_ = op.results[0].type
        if term.collective.kind == "reduce_scatter":  # an elementwise op on the whole operand
            type_ = Builder(point, op.location).tensor(shape_of(value), element_of(op.results[0]))
        value = _create(op, [value, *list(op.operands)[1:]], type_, point)
    return value


def _collective(value: ir.Value, one: Term, other: Term, point: ir.InsertionPoint) -> ir.Value:
    ops = [one.collective.op, other.collective.op]
    kept = {name: a for name, a in ops[0].attributes.items() if name not in _OF_ONE}
    locations = list(dict.fromkeys(op.location for op in ops))
    location = ir.Location.fused(locations, context=ops[0].context)
    attributes = {**kept, **shared_attributes(ops)}
    build = Builder(point, location)
    new = build.create(ops[0].name, [value], [one.between.type], attributes, regions=1)
    scalar = build.tensor([], element_of(value))
    block = ir.Block.create_at_start(new.regions[0], [scalar, scalar], [location, location])
    inner = ir.InsertionPoint(block)
    combine = Combining(ops[0]).combiner.operations[0].operation
    combined = _create(combine, list(block.arguments), scalar, inner)
    Builder(inner, location).end_region([combined])
    return new.results[0]


def _create(
    like: ir.Operation, operands: Sequence[ir.Value], type_: ir.Type, point: ir.InsertionPoint
) -> ir.Value:
    """Writes a copy of an op with other operands, without its sharding."""
    attributes = {name: a for name, a in like.attributes.items() if name != SHARDING}
    build = Builder(point, like.location)
    return build.create(like.name, operands, [type_], attributes).results[0]
