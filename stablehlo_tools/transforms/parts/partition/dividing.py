"""Divides operands and results so that each op can run on parts, around Shardy's reshards.

In the order in which they run:

`make_even`         Shardy lets a dimension of 31 be divided by 2, which is padded here. Operands
                    and results of manual computations must divide evenly, so last axes are dropped.
`ModuleDivider`     inserts reshards until each op fits its sharding rule. Shardy divides dimensions
                    that must be whole, leaves ops without a rule, and sums of parts without an
                    all_reduce. Axes move to another dimension if they fit there, because an
                    all_to_all costs less than an all_gather.
`fold_reshards`     removes reshards that need no data to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Axes,
    Dims,
    ShardingRule,
    ValueShardings,
    assemble,
    axes_in,
    axes_text,
    function_sharding,
    project,
    rank_of,
    result_sharding,
    rule_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.kernels.table import describe_unknown
from stablehlo_tools.dialect.names import (
    ADD,
    BARRIER,
    BROADCAST,
    CUSTOM_CALL,
    IOTA,
    MANUAL_COMPUTATION,
    RESHARD,
    WHILE,
)
from stablehlo_tools.dialect.traits import BRANCHES, ELEMENTWISE, TERMINATORS, Trait, ops_with
from stablehlo_tools.ir.builder import constrain_sharding, shape_of
from stablehlo_tools.ir.values import has_uses, is_used_once, maker_of, producer, stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import FUNCTION, ops_named
from stablehlo_tools.transforms.parts.partition.sharding_rules import (
    combines_by,
    fitting,
    is_whole_op,
    undividable,
)

ALL_REDUCE = "sdy.all_reduce"  # makes a partial result whole
# Ops whose result each device can make any part of.
_MADE_ANYWHERE = ops_with(Trait.CONSTANT) | {IOTA}
# Ops that devices may run once more to avoid sending their results, and how many at most.
REMADE = ELEMENTWISE | {BROADCAST, RESHARD}
MOST_REMADE = 32
# Ops that pass each value on with the same sharding.
_CARRIERS = frozenset({WHILE, BARRIER})
# Ops that need no fitting: each device makes its part of the result by itself.
_SKIPPED = _MADE_ANYWHERE | {RESHARD}


def make_even(module: ir.Module, shardings: ValueShardings) -> None:
    """Makes the operands and results of manual computations evenly divided, in place.

    Inside, a dimension that the computation divides itself is divided further. Padded blocks of the
    whole dimension do not allow that.
    """
    for op in ops_named(module.operation, {MANUAL_COMPUTATION}):
        sides = (("in_shardings", op.operands), ("out_shardings", op.results))
        for name, values in sides:
            now = [shardings.read(each) for each in sharding_per_value(op.attributes[name])]
            even = [_drop_uneven_axes(v, d, shardings) for v, d in zip(values, now, strict=True)]
            if even != now:
                op.attributes[name] = shardings.per_value(even, op.context)


def _drop_uneven_axes(value: ir.Value, dims: Dims, shardings: ValueShardings) -> Dims:
    even = list(dims)
    for dim, size in enumerate(shape_of(value) if dims else ()):
        while even[dim] and size % shardings.axes.size(even[dim]):
            even[dim] = even[dim][:-1]
    return tuple(even)


def all_reduce_of(value: ir.Value) -> ir.Operation | None:
    """Returns the all_reduce that completes a partial result, if nothing else uses it; else None.

    Only partial results are added before an all_reduce (`add_before_sums`).
    """
    while is_used_once(value):
        (user,) = (use.owner.operation for use in value.uses)
        if user.name != ADD:
            return user if user.name == ALL_REDUCE else None
        value = user.results[0]
    return None


def summed_axes(value: ir.Value) -> Axes:
    """Returns the axes over which the all_reduce of a partial result sums; () without an
    all_reduce."""
    all_reduce = all_reduce_of(value)
    return () if all_reduce is None else axes_in(str(all_reduce.attributes["reduction_axes"]))


def fold_reshards(module: ir.Module, shardings: ValueShardings) -> None:
    """Folds every reshard of the module, in place, and erases the unused ones.

    reshard(reshard(x, A), B)       ==>  reshard(x, B), or x if it is divided as B already
    reshard(broadcast(scalar), B)   ==>  broadcast(scalar) divided as B; same for constants, iotas
    reshard(broadcast(x), B)        ==>  broadcast(reshard(x, B)), if a part of x is smaller
    """
    reshards = ops_named(module.operation, {RESHARD})
    remade: dict[ir.Value, None] = {}
    for op in reshards:
        remade.update(dict.fromkeys(_fold(op, shardings)))
    for op in reversed(reshards):
        if not has_uses(op.results[0]):
            op.erase()
    while unused := [value for value in remade if not has_uses(value)]:
        for value in unused:
            del remade[value]
            maker_of(value).erase()


def _fold(op: ir.Operation, shardings: ValueShardings) -> list[ir.Value]:
    """Folds one reshard. Returns the values that are made once more instead."""
    source, result = op.operands[0], op.results[0]
    maker = producer(source)
    while maker is not None and maker.name == RESHARD:
        source = maker.operands[0]
        maker = producer(source)
    op.operands[0] = source
    wanted = shardings.axes_by_dim(result)
    if shardings.axes_by_dim(source) == wanted:
        result.replace_all_uses_with(source)
        return []
    made = made_anywhere(source)
    if made:
        result.replace_all_uses_with(_make_anew(source, wanted, shardings, ir.InsertionPoint(op)))
        return made
    if maker is None or maker.name != BROADCAST:
        return []
    small = maker.operands[0]
    dims = _dims_of_operand(maker, small, wanted)
    part, whole = (
        math.prod(shardings.local_shape(shape_of(value), parts))
        for value, parts in ((small, dims), (source, wanted))
    )
    if part >= whole:
        return []
    point = ir.InsertionPoint(op)
    sharding = shardings.attribute(dims, op.context)
    moved = constrain_sharding(small, sharding, point, op.location, RESHARD)
    copy = maker.clone(ip=point)
    copy.operands[0] = moved
    copy.attributes[SHARDING] = shardings.per_value([wanted], copy.context)
    result.replace_all_uses_with(copy.results[0])
    return [source, moved, *_fold(maker_of(moved), shardings)]


def _make_anew(
    value: ir.Value, dims: Dims, shardings: ValueShardings, point: ir.InsertionPoint
) -> ir.Value:
    """Writes once more the ops that make a value from constants and scalars, divided like this."""
    maker = producer(value)
    if maker is None or not rank_of(value):
        return value
    if maker.name == RESHARD:
        return _make_anew(maker.operands[0], dims, shardings, point)
    operands = list(maker.operands)
    if not is_made_anywhere(maker):
        operands = [
            _make_anew(operand, _dims_of_operand(maker, operand, dims), shardings, point)
            for operand in operands
        ]
    copy = maker.clone(ip=point)
    for number, operand in enumerate(operands):
        copy.operands[number] = operand
    copy.attributes[SHARDING] = shardings.per_value([dims], copy.context)
    return copy.results[0]


def _dims_of_operand(op: ir.Operation, operand: ir.Value, dims: Dims) -> Dims:
    """Returns how an operand is divided if the result of an elementwise op, or of a broadcast, is
    divided like this."""
    if op.name != BROADCAST:
        return dims if rank_of(operand) else ()
    sizes, whole = shape_of(operand), shape_of(op.results[0])
    places = integers(op, "broadcast_dimensions")
    return tuple(
        dims[place] if size == whole[place] else ()
        for size, place in zip(sizes, places, strict=True)
    )


def made_anywhere(value: ir.Value, most: int = MOST_REMADE) -> list[ir.Value]:
    """Returns a value and its sources, if each device can make any part of it.

    Few ops make it then, element by element, from constants and scalars, as they make a mask. If
    not, returns [].
    """
    pending, made = [value], dict[ir.Value, None]()
    while pending:
        value = pending.pop()
        maker = producer(value)
        if value in made or not rank_of(value):
            continue
        is_last = maker is not None and is_made_anywhere(maker)
        if maker is None or len(made) == most or not (is_last or maker.name in REMADE):
            return []
        if maker.name != RESHARD:
            made[value] = None
        pending += [] if is_last else maker.operands
    return list(made)


def is_made_anywhere(op: ir.Operation) -> bool:
    """Returns True if each device can make any part of an op's result by itself."""
    return op.name in _MADE_ANYWHERE or (op.name == BROADCAST and not rank_of(op.operands[0]))


def warn_of_whole(op: ir.Operation, gathered: Sequence[ir.Value], diagnostics: Diagnostics) -> None:
    """Warns that an op only runs on whole tensors; `gathered` are its operands in parts."""
    text = f"{op.name} only runs on whole tensors: every device computes all of it"
    if op.name == CUSTOM_CALL:
        sent = sum(tensor_bytes(ir.RankedTensorType(value.type)) or 0 for value in gathered)
        text = f"every device computes all of a kernel, with {sent} bytes gathered for it: "
        text += describe_unknown(op)
    diagnostics.warn(text, op.location)


def warn_of_undivided(
    op: ir.Operation,
    rule: ShardingRule,
    factor: int,
    axes: Axes,
    moved: bool,
    diagnostics: Diagnostics,
) -> None:
    """Warns that an op's dimension does not stay divided as Shardy divided it. `moved`: the axes
    divide another dimension instead."""
    tensor = next(t for t in range(len(rule.tensors)) if factor in rule.factors_of(t))
    dim = next(d for d, factors in enumerate(rule.tensors[tensor]) if factor in factors)
    what = "another dimension is divided instead" if moved else "it is gathered"
    diagnostics.warn(
        f"{op.name} cannot run on parts of dimension {dim}, divided over {axes_text(axes)}: {what}",
        op.location,
    )


@dataclass
class ModuleDivider:
    """Walks a function whose calls are inlined, once, in text order.

    `diagnostics` gets a warning for each op that has to run whole, or divided otherwise.
    """

    shardings: ValueShardings
    diagnostics: Diagnostics
    _dead: list[ir.Operation] = field(default_factory=list[ir.Operation])

    def run(self, function: ir.Operation) -> None:
        """Divides the operands and results of every op of the function so that the op can run on
        parts."""
        self._block(function, Function(function).body)
        # Only now: `_block` still goes through lists with these ops.
        for op in self._dead:
            op.erase()

    def _block(self, owner: ir.Operation, block: ir.Block) -> None:
        for view in list(block.operations):
            op = view.operation
            if op.name in _SKIPPED:
                continue
            if op.name in TERMINATORS:
                self._expect(op, self._yield_shardings(owner, len(op.operands)))
                continue
            self._op(op)
            if op.name in (*_CARRIERS, *BRANCHES, MANUAL_COMPUTATION):
                for region in op.regions:
                    for inner in region.blocks:
                        self._block(op, inner)

    def _op(self, op: ir.Operation) -> None:
        if op.name in _CARRIERS:
            self._expect(op, [self.shardings.axes_by_dim(result) for result in op.results])
        elif op.name == MANUAL_COMPUTATION:
            entering = sharding_per_value(op.attributes["in_shardings"])
            self._expect(op, list(map(self.shardings.read, entering)))
        elif op.name == ALL_REDUCE:
            self._expect(op, [self.shardings.axes_by_dim(op.results[0])])
        elif op.name not in BRANCHES:
            self._fit(op)

    def _yield_shardings(self, owner: ir.Operation, count: int) -> list[Dims | None]:
        """Returns the shardings that a block must return its values with; None for a value without
        one."""
        returned: list[Dims | None] = []
        for number in range(count):
            attribute = None
            if owner.name == FUNCTION:
                attribute = function_sharding(owner, "res_attrs", number)
            elif owner.name == MANUAL_COMPUTATION:
                whole = result_sharding(owner, number)
                attribute = self.shardings.inside(owner, whole) if whole else None
            elif count == len(owner.results):
                returned.append(self.shardings.axes_by_dim(owner.results[number]))
                continue
            returned.append(self.shardings.read(attribute) if attribute else None)
        return returned

    def _expect(self, op: ir.Operation, wanted: Iterable[Dims | None]) -> None:
        for number, dims in enumerate(wanted):
            self._divide_operand(op, number, dims or ((),) * rank_of(op.operands[number]))

    def _fit(self, op: ir.Operation) -> None:
        values = [*op.operands, *op.results]
        now = [self.shardings.axes_by_dim(value) for value in values]
        if not any(axes for dims in now for axes in dims):
            return
        if op.name in ELEMENTWISE and now.count(now[0]) == len(now):
            return
        rule = None if is_whole_op(op) else rule_of(op)
        if rule is None:
            wanted = [((),) * len(dims) for dims in now]
            parts = zip(op.operands, now, strict=False)
            warn_of_whole(op, [value for value, dims in parts if any(dims)], self.diagnostics)
        else:
            wanted = self._tensor_shardings(op, rule, now)
        if wanted == now:
            return
        count = len(op.operands)
        for number in range(count):
            self._divide_operand(op, number, wanted[number])
        for number, dims in enumerate(wanted[count:]):
            self._divide_result(op, number, dims)

    def _divide_operand(self, op: ir.Operation, number: int, wanted: Dims) -> None:
        """Reshards an operand if it is not divided as wanted."""
        value, point = op.operands[number], ir.InsertionPoint(op)
        if rank_of(value) and self.shardings.axes_by_dim(value) != wanted:
            sharding = self.shardings.attribute(wanted, op.context)
            op.operands[number] = constrain_sharding(value, sharding, point, op.location, RESHARD)

    def _divide_result(self, op: ir.Operation, number: int, wanted: Dims) -> None:
        """Divides a result as wanted, and reshards it to the old sharding for its users.

        An all_reduce that completes it stays next to it and gets the same sharding. `local_body`
        takes the reducer from the op that made the parts.
        """
        every = [self.shardings.axes_by_dim(result) for result in op.results]
        old, every[number] = every[number], wanted
        if old == wanted:
            return
        op.attributes[SHARDING] = self.shardings.per_value(every, op.context)
        last, result = op, op.results[number]
        all_reduce = all_reduce_of(result)
        if all_reduce is not None:
            last, result = all_reduce, all_reduce.results[0]
            last.attributes["out_sharding"] = self.shardings.attribute(wanted, op.context)
        if has_uses(result):
            after = ir.InsertionPoint.after(last)
            sharding = self.shardings.attribute(old, op.context)
            stand_in(result, constrain_sharding(result, sharding, after, op.location, RESHARD))

    def _tensor_shardings(
        self, op: ir.Operation, rule: ShardingRule, now: list[Dims]
    ) -> list[Dims]:
        """Returns the sharding of each tensor of an op with a rule."""
        axes = self.shardings.axes
        chosen, whole = self._factor_axes(rule, now)
        chosen, far = fitting(op, rule, chosen, axes)
        whole |= far
        for tensor, dim in undividable(op):
            whole.update(rule.tensors[tensor][dim])
        summed = {f for f in rule.reduced if chosen.get(f)}
        # An argmax and its like gather their partial results (`local_ops`): no all_reduce follows.
        regathered = op.name == "stablehlo.reduce" and combines_by(op) == "all_gather"
        partial = [axis for factor in sorted(summed) for axis in chosen[factor]]
        if not regathered and not self._is_reduced(op, partial):
            whole |= rule.reduced
        whole |= rule.whole
        for factor in sorted(whole):
            loose = chosen.pop(factor, ())
            if loose:
                moved = factor not in rule.reduced and self._move(
                    rule, chosen, whole, factor, loose
                )
                warn_of_undivided(op, rule, factor, loose, moved, self.diagnostics)
        if summed & whole or regathered:
            left = [] if regathered else [a for f in sorted(summed - whole) for a in chosen[f]]
            for result in op.results:
                all_reduce = all_reduce_of(result)
                if all_reduce is None:
                    continue
                if left:
                    attribute = ir.Attribute.parse(
                        f"#sdy<axis_ref_list{axes_text(left)}>", op.context
                    )
                    all_reduce.attributes["reduction_axes"] = attribute
                else:
                    all_reduce.results[0].replace_all_uses_with(result)
                    self._dead.append(all_reduce)
        return [assemble(rule, tensor, chosen, axes) for tensor in range(len(rule.tensors))]

    def _factor_axes(self, rule: ShardingRule, now: list[Dims]) -> tuple[dict[int, Axes], set[int]]:
        """Returns the axes of each factor, and the factors whose axes differ between tensors."""
        chosen: dict[int, Axes] = {}
        whole: set[int] = set()
        for tensor, dims in enumerate(now):
            parts = project(rule, tensor, dims, self.shardings.axes)
            if parts is None:
                whole |= rule.factors_of(tensor)
                continue
            for factor, axes in parts.items():
                if chosen.setdefault(factor, axes) != axes:
                    whole.add(factor)
        return chosen, whole

    def _move(
        self, rule: ShardingRule, chosen: dict[int, Axes], whole: set[int], factor: int, loose: Axes
    ) -> bool:
        """Moves the `loose` axes of a factor to another factor that all of its tensors have.

        Returns True if there is such a factor.
        """
        axes = self.shardings.axes
        holders = [t for t in range(len(rule.tensors)) if factor in rule.factors_of(t)]
        if len(holders) < 2:
            return False
        for other, size in enumerate(rule.sizes):
            taken = chosen.get(other, ())
            single = all((other,) in rule.tensors[tensor] for tensor in holders)
            if other in whole or other in rule.reduced or not single:
                continue
            if size % (axes.size(taken) * axes.size(loose)) == 0:
                chosen[other] = axes.canonical((*taken, *loose))
                return True
        return False

    def _is_reduced(self, op: ir.Operation, summed: Sequence[AxisRef]) -> bool:
        """Returns True if each result has one user, an all_reduce over just these axes; also for
        empty axes."""
        axes = self.shardings.axes
        return not summed or all(
            axes.size(reduced) == axes.size(summed)
            and all(axes.overlap([axis], summed) for axis in reduced)
            for reduced in map(summed_axes, op.results)
        )
