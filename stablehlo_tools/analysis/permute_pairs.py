"""Reading and writing the pairs of a collective_permute, and telling which of them are small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, tensor_bytes
from stablehlo_tools.analysis.permute_cycles import Pair
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError

PERMUTE = "collective_permute"
PAIRS = "source_target_pairs"


def pairs_of(collective: Collective) -> tuple[Pair, ...]:
    """The (source, target) pairs, in the permute's own numbering."""
    table = np.array(ir.DenseIntElementsAttr(collective.inner.attributes[PAIRS]))
    rows = [] if table.size == 0 else table.reshape(-1, 2).tolist()
    return tuple((int(source), int(target)) for source, target in rows)


def pairs_attribute(pairs: Sequence[Pair]) -> ir.Attribute:
    """Pairs, of which there is at least one, as an op holds them."""
    return ir.DenseElementsAttr.get(np.array(pairs, dtype=np.int64))


def check_min_bytes(min_bytes: int, name: str, precondition: str, module: ir.Module) -> None:
    """Raises ToolError for a limit that is none."""
    if min_bytes < 0:
        raise ToolError(
            f"{name}: min-bytes is a number of bytes, not negative ({precondition})",
            module.operation.location,
        )


def why_left(collective: Collective, min_bytes: int) -> str | None:
    """Why a permute is not worth a rewrite, whatever its pairs are; None where it may be."""
    if collective.is_async:
        return "it stands in an async_start"
    kind = ir.ShapedType(collective.op.results[0].type)
    if kind.has_static_shape and 0 in kind.shape:
        return "it has no elements"
    if not list(collective.op.results[0].uses):
        return "nobody uses its result"
    size = tensor_bytes(kind) if min_bytes else None
    if size is not None and size < min_bytes:
        return f"its {size} bytes are less than min-bytes={min_bytes}"
    return None
