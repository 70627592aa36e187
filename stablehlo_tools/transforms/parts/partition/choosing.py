"""Which of two dimensions an axis divides, where a gather or scatter can have it on one only.

    rows = gather(table {…, "fsdp"}, tokens {"fsdp", …})      // both its operands are divided

Shardy lets the batch win: it gathers the whole table, and sums the gradient's. With a large table
it is far cheaper to gather the indices, look up a part of each row, and exchange parts of rows for
whole rows afterwards. Here the way that moves fewest bytes is chosen; Shardy then finds an op that
fits its rule and leaves it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stablehlo_tools.analysis.sharding_rules import ShardingRule, assemble, project, rule_of
from stablehlo_tools.analysis.tensor_shardings import Axes, Dims, ValueShardings, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.partition.folding import is_made_anywhere
from stablehlo_tools.transforms.parts.partition.resharding import Resharder
from stablehlo_tools.transforms.parts.partition.undividable import undividable

_INDEXED = frozenset({"stablehlo.gather", "stablehlo.scatter"})
_MOST_CONFLICTS = 4

Choice = dict[int, Axes]  # the axes of each factor


def choose_divisions(module: ir.Module, shardings: ValueShardings) -> None:
    """Puts reshards around the gathers and scatters whose operands ask for one axis twice."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _INDEXED and len(op.results) == 1:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in found:
        rule = rule_of(op)
        if rule is not None:
            _choose(op, rule, shardings)


def _choose(op: ir.Operation, rule: ShardingRule, shardings: ValueShardings) -> None:
    values = [*op.operands, *op.results]
    now = [shardings.of(value) for value in values]
    asked = _asked(rule, now, shardings)
    if asked is None:
        return
    whole = set(rule.whole)
    for tensor, dim in undividable(op):
        whole.update(rule.tensors[tensor][dim])
    asked = {factor: axes for factor, axes in asked.items() if factor not in whole}
    conflicts = [
        (one, other)
        for one, other in itertools.combinations(sorted(asked), 2)
        if shardings.axes.overlap(asked[one], asked[other])
    ]
    if not 0 < len(conflicts) <= _MOST_CONFLICTS:
        return
    best = min(
        _choices(asked, conflicts),
        key=lambda choice: _cost(rule, values, now, choice, shardings),
    )
    resharder = Resharder(shardings)
    wanted = [assemble(rule, t, best, shardings.axes) for t in range(len(values))]
    for number in range(len(op.operands)):
        resharder.operand(op, number, wanted[number])
    resharder.result(op, 0, wanted[-1])


def _asked(rule: ShardingRule, now: list[Dims], shardings: ValueShardings) -> Choice | None:
    """The axes that each factor has on the tensor that divides it most."""
    asked: Choice = {}
    for tensor, dims in enumerate(now):
        parts = project(rule, tensor, dims, shardings.axes)
        if parts is None:
            return None
        for factor, axes in parts.items():
            if shardings.axes.size(axes) > shardings.axes.size(asked.get(factor, ())):
                asked[factor] = axes
    return asked


def _choices(asked: Choice, conflicts: list[tuple[int, int]]) -> Iterator[Choice]:
    """Every way to let one of two factors in conflict give up its axes."""
    for losers in itertools.product(*conflicts):
        yield {factor: axes for factor, axes in asked.items() if factor not in losers}


def _cost(
    rule: ShardingRule,
    values: list[ir.Value],
    now: list[Dims],
    choice: Choice,
    shardings: ValueShardings,
) -> float:
    """Bytes that a device receives for the reshards and the sum that a choice asks for."""
    wanted = [assemble(rule, t, choice, shardings.axes) for t in range(len(values))]
    total = 0.0
    for number, value in enumerate(values):
        maker = producer(value) if number < rule.operands else None
        if rank_of(value) and (maker is None or not is_made_anywhere(maker)):
            total += _reshard_bytes(value, now[number], wanted[number], shardings)
    summed = [axis for factor in rule.reduced for axis in choice.get(factor, ())]
    members = shardings.axes.size(summed)
    held = _bytes(values[-1]) / _parts(wanted[-1], shardings)
    return total + 2 * held * (1 - 1 / members)


def _reshard_bytes(value: ir.Value, now: Dims, wanted: Dims, shardings: ValueShardings) -> float:
    """What a device receives: what moves to another dimension, then what is gathered."""
    axes = shardings.axes
    before, after = ([a for dim in dims for a in dim] for dims in (now, wanted))
    gone = [axis for axis in before if not axes.overlap([axis], after)]
    moved = [
        axis
        for old, new in zip(now, wanted, strict=True)
        for axis in old
        if axes.overlap([axis], after) and not axes.overlap([axis], new)
    ]
    held = _bytes(value) / _parts(now, shardings)
    gathered = held * axes.size(gone)
    return held * (1 - 1 / axes.size(moved)) + gathered * (1 - 1 / axes.size(gone))


def _parts(dims: Dims, shardings: ValueShardings) -> int:
    return shardings.axes.size(axis for dim in dims for axis in dim)


def _bytes(value: ir.Value) -> float:
    total = 1.0
    for size in shape_of(value):
        total *= size
    element = element_of(value)
    width = element.width if isinstance(element, ir.IntegerType | ir.FloatType) else 64
    return total * width / 8
