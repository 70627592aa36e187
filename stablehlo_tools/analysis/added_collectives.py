"""Whether XLA's partitioner may add collectives of its own to a program for all devices.

It does so where a value outside of manual computations is sharded in one way where it is made and
in another where it is used. Such collectives are not in the module, and nothing orders them.
"""

from __future__ import annotations

import re

from stablehlo_tools.analysis.communication import MANUAL_COMPUTATION
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator

_SHARDING = "sdy.sharding"
_HARMLESS = frozenset(
    f"stablehlo.{name}" for name in ("constant", "after_all", "create_token", "partition_id")
)
_HANDS_ON = "stablehlo.optimization_barrier"


def op_that_may_add(main: ir.Operation) -> ir.Operation | None:
    """The first op of a function without calls for which collectives may be added; None if none.

    Ops on scalars are harmless; so are manual computations that take values as they are sharded.
    """
    block = main.regions[0].blocks[0]
    shardings: dict[ir.Value, str | None] = {}
    for argument, sharding in zip(block.arguments, _listed(main, "arg_attrs"), strict=True):
        shardings[argument] = sharding
    end = terminator(block)
    for view in block.operations:
        op = view.operation
        if op == end:
            break
        if op.name == MANUAL_COMPUTATION:
            wanted = sharding_per_value(op.attributes["in_shardings"])
            for value, sharding in zip(op.operands, wanted, strict=True):
                if _differ(shardings.get(value), _normal(sharding)):
                    return op
            made = sharding_per_value(op.attributes["out_shardings"])
            shardings.update(zip(op.results, map(_normal, made), strict=True))
        elif op.name == _HANDS_ON:
            pairs = zip(op.operands, op.results, strict=True)
            shardings.update((result, shardings.get(value)) for value, result in pairs)
        elif op.name not in _HARMLESS and not all(map(_is_scalar, (*op.operands, *op.results))):
            return op
    for value, sharding in zip(end.operands, _listed(main, "res_attrs"), strict=True):
        if _differ(shardings.get(value), sharding):
            return end
    return None


def _is_scalar(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.RankedTensorType) or value.type.rank == 0


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two shardings are both said, and different."""
    return one is not None and other is not None and one != other


def _normal(sharding: ir.Attribute) -> str:
    """A sharding without its mesh's name and without what leaves dimensions open."""
    text = re.sub(r",?\s*\?", "", str(sharding))
    return re.sub(r"@\w+", "", text)


def _listed(main: ir.Operation, name: str) -> list[str | None]:
    block = main.regions[0].blocks[0]
    count = len(block.arguments) if name == "arg_attrs" else len(terminator(block).operands)
    attribute = main.attributes.get(name)
    if attribute is None:
        return [None] * count
    entries = [ir.DictAttr(entry) for entry in ir.ArrayAttr(attribute)]
    return [_normal(e[_SHARDING]) if _SHARDING in e else None for e in entries]
