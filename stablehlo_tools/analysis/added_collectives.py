"""Whether XLA's partitioner may add collectives of its own to a program for all devices.

It does so where a value outside of manual computations is sharded in one way where it is made and
in another where it is used. Such collectives are not in the module, and nothing orders them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONSTANT, MANUAL_COMPUTATION, PARTITION_ID
from stablehlo_tools.dialect.traits import (
    ELEMENTWISE,
    STABLEHLO,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
)
from stablehlo_tools.ir.carriers import terminator

_SHARDING = "sdy.sharding"
_BARRIER = "stablehlo.optimization_barrier"
# Ops that make a value that is the same everywhere, or one that any sharding suits.
_FREE = ops_with(Trait.TOKEN) | {CONSTANT, PARTITION_ID}
# Each result element is made of the operands' elements at its own place. Fewer than have the trait:
# of CHLO's ops and of these it is not known here how the partitioner treats them.
_UNTRIED = ops_with_any(Trait.COMPLEX_PART | Trait.INTEGRAL | Trait.SHIFT) | full_names(
    "atan2 cbrt count_leading_zeros exponential_minus_one log_plus_one popcnt reduce_precision "
    "remainder tan"
)
_ELEMENTWISE = STABLEHLO & ELEMENTWISE - _UNTRIED


def op_that_may_add(main: ir.Operation) -> ir.Operation | None:
    """The first op of a function without calls for which collectives may be added; None if none.

    Harmless are ops on scalars, manual computations that take values as they are sharded, and
    elementwise ops on values that are all sharded alike.
    """
    block = main.regions[0].blocks[0]
    known = dict(zip(block.arguments, _listed(main, "arg_attrs"), strict=True))
    shardings: dict[ir.Value, str | None] = {**known}
    end = terminator(block)
    for view in block.operations:
        op = view.operation
        if op == end:
            break
        made = _made(op, shardings)
        if made is None:
            return op
        shardings.update(zip(op.results, made, strict=True))
    for value, sharding in zip(end.operands, _listed(main, "res_attrs"), strict=True):
        if _differ(shardings.get(value), sharding):
            return end
    return None


def _made(op: ir.Operation, shardings: Mapping[ir.Value, str | None]) -> list[str | None] | None:
    """How an op's results are sharded, where it needs no communication; else None."""
    taken = [shardings.get(value) for value in op.operands]
    if op.name == MANUAL_COMPUTATION:
        wanted = sharding_per_value(op.attributes["in_shardings"])
        if any(_differ(a, _normal(b)) for a, b in zip(taken, wanted, strict=True)):
            return None
        return [_normal(made) for made in sharding_per_value(op.attributes["out_shardings"])]
    if op.name == _BARRIER:
        return taken
    if op.name in _FREE or all(map(_is_scalar, (*op.operands, *op.results))):
        return [None for _ in op.results]
    if op.name == "stablehlo.broadcast_in_dim" and _is_scalar(op.operands[0]):
        return [None]
    if op.name not in _ELEMENTWISE:
        return None
    pairs = zip(op.operands, taken, strict=True)
    given = {sharding for value, sharding in pairs if sharding and not _is_scalar(value)}
    if len(given) > 1:
        return None
    return [next(iter(given), None)]


def _is_scalar(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.RankedTensorType) or value.type.rank == 0


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two shardings are both said, and different."""
    return one is not None and other is not None and one != other


def _normal(sharding: ir.Attribute) -> str:
    """A sharding without what leaves its dimensions open."""
    return re.sub(r",?\s*\?", "", str(sharding))


def _listed(main: ir.Operation, name: str) -> list[str | None]:
    block = main.regions[0].blocks[0]
    count = len(block.arguments) if name == "arg_attrs" else len(terminator(block).operands)
    attribute = main.attributes.get(name)
    if attribute is None:
        return [None] * count
    entries = [ir.DictAttr(entry) for entry in ir.ArrayAttr(attribute)]
    return [_normal(e[_SHARDING]) if _SHARDING in e else None for e in entries]
