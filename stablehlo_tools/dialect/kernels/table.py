"""Returns the relation of a custom call's dimensions, and writes the call at other sizes."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import backend_config, kernel_name, label, target_of
from stablehlo_tools.dialect.device_placement import placement
from stablehlo_tools.dialect.factors import (
    Along,
    Factor,
    FactorRole,
    OpDimensions,
    Shapes,
    with_whole,
)
from stablehlo_tools.dialect.frontend_attributes import frontend_entries
from stablehlo_tools.dialect.kernels import cudnn, mosaic
from stablehlo_tools.dialect.kernels.rules import RULE, resize_rule, rule_factors, suggest_rule
from stablehlo_tools.dialect.names import CUSTOM_CALL, RAGGED_DOT

# Kernels for GPU of Pallas and of others, which run once for each point of a grid, too.
_GRIDDED = re.compile(r"__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu\w*")
_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)")
_BATCH_DIMS = "num_batch_dims"  # jax states the leading dimensions that a call maps over


def kernel_factors(op: ir.Operation, operands: Shapes, results: Shapes) -> list[Factor] | None:
    """Returns the factors of a kernel: its independent ones are KEPT, all other
    dimensions WHOLE. Returns None for a call of an unknown kind."""
    aliases = _ALIAS.findall(str(op.attributes.get("output_operand_aliases", "")))
    # An operand that is overwritten has the dimensions of the result that is in its place.
    kept = [
        factor
        for factor in _independent_factors(op, operands, results)
        if all(
            (one := factor.in_operand(int(operand))) is not None
            and (other := factor.in_result(int(result or 0))) is not None
            and one.dim == other.dim
            for result, operand in aliases
        )
    ]
    if not kept:
        return None
    return with_whole(kept, operands, results)


def describe_unknown(op: ir.Operation) -> str:
    """Returns the name of a call that has no relation, why, and the rule that would give it one."""
    named = kernel_name(op)
    said = f'{label(op)}, kernel "{named}",' if named else label(op)
    if _GRIDDED.fullmatch(target_of(op)):
        return f"{said} is opaque: it has the size of the batch in its grid, which is not read"
    if target_of(op) == RAGGED_DOT:
        return (
            f"{said} has rows of all samples, in groups: it is divided if they are sorted by an "
            "argsort of whole numbers, counted by jnp.bincount, and brought back into their order"
        )
    why = "its independent dimensions are unknown"
    if target_of(op) == mosaic.TARGET:
        why = mosaic.why_dependent(backend_config(op))
    return (
        f"{said} is opaque: {why}; if it computes each sample by itself, state that in the file of "
        f"--rules: `{suggest_rule(op)}`"
    )


def _independent_factors(op: ir.Operation, operands: Shapes, results: Shapes) -> list[Factor]:
    target, config = target_of(op), backend_config(op)
    if placement(op) is not None:  # it only moves its operand to a memory space
        return batch_factors(len(operands[0]), operands, results)
    if _BATCH_DIMS in frontend_entries(op):
        count = int(ir.StringAttr(frontend_entries(op)[_BATCH_DIMS]).value)
        return batch_factors(count, operands, results)
    stated = rule_factors(op, operands, results) if RULE in op.attributes else None
    # The size of such a kernel is in its grid, so a rule alone does not let it be cut.
    if target == mosaic.TARGET:
        return mosaic.mosaic_factors(config, operands, results, stated or [])
    if cudnn.TARGET.fullmatch(target):
        return cudnn.cudnn_factors(config, operands, results)
    if _GRIDDED.fullmatch(target):
        return []
    return stated or []


def _resize_config(target: str, config: str, operands: int, factor: Factor, size: int) -> str:
    if target == mosaic.TARGET:
        return mosaic.resized_mosaic(config, operands, factor, size)
    if cudnn.TARGET.fullmatch(target):
        return cudnn.resized_cudnn(config, factor, size)
    return config


def batch_factors(count: int, operands: Shapes, results: Shapes) -> list[Factor]:
    """Returns the factors of the first dimensions of all tensors; none if one has fewer."""
    sides = [
        [tuple(Along(i, dim) for i in range(len(side))) for side in (operands, results)]
        for dim in range(count)
    ]
    shapes = (*operands, *results)
    if not results or any(shape[:count] != results[0][:count] for shape in shapes):
        return []
    return [Factor(results[0][dim], FactorRole.KEPT, *along) for dim, along in enumerate(sides)]


def config_of_one(op: ir.Operation, relation: OpDimensions | None) -> str:
    """Returns the configuration of an op with one element of each independent dimension. Calls of
    one kernel at other sizes have the same one."""
    config = backend_config(op)
    if op.name != CUSTOM_CALL:
        return config
    target = target_of(op)
    for factor in () if relation is None else relation.factors:
        if factor.role is FactorRole.KEPT:
            config = _resize_config(target, config, len(op.operands), factor, 1)
    return mosaic.without_cost(config) if target == mosaic.TARGET else config


def resize_kernel(copy: ir.Operation, operands: Shapes, results: Shapes) -> None:
    """Writes the sizes of a call, whose tensors have their new types, in its configuration.
    `operands` and `results` are its shapes before."""
    types = (ir.RankedTensorType(result.type) for result in copy.results)
    if tuple(tuple(type_.shape) for type_ in types) == results:
        return
    target, config = target_of(copy), backend_config(copy)
    for factor in _independent_factors(copy, operands, results):
        along = factor.results[0]
        size = ir.RankedTensorType(copy.results[along.tensor].type).shape[along.dim]
        if size == factor.size:
            continue
        config = _resize_config(target, config, len(copy.operands), factor, size)
    # A configuration that is a dictionary belongs to a call that reads its sizes from operands.
    for name in ("mhlo.backend_config", "backend_config"):
        if config and isinstance(copy.attributes.get(name), ir.StringAttr):
            copy.attributes[name] = ir.StringAttr.get(config, copy.context)
    if RULE in copy.attributes:
        resize_rule(copy)
