"""Imports shardings: replaces those of GSPMD and of older releases of jax by Shardy's."""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools import bindings
from stablehlo_tools.analysis.partitioner_work import (
    Annotation,
    first_annotation,
    left_to_the_partitioner,
)
from stablehlo_tools.analysis.shardings import RULE, Factors, ShardingRule
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, from_mlir_error
from stablehlo_tools.dialect.custom_calls import target_of
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.kernels.rules import KernelRule, state_rule
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.ir.gspmd_import import import_gspmd
from stablehlo_tools.ir.shardy_round_trip import restore_shardy
from stablehlo_tools.ir.walk import ops_named


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
        state_call_rules(module)
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise from_mlir_error(error, "the shardings do not fit the program (P1): ") from None


def state_call_rules(module: ir.Module) -> None:
    """Writes the sharding rule of each custom call that has none and treats some dimensions
    independently. Without it, Shardy's propagation stops at the call."""
    for op in ops_named(module.operation, {CUSTOM_CALL}):
        if RULE not in op.attributes and (rule := call_rule(op)) is not None:
            op.attributes[RULE] = rule_attribute(rule, op.context)


def state_rules(module: ir.Module, rules: Mapping[str, KernelRule]) -> set[str]:
    """Writes rules on the calls of a module, in place of those that they have; returns the targets
    that it has. Raises a located ToolError if a rule does not fit a call."""
    found: set[str] = set()
    for op in ops_named(module.operation, {CUSTOM_CALL}):
        rule = rules.get(target_of(op))
        if rule is None:
            continue
        found.add(rule.target)
        try:
            state_rule(op, rule)
        except ValueError as error:
            raise ToolError(f"the rule of {rule.target}: {error}", op.location) from None
    return found


def call_rule(op: ir.Operation) -> ShardingRule | None:
    """Returns the rule of a custom call that treats some dimensions independently; None without
    any."""
    relation = dimensions_of(op)
    if relation is None:
        return None
    tensors: list[list[Factors]] = [
        [()] * len(shape) for shape in (*relation.operands, *relation.results)
    ]
    for number, factor in enumerate(relation.factors):
        for along in factor.operands:
            tensors[along.tensor][along.dim] = (number,)
        for along in factor.results:
            tensors[len(relation.operands) + along.tensor][along.dim] = (number,)
    return ShardingRule(
        tuple(tuple(dims) for dims in tensors),
        len(relation.operands),
        tuple(factor.size for factor in relation.factors),
        frozenset(),
        frozenset(
            number
            for number, factor in enumerate(relation.factors)
            if factor.role is not FactorRole.KEPT
        ),
    )


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
