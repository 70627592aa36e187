"""Sharding rules for ops that can run on parts although Shardy's rules say otherwise.

dynamic_update_slice    along a dimension of which one row is written: each device looks whether
                        the row is in its part
slice, windows          along a dimension that is cut into equal pieces, none of which crosses
                        from one part into the next: x[::2], pooling without overlap
slice, pad,             along a dimension of a few equal pieces, of which one is taken, put among
concatenate             others, or joined with others: split(x, 3) and its gradient
custom_call             along the batch dimensions that jax says it has (`num_batch_dims`)
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.sharding_rules import RULE, Factors, ShardingRule, rule_of
from stablehlo_tools.analysis.tensor_shardings import rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.partition.undividable import (
    batch_dims,
    is_piecewise,
    is_row_update,
    joins_pieces,
    moved_dim,
)

_CUT = frozenset(f"stablehlo.{name}" for name in ("slice", "pad", "concatenate", "reduce_window"))


def widen_rules(module: ir.Module) -> None:
    """Writes better rules on the ops of a module whose rules Shardy has written."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        rule: ShardingRule | None = None
        if op.name == "stablehlo.dynamic_update_slice":
            rule = _row_update(op)
        elif op.name == "stablehlo.custom_call" and batch_dims(op):
            rule = _batched(op, batch_dims(op))
        elif op.name == "stablehlo.select_and_scatter":
            rule = _pooled(op)
        elif op.name in _CUT:
            rule = _piecewise(op)
        if rule is not None:
            op.attributes[RULE] = _attribute(rule, op.context)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _row_update(op: ir.Operation) -> ShardingRule | None:
    whole, update = shape_of(op.operands[0]), shape_of(op.operands[1])
    if not any(is_row_update(op, dim) for dim in range(len(whole))):
        return None
    sizes = list(whole)
    operand = tuple((dim,) for dim in range(len(whole)))
    updated: list[Factors] = []
    needed: set[int] = set()
    for dim, (all_rows, rows) in enumerate(zip(whole, update, strict=True)):
        if all_rows == rows:
            updated.append((dim,))
            continue
        if is_row_update(op, dim):
            updated.append((len(sizes),))
            sizes.append(rows)
        else:
            updated.append((dim,))
        needed.add(updated[-1][0])
    starts = [()] * (len(op.operands) - 2)
    tensors = (operand, tuple(updated), *starts, operand)
    return ShardingRule(tensors, len(op.operands), tuple(sizes), frozenset(), frozenset(needed))


def _piecewise(op: ir.Operation) -> ShardingRule | None:
    rule = rule_of(op)
    if rule is None:
        return None
    rank = rank_of(op.operands[0])
    dims = [d for d in range(rank) if _goes_by_pieces(op, d)]
    free = {factor for dim in dims for factor in rule.tensors[0][dim]}
    if not free & rule.whole:
        return None
    return ShardingRule(rule.tensors, rule.operands, rule.sizes, rule.reduced, rule.whole - free)


def _goes_by_pieces(op: ir.Operation, dim: int) -> bool:
    """Whether a dimension that is cut, padded or joined can stay divided."""
    if op.name == "stablehlo.concatenate":
        return joins_pieces(op) and dim == ir.IntegerAttr(op.attributes["dimension"]).value
    if op.name != "stablehlo.reduce_window" and dim == moved_dim(op):
        return True
    return op.name != "stablehlo.pad" and is_piecewise(op, dim)


def _pooled(op: ir.Operation) -> ShardingRule | None:
    """A select_and_scatter, whose source has an element for each piece."""
    rule = rule_of(op)
    if rule is None:
        return None
    operand, source, init, result = rule.tensors
    free = [dim for dim in range(len(operand)) if is_piecewise(op, dim)]
    joined = tuple(operand[dim] if dim in free else source[dim] for dim in range(len(source)))
    return _renumbered(
        ShardingRule(
            (operand, joined, init, result),
            rule.operands,
            rule.sizes,
            rule.reduced,
            rule.whole - {factor for dim in free for factor in operand[dim]},
        )
    )


def _renumbered(rule: ShardingRule) -> ShardingRule:
    """A rule without the factors that no tensor has."""
    used = sorted({f for t in range(len(rule.tensors)) for f in rule.factors_of(t)})
    number = {factor: new for new, factor in enumerate(used)}
    return ShardingRule(
        tuple(
            tuple(tuple(number[f] for f in factors) for factors in tensor)
            for tensor in rule.tensors
        ),
        rule.operands,
        tuple(rule.sizes[factor] for factor in used),
        frozenset(number[f] for f in rule.reduced if f in number),
        frozenset(number[f] for f in rule.whole if f in number),
    )


def _batched(op: ir.Operation, count: int) -> ShardingRule:
    sizes = shape_of(op.operands[0])[:count]
    tensors: list[tuple[Factors, ...]] = []
    for value in (*op.operands, *op.results):
        own = shape_of(value)[count:]
        first = len(sizes)
        sizes += own
        batch = range(min(count, rank_of(value)))
        tensors.append(tuple((f,) for f in (*batch, *range(first, first + len(own)))))
    whole = frozenset(range(count, len(sizes)))
    return ShardingRule(tuple(tensors), len(op.operands), tuple(sizes), frozenset(), whole)


def _attribute(rule: ShardingRule, context: ir.Context) -> ir.Attribute:
    mappings = [_mapping(tensor, context) for tensor in rule.tensors]
    return bindings.OpShardingRuleAttr.get(
        list(rule.sizes),
        mappings[: rule.operands],
        mappings[rule.operands :],
        reduction_factors=sorted(rule.reduced),
        need_replication_factors=sorted(rule.whole),
        context=context,
    )


def _mapping(tensor: Sequence[Factors], context: ir.Context) -> ir.Attribute:
    dims = [bindings.DimMappingAttr.get(list(factors), context) for factors in tensor]
    return bindings.TensorMappingAttr.get(dims, context)
