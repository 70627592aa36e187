"""Reads and writes of one place along a dimension: what a slice, an update, a gather, a scatter is.

Of gathers and scatters only those at a single place are understood, as `x[i]` and
`x.at[i].set(y)` become; the others may touch anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.demand.dimensions import static_shape, windowed
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator


@dataclass(frozen=True)
class Access:
    """`size` places along `dimension` of operand 0, from an index that is operand `index` on.

    `clamps`: an index too large or small is moved inside; otherwise nothing happens there.
    `overwrites`: a write that leaves nothing of what was there. `fills`: all other dimensions are
    taken whole. `indices` are the operands that say where.
    """

    dimension: int
    size: int
    index: int
    indices: tuple[int, ...]
    clamps: bool
    overwrites: bool = False


def accesses(op: ir.Operation) -> list[Access]:
    """Along each dimension of which the op touches a part; none where it is not understood."""
    rule = {
        "stablehlo.dynamic_slice": _slice,
        "stablehlo.dynamic_update_slice": _update,
        "stablehlo.gather": _gather,
        "stablehlo.scatter": _scatter,
    }.get(op.name)
    whole = static_shape(op.operands[0].type) if rule is not None else None
    return [] if rule is None or whole is None else rule(op, whole)


def _slice(op: ir.Operation, whole: tuple[int, ...]) -> list[Access]:
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    indices = tuple(range(1, 1 + len(whole)))
    return [Access(d, sizes[d], 1 + d, indices, True) for d in windowed(sizes, whole)]


def _update(op: ir.Operation, whole: tuple[int, ...]) -> list[Access]:
    sizes = static_shape(op.operands[1].type)
    if sizes is None:
        return []
    parts = windowed(sizes, whole)
    indices = tuple(range(2, 2 + len(whole)))
    return [Access(d, sizes[d], 2 + d, indices, True, len(parts) == 1) for d in parts]


def _gather(op: ir.Operation, whole: tuple[int, ...]) -> list[Access]:
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    mapped = list(numbers.start_index_map)
    if len(numbers.operand_batching_dims) or not _is_single(op.operands[1], mapped):
        return []
    return [Access(d, sizes[d], 1, (1,), True) for d in windowed(sizes, whole) if d in mapped]


def _scatter(op: ir.Operation, whole: tuple[int, ...]) -> list[Access]:
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    mapped = list(numbers.scattered_dims_to_operand_dims)
    inserted = list(numbers.inserted_window_dims)
    if len(op.operands) != 3 or len(numbers.input_batching_dims) or mapped != inserted:
        return []
    updates = static_shape(op.operands[2].type)
    others = tuple(size for d, size in enumerate(whole) if d not in inserted)
    if updates != others or not _is_single(op.operands[1], mapped):
        return []
    body = op.regions[0].blocks[0]
    sets = terminator(body).operands[0] == body.arguments[1]
    return [Access(mapped[0], 1, 1, (1,), False, sets)]


def _is_single(indices: ir.Value, mapped: list[int]) -> bool:
    """Whether the indices are one number, for one dimension."""
    shape = static_shape(indices.type)
    return len(mapped) == 1 and shape is not None and all(size == 1 for size in shape)
