"""Finds ops around a collective that may make a compiler replace or delete it.

Seen in XLA's compilers for CPU, GPU and TPU, in one or more of them:

- an all_reduce, all_gather, reduce_scatter or all_to_all of a constant is deleted;
- an all_reduce over replicas is deleted if all of them already have the same value;
- an all_gather is deleted if each device slices its own part of it, and an all_reduce becomes a
  reduce_scatter;
- a collective whose results are used only by ops that fold (`x * 0` of integers) is deleted;
- a conversion moves to the other side, and elements of another type are exchanged;
- an all_reduce of an all_reduce becomes one of larger groups.

If only one of two programs has such ops, their collectives do not match. Barriers prevent all of
these, and token chains all but the second.

XLA's simplifier has hundreds of other patterns. A collective is surely kept unchanged if it is
fenced: optimization barriers produce its operands and consume its results, as `thread-tokens`
writes them, and an output surely needs one of these results:

    (x', t') = barrier(x, t);  y = collective(x');  (y', t'') = barrier(y, t');  return tanh(y')

An output surely needs a value if it follows from it by the ops of `_KEEPING`, which no compiler
removes. Barriers alone do not keep element types. XLA:TPU may exchange floats of at most 16 bits as
another type, and wider floats that only conversions and products use as bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.liveness import has_effect
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_async_done
from stablehlo_tools.dialect.names import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    CONVERT,
    DYNAMIC_SLICE,
    REDUCE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import (
    COLLECTIVES,
    COMPUTATIONS,
    LAYOUT,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
    short_names,
)
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Combining, Function, While, WithBody
from stablehlo_tools.ir.walk import terminator

_ALIKE = frozenset({ALL_REDUCE, "stablehlo.all_gather"})  # the same on all devices of a group
_UNLIKE = (
    ops_with_any(
        Trait.COLLECTIVE | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.DEVICE_ID | Trait.OPAQUE
    )
    | full_names("async_done infeed recv")
) - {ALL_GATHER, ALL_REDUCE, *full_names("cross-replica-sum")}
# Deleted if they are of a constant; no compiler was seen to delete a collective_broadcast so.
_COMPUTED = short_names(COLLECTIVES & ops_with(Trait.GROUPED)) - {"collective_broadcast"}
_PARTED = frozenset({"all_gather", "all_reduce"})


class CollectiveSurroundings:
    """Describes the hazards around the collectives of one module."""

    def __init__(self, folded: Sequence[Collective]) -> None:
        self.folded = {collective.op.results[0] for collective in folded}
        self.alike: dict[ir.Attribute | None, dict[ir.Value, bool]] = {}

    def describe_hazards(self, collective: Collective) -> str:
        """Returns the hazards of a collective; empty if there are none.

        Collectives of two programs that have equal hazards are rewritten in the same way.
        """
        op = collective.op
        tensors = [v for v in op.operands if isinstance(v.type, ir.RankedTensorType)]
        hazards = [self._before(collective, value) for value in tensors]
        hazards += [_after(collective.kind, value) for value in op.results]
        if len(op.results) and op.results[0] in self.folded:
            hazards.append("used only by ops that are folded away")
        return ", ".join(dict.fromkeys(part for part in hazards if part))

    def is_of_what_all_have(self, collective: Collective) -> bool:
        """Returns True if all participants send the same value, computed from constants alone."""
        sent = collective.op.operands
        tensors = [v for v in sent if isinstance(v.type, ir.RankedTensorType)]
        return all(self._is_alike(value, None) for value in tensors)

    def _before(self, collective: Collective, value: ir.Value) -> str:
        kind, maker = collective.kind, producer(value)
        if maker is None:
            return ""
        over_replicas = kind == "all_reduce" and collective.group_mode is GroupMode.CROSS_REPLICA
        groups = collective.group_attribute("replica_groups") if over_replicas else None
        is_free = kind in _COMPUTED and maker.name != BARRIER
        if (is_free or over_replicas) and self._is_alike(value, groups):
            if is_free and (groups is None or self._is_alike(value, None)):
                return "of a constant"
            return "of values that are the same on all replicas"
        if maker.name == CONVERT:
            return f"of a value converted from {element_of(maker.operands[0])}"
        is_alone = kind == "all_reduce" and maker.name == ALL_REDUCE and _user(value) is not None
        return "of an all_reduce" if is_alone else ""

    def _is_alike(self, value: ir.Value, groups: ir.Attribute | None) -> bool:
        """Returns True if a group shares the value; without groups, if it is constant."""
        known = self.alike.setdefault(groups, {})
        pending = [value]
        while pending:
            needed = None if pending[-1] in known else _computed_from(pending[-1], groups)
            if needed is not None and all(known.get(operand, True) for operand in needed):
                following = next((operand for operand in needed if operand not in known), None)
                if following is not None:
                    pending.append(following)
                    continue
                known[pending[-1]] = True
            known.setdefault(pending.pop(), False)
        return known[value]


def _computed_from(value: ir.Value, groups: ir.Attribute | None) -> list[ir.Value] | None:
    """Returns the values that must be the same in a group for this one to be; None if unknown."""
    maker = producer(value)
    if maker is None or maker.name in _UNLIKE:
        return None
    if maker.name in _ALIKE:
        return [] if groups is not None and maker.attributes["replica_groups"] == groups else None
    if maker.name == BARRIER:
        return [maker.operands[ir.OpResult(value).result_number]]
    return list(maker.operands)


def _after(kind: str, value: ir.Value) -> str:
    user = _user(value)
    while user is not None and is_async_done(user):
        user = _user(user.results[0])
    if user is None:
        return ""
    if user.name == CONVERT:
        return f"converted to {element_of(user.results[0])}"
    if kind in _PARTED and user.name == DYNAMIC_SLICE:
        return "sliced afterwards"
    return "in an all_reduce" if kind == "all_reduce" and user.name == ALL_REDUCE else ""


def _user(value: ir.Value) -> ir.Operation | None:
    """Returns the only user of a value; None if there is none, or more than one."""
    uses = [use.owner.operation for use in value.uses]
    return uses[0] if len(uses) == 1 else None


# Ops that keep their operands: on non-empty float tensors, no identity removes an operand, and no
# compiler reads it as another type.
_KEEPING = (
    ops_with(Trait.UNARY | Trait.TRANSCENDENTAL)
    | full_names("add subtract multiply divide negate reduce_scatter all_to_all")
    | LAYOUT
    | {ALL_GATHER, ALL_REDUCE, REDUCE}
)
# Their results differ between replicas if their operands do.
_MIXING = _KEEPING - {ALL_GATHER, ALL_REDUCE} | full_names("convert dot_general")
_SAME = "mhlo.is_same_data_across_replicas"  # attribute of an argument
_WIDE = frozenset({"f32", "f64"})
_MOST_TRIPS = 64  # of a loop whose carries swap places


class Fences:
    """Finds the fenced collectives of a module without calls."""

    def __init__(self, main: ir.Operation) -> None:
        self.main = main
        self._floats: dict[ir.Type, tuple[str, bool]] = {}

    def doubt(self, collective: Collective) -> str:
        """Says why a compiler may replace or delete a collective; empty if it cannot."""
        if has_effect(collective):
            return ""
        op = collective.op
        tensors = [v for v in op.operands if isinstance(v.type, ir.RankedTensorType)]
        makers = [producer(value) for value in tensors]
        if any(maker is None or maker.name != BARRIER for maker in makers):
            return "no barrier produces its operands"
        users = [use.owner.operation for result in op.results for use in result.uses]
        if any(user.name != BARRIER for user in users):
            return "other ops than barriers use its results"
        for value in [*tensors, *op.results]:
            element, _ = self._float(value)
            if element and element not in _WIDE:
                return f"a compiler may exchange a type other than {element}"
        is_sum = op.name == ALL_REDUCE and collective.group_mode is GroupMode.CROSS_REPLICA
        if is_sum and not all(map(self._differs, tensors)):
            return "a compiler may find that all replicas have the same value"
        if not any(result in self.needed for result in op.results):
            return "a compiler may find that no output needs this value unchanged"
        return ""

    @cached_property
    def needed(self) -> set[ir.Value]:
        """The values that an output surely needs."""
        block = Function(self.main).body
        needed = set(terminator(block).operands)
        self._mark_needed(block, needed)
        return needed

    def _differs(self, value: ir.Value) -> bool:
        """Returns True if no compiler can prove that a value is the same on all replicas.

        It must follow from an argument. False for values that loops carry, which are not analysed.
        """
        arguments = set(Function(self.main).body.arguments)
        pending, seen = [value], set[ir.Value]()
        while pending:
            value = pending.pop()
            maker = None if value in seen else producer(value)
            seen.add(value)
            if value in arguments:
                # One argument with the attribute makes all of them doubtful.
                return _SAME not in str(self.main.attributes.get("arg_attrs"))
            if maker is not None and maker.name == BARRIER:
                pending.append(maker.operands[ir.OpResult(value).result_number])
            elif maker is not None and self._keeps_operands(maker, _MIXING):
                pending += maker.operands
        return False

    def _mark_needed(self, block: ir.Block, needed: set[ir.Value]) -> None:
        """Adds the values of a block that the needed ones follow from, the last op first."""
        for view in reversed(list(block.operations)):
            op = view.operation
            for number, result in enumerate(op.results):
                if result not in needed:
                    continue
                if op.name == BARRIER:
                    needed.add(op.operands[number])
                elif op.name in COMPUTATIONS:
                    inner = WithBody(op).body
                    needed.add(terminator(inner).operands[number])
                    self._mark_needed(inner, needed)
                    given = zip(inner.arguments, op.operands, strict=True)
                    needed.update(operand for argument, operand in given if argument in needed)
                elif op.name == WHILE:
                    self._mark_loop(op, number, needed)
                elif self._keeps_operands(op):
                    needed.update(op.operands)

    def _mark_loop(self, op: ir.Operation, number: int, needed: set[ir.Value]) -> None:
        """Marks the values that result `number` of a loop needs, if the loop surely runs.

        Only values of the body that every iteration needs are marked, because a compiler may unroll
        the loop.
        """
        trips = constant_trips(op)
        if not trips:
            return
        block = While(op).body
        ends = list(terminator(block).operands)
        asked = {number}
        each: set[ir.Value] | None = None
        for trip in range(trips):
            # From the last iteration backwards: each must yield the carries that the next one
            # needs.
            before, inside = asked, {ends[i] for i in asked}
            self._mark_needed(block, inside)
            each = inside if each is None else each & inside
            asked = {i for i, argument in enumerate(block.arguments) if argument in inside}
            if asked == before:
                break
            if trip == _MOST_TRIPS:
                return
        needed |= each or set()
        needed.update(op.operands[i] for i in asked)

    def _keeps_operands(self, op: ir.Operation, names: frozenset[str] = _KEEPING) -> bool:
        name, operands = op.name, list(op.operands)
        if name not in names or len(set(operands)) < len(operands):
            return False
        if name == REDUCE and reducer_kind(Combining(op).combiner) != "add":
            return False
        return all(self._float(value)[1] for value in (*operands, *op.results))

    def _float(self, value: ir.Value) -> tuple[str, bool]:
        """Returns the element type of a float tensor, and True if it surely has elements.

        The type is empty for other values.
        """
        type_ = value.type
        if type_ not in self._floats:
            is_tensor = isinstance(type_, ir.RankedTensorType)
            is_float = is_tensor and isinstance(type_.element_type, ir.FloatType)
            has_elements = is_float and type_.has_static_shape and 0 not in type_.shape
            self._floats[type_] = str(type_.element_type) if is_float else "", has_elements
        return self._floats[type_]
