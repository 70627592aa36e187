"""Gathers and scatters of which each row of the indices is for its own row of the operand.

    %i = concatenate of iota dim = 0 : 64x512x1 and %p : 64x512x1      (c[arange(64)[:, None], p])
    gather(%c, %i) start_index_map = [0, 1]
        ==>  gather(%c, %p) start_index_map = [1], operand_batching_dims = [0],
                            start_indices_batching_dims = [0]

Devices that have the same rows of operand and indices then need nothing from others. An iota is in
range, so that clamped starts and dropped updates stay as they are. If no component of the index is
left (c[arange(64)]), one of zeros takes the place: the start of a dimension that is taken whole.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues, Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import BROADCAST, CONCATENATE, GATHER
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.unit_dims import IndexedRows, rewrite_rows
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.partition.row_scatters import select_components


def batch_rows(module: ir.Module) -> None:
    """Turns iotas in the indices of a module's gathers and scatters into batching dimensions."""
    known = DeviceValues(module, ModuleFacts.of(module, []))
    rewrite_rows(module.operation, partial(_batched, known))


def _batched(known: DeviceValues, op: ir.Operation, rows: IndexedRows) -> IndexedRows:
    indices, whole = op.operands[1], shape_of(op.operands[0])
    if rows.vector == len(shape_of(indices)):
        return rows
    sliced = shape_of(op.results[0] if op.name == GATHER else op.operands[2])
    taken = [d for d in range(len(whole)) if d not in (*rows.left_out, *rows.operand)]
    full = [d for d, at in zip(taken, rows.windows, strict=True) if sliced[at] == whole[d]]
    pairs: dict[int, int] = dict(zip(rows.operand, rows.indices, strict=True))
    kept: list[int] = []
    for component, dim in enumerate(rows.index_map):
        is_last = not kept and not full and component == len(rows.index_map) - 1
        along = _iota_dim(known, indices, rows.vector, component, whole[dim])
        if along in (None, rows.vector, *pairs.values()) or dim not in rows.left_out or is_last:
            kept.append(component)
        else:
            pairs[dim] = along
    if len(kept) == len(rows.index_map):
        return rows
    build = Builder(ir.InsertionPoint(op), op.location)
    if kept:
        op.operands[1] = select_components(build, indices, rows.vector, kept)
    else:
        shape = shape_of(indices)
        shape[rows.vector] = 1
        op.operands[1] = build.splat(0, shape, element_of(indices))
    if "indices_are_sorted" in op.attributes:  # by all components
        op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    return rows._replace(
        left_out=tuple(dim for dim in rows.left_out if dim not in pairs),
        operand=tuple(sorted(pairs)),
        indices=tuple(pairs[dim] for dim in sorted(pairs)),
        index_map=tuple(rows.index_map[component] for component in kept) or (full[0],),
    )


def _iota_dim(
    known: DeviceValues, indices: ir.Value, dim: int, component: int, size: int
) -> int | None:
    """Returns the dimension along which a component of indices, which are along `dim`, counts from
    0 to `size` - 1; None for any other component."""
    op = producer(indices)
    if op is not None and op.name == "stablehlo.clamp":
        low, high = (known.of(op.operands[n]) for n in (0, 2))
        if low is None or high is None or (low > 0).any():
            return None
        if (high.take(component, 1 + dim) if high.ndim > 1 else high).min() < size - 1:
            return None
        return _iota_dim(known, op.operands[1], dim, component, size)
    if op is None or op.name != CONCATENATE or integer(op, "dimension") != dim:
        numbers = known.of(indices)
        return None if numbers is None else _along(numbers.take([component], 1 + dim), size)
    ends = np.cumsum([shape_of(piece)[dim] for piece in op.operands])
    piece = op.operands[int(np.searchsorted(ends, component, "right"))]
    places = list(range(len(shape_of(piece))))
    maker = producer(piece)
    while maker is not None and maker.name == BROADCAST:
        places = [places[place] for place in integers(maker, "broadcast_dimensions")]
        piece = maker.operands[0]
        maker = producer(piece)
    numbers = known.of(piece)
    along = None if numbers is None else _along(numbers, size)
    return None if along is None else places[along]


def _along(numbers: Values, size: int) -> int | None:
    """The dimension along which numbers, alike on all devices, count from 0 to `size` - 1."""
    shape = numbers.shape[1:]
    for dim, length in enumerate(shape):
        row = np.arange(size).reshape([size if d == dim else 1 for d in range(len(shape))])
        if length == size > 1 and len(numbers) == 1 and (numbers[0] == row).all():
            return dim
    return None
