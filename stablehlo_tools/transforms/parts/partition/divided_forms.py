"""Rewrites ops along a divided dimension, so that each device computes a part.

| fft of several dimensions, some of them divided | ffts of fewer dimensions, one after the other |
| sort with only its first rows read (top_k) | sort of each part, then of their first rows |
| concatenate, update or pad of a computed piece | `aligned_pieces` |

These forms cost more on one device, so they follow the propagation. In the modules here, all values
have their shardings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.captured_constants import captured_ops, own_constants
from stablehlo_tools.analysis.shardings import RULE, SHARDING, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import FFT, IOTA, RESHARD, SLICE, SORT
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import Builder, constrain_sharding, element_of, shape_of
from stablehlo_tools.ir.clone import reshaped_clone
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import CONSTANTS, has_uses, maker_of, producer
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.partition.aligned_pieces import align_pieces

_LIMITS = "limit_indices"


def write_divided_forms(module: ir.Module, shardings: ValueShardings) -> bool:
    """Writes all of these forms in place; returns True if there were any."""
    forms = (_separate_transforms, _sort_candidates, align_pieces)
    return sum(form(module, shardings) for form in forms) > 0  # `any` would stop at the first


def _separate_transforms(module: ir.Module, shardings: ValueShardings) -> bool:
    """Writes an FFT of several dimensions as FFTs of fewer, if some of them are divided, in place.

    For each divided dimension, an all_to_all divides another one. The local dimensions are
    transformed first; but last in an FFT of a value that was computed, element by element, from
    another FFT. Such a pair (`ifftn(fftn(x) * k)`) then needs one exchange there and one back.
    Returns True if any was written.

        %1 = stablehlo.fft %x, length = [8, 8, 8] : tensor<8x8x8xcomplex<f32>>   // dim 0 over "x"
    ==>
        %1 = stablehlo.fft %x, length = [8, 8]
        %2 = stablehlo.transpose %1, dims = [1, 2, 0]
        %3 = stablehlo.fft %2, length = [8]
        %4 = stablehlo.transpose %3, dims = [2, 0, 1]
    """
    written = False
    exchanged = set[ir.Value]()  # that an FFT of a divided dimension left with another one divided
    for op in ops_named(module.operation, {FFT, *ELEMENTWISE}):
        is_exchanged = not exchanged.isdisjoint(op.operands)
        if op.name != FFT:
            exchanged.update(op.results if is_exchanged else ())
            continue
        given, made = (shardings.axes_by_dim(v) for v in (op.operands[0], op.results[0]))
        sizes = integers(op, "fft_length")
        lengths = dict(enumerate(sizes, len(made) - len(sizes)))
        divided = [dim for dim in lengths if given[dim] or made[dim]]
        if len(lengths) > 1 and divided:
            made = _separate(op, lengths, divided, is_exchanged, shardings)
            exchanged.update(() if is_exchanged else [made])
            written = True
    return written


def _separate(
    op: ir.Operation,
    lengths: dict[int, int],
    divided: list[int],
    local_last: bool,
    shardings: ValueShardings,
) -> ir.Value:
    """Replaces an FFT by one for each step, and returns the result.

    `lengths` are those of its dimensions."""
    last = max(lengths)
    together = [dim for dim in lengths if dim > max(divided)]  # local, and adjacent to the end
    local = [[dim] for dim in lengths if dim not in (*divided, *together)]
    steps = [step for step in (together, *local, *([dim] for dim in divided)) if step]
    kind = str(op.attributes["fft_type"])
    inverse = " I" in kind
    if "RFFT" in kind:  # has real numbers before or after the transform of the last dimension
        steps.sort(key=lambda step: last not in step)
        local_last = inverse
    if local_last:
        steps.reverse()
    build = Builder(ir.InsertionPoint(op), op.location)
    of_complex = f"#stablehlo<fft_type {'IFFT' if inverse else 'FFT'}>"
    value, type_ = op.operands[0], op.operands[0].type
    sharding = shardings.axes_by_dim(op.results[0] if local_last else value)

    def state(value: ir.Value, order: Sequence[int]) -> ir.Value:
        return shardings.state(value, tuple(sharding[dim] for dim in order))

    rows = list(range(last + 1))
    for step in steps:
        order = [dim for dim in rows if dim not in step] + step
        if last in step:
            type_ = op.results[0].type
        if order != rows:
            value = state(build.transpose(value, order), order)
        shape = [ir.RankedTensorType(type_).shape[dim] for dim in order]
        attributes = {
            "fft_type": (
                op.attributes["fft_type"]
                if last in step
                else ir.Attribute.parse(of_complex, op.context)
            ),
            "fft_length": build.integers([lengths[dim] for dim in step]),
        }
        element = ir.RankedTensorType(type_).element_type
        made = build.create(FFT, [value], [build.tensor(shape, element)], attributes)
        value = state(made.results[0], order)
        if order != rows:
            value = state(build.transpose(value, np.argsort(order).tolist()), rows)
    shardings.state(value, shardings.axes_by_dim(op.results[0]))
    replace(op, [value])
    return value


def _sort_candidates(module: ir.Module, shardings: ValueShardings) -> bool:
    """Divides sorts along a divided dimension if only their first or last rows are read, in place.

    Each device sorts its part, then all devices sort these rows of all parts. Both sorts are
    stable. The parts follow each other in the order of their rows, so equal rows keep their order.
    Returns True if any was written.

        %1:2 = stablehlo.sort %x, %i        // of 64 rows over 4 devices
        %2 = stablehlo.slice %1#0 [0:3]
    ==>
        %1:2 = sdy.manual_computation(%x, %i) { sort of 16 rows; slice [0:3] }
        %2:2 = stablehlo.sort %1#0, %1#1    // of 12 rows
        %3 = stablehlo.slice %2#0 [0:3]
    """
    sorts = ops_named(module.operation, {SORT})
    return sum(_sort_parts(op, shardings) for op in sorts) > 0


def _sort_parts(op: ir.Operation, shardings: ValueShardings) -> bool:
    dim, shape = integer(op, "dimension"), shape_of(op.results[0])
    layout = shardings.axes_by_dim(op.operands[0])
    local = shardings.local_shape(shape, layout)
    parts, axes = shardings.axes.size(layout[dim]), [axis for each in layout for axis in each]
    is_even = shardings.even_dims(op.operands[0], layout) == layout
    # A manual computation has whole axes.
    if parts < 2 or not is_even or any(axis.size is not None for axis in axes):
        return False
    readers = [use.owner.operation for result in op.results for use in result.uses]
    if any(each.name != SLICE or integers(each, "strides")[dim] != 1 for each in readers):
        return False
    starts, limits = (
        [integers(each, name)[dim] for each in readers] for name in ("start_indices", _LIMITS)
    )
    from_start, from_end = max(limits, default=0), shape[dim] - min(starts, default=0)
    count = min(from_start, from_end)
    # With more candidates than one part has rows, an exchange of all rows costs no more.
    if not 0 < count * parts <= local[dim]:
        return False
    comparator = op.regions[0].blocks[0]
    captured = captured_ops(comparator)
    if any(each.name not in CONSTANTS for each in captured):
        return False
    own_constants(comparator, captured)  # a manual computation sees no values from outside
    begin = 0 if count == from_start else local[dim] - count
    build = Builder(ir.InsertionPoint(op), op.location)
    shape[dim] = count * parts
    # Each device numbers its own rows, so that compilers see a top-k, and adds its first row after.
    numbered = _row_numbers(op, dim)
    given = [value for number, value in enumerate(op.operands) if number not in numbered]
    types = [build.tensor(shape, element_of(value)) for value in op.operands]
    local_types = [build.tensor(local, element_of(value)) for value in op.operands]
    stated = [shardings.attribute(layout, op.context)] * len(types)
    mesh_order = [name for name, _ in shardings.axes.mesh.axes]
    names = sorted({axis.name for axis in axes}, key=mesh_order.index)
    manual = build.manual_computation(given, types, (stated[: len(given)], stated), names)
    of_given = [build.tensor(local, element_of(value)) for value in given]
    block = ir.Block.create_at_start(manual.regions[0], of_given, [op.location] * len(given))
    inner = Builder(ir.InsertionPoint(block), op.location)
    arguments = iter(block.arguments)
    operands = [
        inner.iota(type_, dim) if number in numbered else next(arguments)
        for number, type_ in enumerate(local_types)
    ]
    in_part = _sort(op, operands, local_types, inner)
    rows = [inner.slice_along(value, dim, begin, begin + count) for value in in_part.results]
    inner.create("sdy.return", rows, [])
    candidates = list[ir.Value](manual.results)
    for number in numbered:
        place, each = build.iota(types[number], dim), candidates[number]
        part = build.same("divide", place, build.splat_like(count, place))
        first = build.same("multiply", part, build.splat_like(local[dim], place))
        candidates[number] = build.same("add", first, each)
        for value in (place, part, first, candidates[number]):
            shardings.state(value, layout)
    together = tuple(() if number == dim else each for number, each in enumerate(layout))
    whole = shardings.attribute(together, op.context)
    gathered = [
        constrain_sharding(value, whole, build.point, op.location, RESHARD) for value in candidates
    ]
    again = _sort(op, gathered, types, build)
    again.attributes[SHARDING] = shardings.per_value([together] * len(types), op.context)
    for reader in readers if begin else ():
        for name in ("start_indices", _LIMITS):
            numbers = list(integers(reader, name))
            numbers[dim] += shape[dim] - local[dim] * parts
            reader.attributes[name] = build.integers(numbers)
    places = {maker_of(op.operands[number]) for number in numbered}
    replace(op, again.results)
    for each in places:
        if not has_uses(each.results[0]):
            each.erase()
    return True


def _row_numbers(op: ir.Operation, dim: int) -> list[int]:
    """Returns the operands of a sort that number the rows, if its comparator does not read them."""
    arguments = op.regions[0].blocks[0].arguments
    return [
        number
        for number, value in enumerate(op.operands)
        if (maker := producer(value)) is not None
        and maker.name == IOTA
        and integer(maker, "iota_dimension") == dim
        and not has_uses(arguments[2 * number])
        and not has_uses(arguments[2 * number + 1])
    ]


def _sort(
    op: ir.Operation, operands: Sequence[ir.Value], types: Sequence[ir.Type], build: Builder
) -> ir.Operation:
    """Returns a stable copy of a sort for fewer rows, without sharding and rule."""
    copy = reshaped_clone(op, operands, types, build.point)
    copy.attributes["is_stable"] = ir.BoolAttr.get(True, op.context)
    for name in (SHARDING, RULE):
        if name in copy.attributes:
            del copy.attributes[name]
    return copy
