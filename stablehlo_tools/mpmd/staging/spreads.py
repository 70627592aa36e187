"""Values that are spread from few elements, as the factor that clips all gradients is: each reader
makes its own, where it stands, so that the few elements travel and not what they are spread to."""

from __future__ import annotations

from math import prod

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of, producer

_SPREAD = "stablehlo.broadcast_in_dim"
_KEEPING = ops_with(Trait.BIJECTIVE) - {"stablehlo.reverse"} | {CONVERT, "stablehlo.negate"}
_FEW = 64  # elements


def is_spread(op: ir.Operation) -> bool:
    """Whether an op spreads few elements, or reshapes or converts what has been spread."""
    if op.name == _SPREAD:
        count = prod(shape_of(op.operands[0]))
        return count <= _FEW and count < prod(shape_of(op.results[0]))
    if op.name in _KEEPING:
        maker = producer(op.operands[0])
        return maker is not None and is_spread(maker)
    return False


def own_spreads(block: ir.Block) -> None:
    """Rewrites the ops of a block, not those in their regions: each reader of what is spread gets a
    copy."""
    for view in list(block.operations)[::-1]:
        op = view.operation
        if not len(op.results) or not is_spread(op):
            continue
        readers = {key_of(use.owner.operation): use.owner.operation for use in op.results[0].uses}
        outermost = [reader for reader in readers.values() if reader.block == block]
        if len(outermost) != len(readers):
            continue  # a region reads it
        for reader in outermost[1:]:
            copy = op.clone(ip=ir.InsertionPoint(reader)).results[0]
            for position, operand in enumerate(reader.operands):
                if operand == op.results[0]:
                    reader.operands[position] = copy
