"""Leaves out reshards that no data needs to move for.

reshard(reshard(x, A), B)       ==>  reshard(x, B), or x where it is divided so already
reshard(broadcast(scalar), B)   ==>  broadcast(scalar) divided as B; constants and iotas alike
"""

from __future__ import annotations

from stablehlo_tools.analysis.tensor_shardings import SHARDING, ValueShardings, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.partition.resharding import RESHARD

_MADE_ANYWHERE = frozenset({"stablehlo.constant", "sdy.constant", "stablehlo.iota"})
_BROADCAST = "stablehlo.broadcast_in_dim"


def fold_reshards(module: ir.Module, shardings: ValueShardings) -> None:
    """Folds every reshard of the module, in place, and drops those that nobody uses."""
    reshards: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == RESHARD:
            reshards.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    remade: dict[ir.Value, ir.Operation] = {}
    for op in reshards:
        maker = _fold(op, shardings)
        if maker is not None:
            remade[maker.results[0]] = maker
    for op in (*reversed(reshards), *remade.values()):
        if not list(op.results[0].uses):
            op.erase()


def _fold(op: ir.Operation, shardings: ValueShardings) -> ir.Operation | None:
    """Folds one reshard; returns the op that a copy of takes its place, if one does."""
    source, result = op.operands[0], op.results[0]
    maker = producer(source)
    while maker is not None and maker.name == RESHARD:
        source = maker.operands[0]
        maker = producer(source)
    op.operands[0] = source
    wanted = shardings.of(result)
    if shardings.of(source) == wanted:
        result.replace_all_uses_with(source)
        return None
    if maker is None or not is_made_anywhere(maker):
        return None
    copy = maker.clone(ip=ir.InsertionPoint(op))
    copy.attributes[SHARDING] = shardings.per_value([wanted], op.context)
    result.replace_all_uses_with(copy.results[0])
    return maker


def is_made_anywhere(op: ir.Operation) -> bool:
    """Whether each device can make any part of an op's result by itself."""
    if op.name in _MADE_ANYWHERE:
        return True
    return op.name == _BROADCAST and rank_of(op.operands[0]) == 0
