"""Why a collective keeps its place in the loop, whatever hangs on it."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import why_unmovable

SHARDINGS = ("sdy.sharding", "mhlo.sharding")


def why_never(collective: Collective) -> str | None:
    """Why a collective can run after no loop; None where it depends on the loop."""
    op = collective.op
    stays = why_unmovable(collective)
    if stays:
        return stays
    if len(op.operands) != 1:
        return "it has several operands"
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return "it sends a tensor without a static shape"
    if has_sharding(op):
        return "its result has a sharding of its own"
    return None


def is_static_tensor(kind: ir.Type) -> bool:
    """Whether a type is that of a tensor of numbers whose dimensions are all known."""
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return False
    return isinstance(kind.element_type, ir.IntegerType | ir.FloatType | ir.ComplexType)


def has_sharding(op: ir.Operation) -> bool:
    """Whether an op says how its results are sharded, in the words of Shardy or of XLA."""
    return any(name in op.attributes for name in SHARDINGS)
