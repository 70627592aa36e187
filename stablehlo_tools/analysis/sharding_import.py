"""Imports shardings: replaces those of GSPMD and of older releases of jax by Shardy's."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.partitioner_work import (
    Annotation,
    first_annotation,
    left_to_the_partitioner,
)
from stablehlo_tools.analysis.shardings import RULE, Factors, ShardingRule, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, from_mlir_error
from stablehlo_tools.dialect.device_placement import placement
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.gspmd_import import import_gspmd
from stablehlo_tools.ir.shardy_round_trip import restore_shardy
from stablehlo_tools.ir.walk import ops_named

_BATCH_DIMS = "num_batch_dims"


def import_shardings(module: ir.Module) -> None:
    """Replaces GSPMD's shardings, and older jax's XLA frontend attributes, by Shardy's shardings,
    in place. A module that is divided already, or runs on one device, does not change.

    Raises a located ToolError for shardings that cannot be read (P1), or have no common mesh (P3).
    """
    first = first_annotation(module)
    if first is None or first[0] is Annotation.SHARDY or left_to_the_partitioner(module) is None:
        return
    if first[0] is Annotation.ROUND_TRIP:
        restore_shardy(module)
        rest = first_annotation(module)
        if rest is not None and rest[0] is Annotation.ROUND_TRIP:
            raise ToolError(
                "unreadable Shardy sharding in XLA's frontend attributes: the module lacks "
                "xla.sdy.meshes, or the op is unknown (P1)",
                rest[1].location,
            )
    else:
        import_gspmd(module)
        # Give each custom call with batch dimensions the sharding rule that jax writes for Shardy.
        # Without it, propagation stops at the call.
        for op in ops_named(module.operation, {CUSTOM_CALL}):
            if RULE not in op.attributes and (count := call_batch_dims(op)):
                op.attributes[RULE] = rule_attribute(batched_rule(op, count), op.context)
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise from_mlir_error(error, "the shardings do not fit the program (P1): ") from None


def call_batch_dims(call: ir.Operation) -> int:
    """Counts the leading dimensions along which jax computes a custom call separately.

    Counts all of them if the call only places its operand in a memory space.
    """
    if placement(call) is not None:
        return rank_of(call.operands[0])
    frontend = call.attributes.get(FRONTEND_ATTRIBUTES)
    if not isinstance(frontend, ir.DictAttr) or _BATCH_DIMS not in frontend:
        return 0
    count = int(ir.StringAttr(frontend[_BATCH_DIMS]).value)
    batched = all(rank_of(value) >= count for value in (*call.operands, *call.results))
    return count if batched else 0


def batched_rule(op: ir.Operation, count: int) -> ShardingRule:
    """Returns the rule of a custom call whose first `count` dimensions are batch dimensions."""
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


def rule_attribute(rule: ShardingRule, context: ir.Context) -> ir.Attribute:
    """Returns the `sdy.op_sharding_rule` attribute of a rule."""
    mappings: list[ir.Attribute] = []
    for tensor in rule.tensors:
        dims = [bindings.DimMappingAttr.get(list(factors), context) for factors in tensor]
        mappings.append(bindings.TensorMappingAttr.get(dims, context))
    return bindings.OpShardingRuleAttr.get(
        list(rule.sizes),
        mappings[: rule.operands],
        mappings[rule.operands :],
        reduction_factors=sorted(rule.reduced),
        need_replication_factors=sorted(rule.whole),
        context=context,
    )
