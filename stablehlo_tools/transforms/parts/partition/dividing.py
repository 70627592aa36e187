"""Makes every op's operands and results divided as the op can run on parts.

Shardy inserts reshards until each op fits its sharding rule. What is left is done here: dimensions
that must be whole though a rule divides them, ops without a rule, and sums of parts that no
all_reduce follows. Where the axes fit on another dimension they move there, which costs an
all_to_all and not an all_gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.sharding_rules import ShardingRule, assemble, project, rule_of
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.analysis.tensor_shardings import (
    Axes,
    Dims,
    ValueShardings,
    axes_in,
    axis_text,
    function_sharding,
    rank_of,
    result_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.transforms.parts.partition.resharding import (
    ALL_REDUCE,
    RESHARD,
    Resharder,
    all_reduce_of,
)
from stablehlo_tools.transforms.parts.partition.undividable import (
    combines_by,
    is_whole_op,
    undividable,
)

# Ops that carry each value on as it is divided.
_CARRIERS = frozenset({"stablehlo.while", "stablehlo.optimization_barrier"})
_BRANCHES = frozenset({"stablehlo.if", "stablehlo.case"})
# Nothing to fit: each device makes its part of the result by itself.
_SKIPPED = frozenset({RESHARD, "stablehlo.constant", "sdy.constant", "stablehlo.iota"})


@dataclass
class Divider:
    """Walks a function whose calls are inlined, once, in text order.

    `diagnostics` gets a warning for each op that had to be made whole, or divided otherwise.
    """

    shardings: ValueShardings
    diagnostics: Diagnostics
    _dead: list[ir.Operation] = field(default_factory=list[ir.Operation])

    def __post_init__(self) -> None:
        self._resharder = Resharder(self.shardings)

    def run(self, function: ir.Operation) -> None:
        """Fits every op of the function."""
        self._block(function, function.regions[0].blocks[0])
        for op in self._dead:
            op.erase()

    def _block(self, owner: ir.Operation, block: ir.Block) -> None:
        for view in list(block.operations):
            op = view.operation
            if op.name in _SKIPPED:
                continue
            if op.name in ("func.return", "sdy.return", "stablehlo.return"):
                self._expect(op, self._returned(owner, len(op.operands)))
                continue
            self._op(op)
            if op.name in (*_CARRIERS, *_BRANCHES, MANUAL_COMPUTATION):
                for region in op.regions:
                    for inner in region.blocks:
                        self._block(op, inner)

    def _op(self, op: ir.Operation) -> None:
        if op.name in _CARRIERS:
            self._expect(op, [self.shardings.of(result) for result in op.results])
        elif op.name == MANUAL_COMPUTATION:
            wanted = [self._border(op, number) for number in range(len(op.operands))]
            self._expect(op, wanted)
        elif op.name == ALL_REDUCE:
            self._expect(op, [self.shardings.of(op.results[0])])
        elif op.name not in _BRANCHES:
            self._fit(op)

    def _border(self, op: ir.Operation, number: int) -> Dims:
        return self.shardings.read(sharding_per_value(op.attributes["in_shardings"])[number])

    def _returned(self, owner: ir.Operation, count: int) -> list[Dims | None]:
        """How a block must return its values divided; None where it is free to."""
        found: list[Dims | None] = []
        for number in range(count):
            attribute = None
            if owner.name == FUNCTION:
                attribute = function_sharding(owner, "res_attrs", number)
            elif owner.name == MANUAL_COMPUTATION:
                whole = result_sharding(owner, number)
                attribute = self.shardings.inside(owner, whole) if whole else None
            elif count == len(owner.results):
                found.append(self.shardings.of(owner.results[number]))
                continue
            found.append(self.shardings.read(attribute) if attribute else None)
        return found

    def _expect(self, op: ir.Operation, wanted: Iterable[Dims | None]) -> None:
        for number, dims in enumerate(wanted):
            self._resharder.operand(op, number, dims or ((),) * rank_of(op.operands[number]))

    def _fit(self, op: ir.Operation) -> None:
        values = [*op.operands, *op.results]
        now = [self.shardings.of(value) for value in values]
        if not any(axes for dims in now for axes in dims):
            return
        rule = None if is_whole_op(op) else rule_of(op)
        if rule is None:
            wanted = [((),) * len(dims) for dims in now]
            self._warn(op, "only runs on whole tensors: every device computes all of it")
        else:
            wanted = self._wanted(op, rule, now)
        if wanted == now:
            return
        count = len(op.operands)
        for number in range(count):
            self._resharder.operand(op, number, wanted[number])
        for number, dims in enumerate(wanted[count:]):
            self._resharder.result(op, number, dims)

    def _wanted(self, op: ir.Operation, rule: ShardingRule, now: list[Dims]) -> list[Dims]:
        """How each tensor of an op with a rule is to be divided."""
        axes = self.shardings.axes
        chosen, whole = self._agreed(rule, now)
        for tensor, dim in undividable(op):
            whole.update(rule.tensors[tensor][dim])
        summed = {f for f in rule.reduced if chosen.get(f)}
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
                self._tell(op, rule, factor, loose, moved)
        if summed & whole or regathered:
            left = [] if regathered else [a for f in sorted(summed - whole) for a in chosen[f]]
            self._reduce_over(op, left)
        return [assemble(rule, tensor, chosen, axes) for tensor in range(len(rule.tensors))]

    def _agreed(self, rule: ShardingRule, now: list[Dims]) -> tuple[dict[int, Axes], set[int]]:
        """The axes of each factor, and the factors on which tensors do not agree."""
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
        self,
        rule: ShardingRule,
        chosen: dict[int, Axes],
        whole: set[int],
        factor: int,
        loose: Axes,
    ) -> bool:
        """Puts axes that a factor gives up on another that all of its tensors have, if one can."""
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

    def _tell(
        self, op: ir.Operation, rule: ShardingRule, factor: int, loose: Axes, moved: bool
    ) -> None:
        """Warns that an op's dimension does not stay divided as Shardy divides it."""
        tensor = next(t for t in range(len(rule.tensors)) if factor in rule.factors_of(t))
        dim = next(d for d, factors in enumerate(rule.tensors[tensor]) if factor in factors)
        named = ", ".join(map(axis_text, loose))
        self._warn(
            op,
            f"cannot run on parts of dimension {dim}, divided over {{{named}}}: "
            + ("another dimension is divided instead" if moved else "it is gathered"),
        )

    def _warn(self, op: ir.Operation, what: str) -> None:
        self.diagnostics.warn(f"{op.name} {what}", op.location)

    def _is_reduced(self, op: ir.Operation, summed: Sequence[AxisRef]) -> bool:
        """Whether an all_reduce over just these axes takes each result, and nothing else does."""
        if not summed:
            return True
        axes = self.shardings.axes
        for result in op.results:
            all_reduce = all_reduce_of(result)
            if all_reduce is None:
                return False
            reduced = axes_in(str(all_reduce.attributes["reduction_axes"]))
            if axes.size(reduced) != axes.size(summed) or not all(
                axes.overlap([axis], summed) for axis in reduced
            ):
                return False
        return True

    def _reduce_over(self, op: ir.Operation, axes: Sequence[AxisRef]) -> None:
        """Lets the all_reduces of an op's results sum over these axes alone, or not at all."""
        listed = ", ".join(map(axis_text, axes))
        for result in op.results:
            all_reduce = all_reduce_of(result)
            if all_reduce is None:
                continue
            if axes:
                attribute = ir.Attribute.parse(f"#sdy<axis_ref_list{{{listed}}}>", op.context)
                all_reduce.attributes["reduction_axes"] = attribute
            else:
                all_reduce.results[0].replace_all_uses_with(result)
                self._dead.append(all_reduce)
