"""Shardy's sharding rules: which dimensions of an op's tensors belong together, and how.

`sdy-populate-op-sharding-rules` writes one on each op that it knows. A rule names factors; each
dimension of each operand and result is one factor or, for a reshape, several, major first. A
factor is passed through, reduced over, or in need of being whole on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stablehlo_tools import bindings
from stablehlo_tools.analysis.tensor_shardings import Axes, Dims, MeshAxes
from stablehlo_tools.bindings import ir

RULE = "sdy.sharding_rule"

Factors = tuple[int, ...]


@dataclass(frozen=True)
class ShardingRule:
    """The factors of an op's tensors, operands first and then results.

    `tensors[t][d]` are the factors of dimension d of tensor t, `sizes[f]` the size of a factor;
    `reduced` factors leave partial results, `whole` ones cannot be divided.
    """

    tensors: tuple[tuple[Factors, ...], ...]
    operands: int
    sizes: Factors
    reduced: frozenset[int]
    whole: frozenset[int]

    def factors_of(self, tensor: int) -> set[int]:
        """The factors that a tensor has in some dimension."""
        return {factor for factors in self.tensors[tensor] for factor in factors}


def rule_of(op: ir.Operation) -> ShardingRule | None:
    """The rule that Shardy wrote on an op; None where it has none, or one of the user's."""
    attribute = op.attributes.get(RULE)
    if attribute is None:
        return None
    return _decoded(attribute)


@lru_cache(maxsize=4096)
def _decoded(attribute: ir.Attribute) -> ShardingRule | None:
    rule = bindings.OpShardingRuleAttr(attribute)
    if rule.is_custom:
        return None
    operands = [_mapping(mapping) for mapping in rule.operand_mappings]
    results = [_mapping(mapping) for mapping in rule.result_mappings]
    return ShardingRule(
        tensors=(*operands, *results),
        operands=len(operands),
        sizes=tuple(rule.factor_sizes),
        reduced=frozenset(rule.reduction_factors),
        whole=frozenset(rule.need_replication_factors) | frozenset(rule.permutation_factors),
    )


def _mapping(attribute: ir.Attribute) -> tuple[Factors, ...]:
    return tuple(
        tuple(bindings.DimMappingAttr(dim).factor_indices)
        for dim in bindings.TensorMappingAttr(attribute).dim_mappings
    )


def project(rule: ShardingRule, tensor: int, dims: Dims, axes: MeshAxes) -> dict[int, Axes] | None:
    """The axes on each factor of a tensor; None where an axis straddles factors unevenly."""
    axes_of: dict[int, Axes] = {}
    for factors, divided in zip(rule.tensors[tensor], dims, strict=True):
        if len(factors) == 1:
            axes_of[factors[0]] = divided
            continue
        rest = divided
        for factor in factors:
            parts = axes.split(rest, rule.sizes[factor])
            if parts is None:
                return None
            axes_of[factor], rest = parts
            if rest and axes.size(axes_of[factor]) < rule.sizes[factor]:
                return None
        if rest:
            return None
    return axes_of


def assemble(rule: ShardingRule, tensor: int, factors: dict[int, Axes], axes: MeshAxes) -> Dims:
    """The inverse of `project`, where an axis behind a factor that is not used up is dropped."""
    dims: list[Axes] = []
    for listed in rule.tensors[tensor]:
        joined: list[Axes] = []
        for factor in listed:
            joined.append(factors.get(factor, ()))
            if axes.size(joined[-1]) < rule.sizes[factor]:
                break
        dims.append(axes.canonical(axis for part in joined for axis in part))
    return tuple(dims)
