"""Rewrites ops locally to forms that a partitioner can divide, before it makes any decision.

chlo.scan by a reducer (jnp.cumsum)                   ==>  reduce_window over all rows so far
scatter at constant indices (x.at[1:-1].add(u))       ==>  dynamic_update_slice
gather at constant indices, of one window             ==>  slice
slice, concatenate, … of equal elements (jnp.roll)    ==>  broadcast of the element
slice of a reverse (jnp.sort(x, descending)[:k])      ==>  reverse of a slice
reverse of a sort of reverses (jnp.argsort)           ==>  sort in the opposite order
reshape of a broadcast of a dimension of 1 (jnp.pad)  ==>  concatenate of the copies
reduce from another number than the identity          ==>  reduce from it, then add the number
scatter of windows of one indexed row                 ==>  scatter of rows, by fewer indices
gather of c[arange(64)[:, None], p]                   ==>  gather with batching dimensions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.captured_constants import starts_idempotent
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues, Values, fold_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import (
    IndexedNumbers,
    gather_numbers,
    scatter_numbers,
)
from stablehlo_tools.dialect.dimensions import integer, integers, static_shapes
from stablehlo_tools.dialect.names import (
    BROADCAST,
    COMPOSITE,
    CONCATENATE,
    DYNAMIC_SLICE,
    GATHER,
    PAD,
    REDUCE,
    RESHAPE,
    REVERSE,
    SCATTER,
    SLICE,
    SORT,
    TRANSPOSE,
)
from stablehlo_tools.dialect.reducers import (
    IDEMPOTENT,
    REDUCERS,
    complex_identity,
    identity_of,
    reducer_kind,
    reducer_kinds,
)
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.rewriter import Patterns, replace
from stablehlo_tools.ir.unit_dims import rewrite_rows
from stablehlo_tools.ir.values import (
    CONSTANTS,
    has_uses,
    is_identity_of,
    producer,
    splat_element,
    stand_in,
)
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import callee_name, functions_by_name, ops_named
from stablehlo_tools.transforms.parts.partition.operand_needs import REDUCE_WINDOW

_SCAN = "chlo.scan"
_MOST_COPIES = 8  # of an edge; a wider one stays a broadcast


def scans_as_windows(module: ir.Module) -> None:
    """Rewrites prefix sums by a reducer as windows; other scans stay composites, to be inlined.

    jax writes `jnp.cumsum` as a composite. Its decomposition is a loop over single rows, which no
    compiler recognizes as a prefix sum. Compilers recognize the window.

        %1:2 = stablehlo.composite "chlo.scan" %x, %zeros ({add}) {dimension = 0}
    ==>
        %1 = stablehlo.reduce_window(%x, %zero) ({add}) <window = [n], padding = [[n - 1, 0]]>
    """
    decompositions: set[str] = set()
    for composite in ops_named(module.operation, {COMPOSITE}):
        name, made = callee_name(composite), _window_of_scan(composite)
        if made is not None:
            decompositions.add(name)
            composite.results[0].replace_all_uses_with(made)
            composite.erase()
    if not decompositions:
        return
    # Erase decompositions that no other op calls.
    called = {callee_name(op) for op in ops_named(module.operation, CALLS)}
    for name, function in functions_by_name(module).items():
        if name in decompositions - called:
            function.erase()


def _sort_in_opposite_order(op: ir.Operation) -> None:
    """Rewrites a sort of reversed operands whose results are reversed, too, in place.

    The sort is by the opposite order then. If it is stable, equal rows keep their places.
    """
    dims = [integer(op, "dimension")]
    makers = [producer(value) for value in op.operands]
    users = [use.owner.operation for value in op.results for use in value.uses]
    if not all(
        each is not None and each.name == REVERSE and list(integers(each, "dimensions")) == dims
        for each in (*makers, *users)
    ):
        return
    for number, maker in enumerate(makers):
        assert maker is not None, "checked above"
        op.operands[number] = maker.operands[0]
    block = op.regions[0].blocks[0]
    for one, other in zip(block.arguments[::2], block.arguments[1::2], strict=True):
        pairs = [(use.owner.operation, use.operand_number, one) for use in other.uses]
        pairs += [(use.owner.operation, use.operand_number, other) for use in one.uses]
        for user, number, value in pairs:
            user.operands[number] = value
    for user in users:
        user.results[0].replace_all_uses_with(user.operands[0])


def _window_of_scan(composite: ir.Operation) -> ir.Value | None:
    """Writes the window for a scan of one tensor by a reducer that starts from its identity.

    Returns None for any other composite, and for a scan whose last row is used.
    """
    if ir.StringAttr(composite.attributes["name"]).value != _SCAN:
        return None
    reducer, spread = _scan_reducer(composite), producer(composite.operands[-1])
    if reducer is None or spread is None or spread.name != BROADCAST:
        return None
    rows, start = composite.operands[0], spread.operands[0]
    alone = len(composite.operands) == len(composite.results) == 2
    if shape_of(start) or not alone or has_uses(composite.results[1]):
        return None
    is_static = ir.RankedTensorType(rows.type).has_static_shape
    if not is_static or not is_identity_of(reducer, start):
        return None
    attributes = ir.DictAttr(composite.attributes["composite_attributes"])
    if not ir.BoolAttr(attributes["is_associative"]).value:
        return None
    shape, dim = shape_of(rows), ir.IntegerAttr(attributes["dimension"]).value
    window, padding = [1] * len(shape), [[0, 0] for _ in shape]
    window[dim] = shape[dim]
    padding[dim][ir.BoolAttr(attributes["is_reverse"]).value] = shape[dim] - 1
    build = Builder(ir.InsertionPoint(composite), composite.location)
    text = f"dense<{padding}> : tensor<{len(shape)}x2xi64>"
    numbers = {
        "window_dimensions": build.integers(window),
        "padding": ir.Attribute.parse(text, build.context),
    }
    made = build.create(REDUCE_WINDOW, [rows, start], [rows.type], numbers, regions=1)
    write_reducer(reducer, element_of(rows), made.regions[0], build.location)
    return made.results[0]


def _scan_reducer(composite: ir.Operation) -> str | None:
    """Returns the reducer by which a scan combines a row with its carry; None if the body has other
    ops, or yields other values than the combined row twice."""
    if len(composite.regions) != 1 or not composite.regions[0].blocks:
        return None
    block = composite.regions[0].blocks[0]
    ops = [op.operation for op in block.operations]
    if len(ops) != 2:
        return None
    combine, end = ops
    name = combine.name.removeprefix("stablehlo.")
    both = set(combine.operands) == set(block.arguments)
    handed_on = list(end.operands) == [combine.results[0]] * 2
    return name if name in REDUCERS and both and handed_on else None


def plain_moves(module: ir.Module) -> None:
    """Rewrites ops that only move elements to constant places, in place.

    A partitioner then sees the destination of each element, and sends only those that move.
    """
    for op in ops_named(module.operation, {SORT}):
        _sort_in_opposite_order(op)
    _MOVES.apply(module.operation)
    for op in ops_named(module.operation, {RESHAPE}):
        _as_copies(op)
    for op in reversed(ops_named(module.operation, {REVERSE})):
        if not has_uses(op.results[0]):
            op.erase()


_MOVES = Patterns()


# scatter(x, constants, u) of one window within x, which overwrites or combines by one op
#   -> dynamic_update_slice(x, u, constants), dynamic_update_slice(x, slice(x) + u, constants)
@_MOVES.on(SCATTER)
def _write_update(op: ir.Operation, build: Builder) -> ir.Value | None:
    numbers = scatter_numbers(op)
    index = fold_value(op.operands[1]) if len(op.results) == 1 else None
    if index is None or index.ndim != 1 or numbers.index_vector != 0 or numbers.operand_batching:
        return None
    operand, _, update = op.operands
    whole = shape_of(operand)
    sizes = [1] * len(whole)
    windows = numbers.window_dims(len(whole))
    for dim, update_dim in zip(windows, numbers.windows, strict=True):
        sizes[dim] = shape_of(update)[update_dim]
    starts = [0] * len(whole)
    for dim, start in zip(numbers.index_map, index.tolist(), strict=True):
        starts[dim] = int(start)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if min(starts, default=0) < 0 or any(end > n for end, n in zip(ends, whole, strict=True)):
        return None  # a scatter drops such a window, an update would clamp it
    block = Combining(op).combiner
    only = [inner.operation for inner in block.operations]
    overwrites = len(only) == 1 and list(only[0].operands) == [block.arguments[1]]
    reducer = None if overwrites else reducer_kind(block)
    in_order = list(numbers.windows) == sorted(numbers.windows)
    if not (overwrites or reducer) or not in_order:
        return None
    rows = build.reshape(update, sizes) if shape_of(update) != sizes else update
    if reducer:
        rows = build.same(reducer, build.slice(operand, starts, ends), rows)
    return build.update(operand, rows, [build.i32(start) for start in starts])


# slice(reverse(x)) -> reverse(slice(x)), so that fewer rows move
@_MOVES.on(SLICE)
def _slice_first(op: ir.Operation, build: Builder) -> ir.Value | None:
    reverse = producer(op.operands[0])
    if reverse is None or reverse.name != REVERSE or set(integers(op, "strides")) - {1}:
        return None
    source, shape = reverse.operands[0], shape_of(op.operands[0])
    starts, limits = (list(integers(op, name)) for name in ("start_indices", "limit_indices"))
    for dim in integers(reverse, "dimensions"):
        starts[dim], limits[dim] = shape[dim] - limits[dim], shape[dim] - starts[dim]
    rows = build.slice(source, starts, limits)
    return build.op("reverse", [rows], rows.type, dimensions=reverse.attributes["dimensions"])


# gather(x, constants) of one window -> slice(x), reshaped if the window lacks dimensions
@_MOVES.on(GATHER)
def _write_slice(op: ir.Operation, build: Builder) -> ir.Value | None:
    numbers = gather_numbers(op)
    index = fold_value(op.operands[1])
    if index is None or index.ndim != 1 or numbers.index_vector != 0 or numbers.operand_batching:
        return None
    whole, sizes = shape_of(op.operands[0]), integers(op, "slice_sizes")
    starts = [0] * len(whole)
    for dim, start in zip(numbers.index_map, index.tolist(), strict=True):
        starts[dim] = min(max(int(start), 0), whole[dim] - sizes[dim])  # as a gather clamps it
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    window = build.slice(op.operands[0], starts, ends)
    shape = shape_of(op.results[0])
    return build.reshape(window, shape) if shape != shape_of(window) else window


# slice, concatenate, pad, … of values with one and the same element -> broadcast(element)
@_MOVES.on(SLICE, CONCATENATE, PAD, TRANSPOSE, REVERSE, RESHAPE, DYNAMIC_SLICE)
def _write_splat(op: ir.Operation, build: Builder) -> ir.Value | None:
    moved = list(op.operands)[:1] if op.name == DYNAMIC_SLICE else list(op.operands)
    elements = {_element_of_splat(value) for value in moved}
    element, shapes = elements.pop(), static_shapes(op.results)
    if elements or element is None or not shapes or not shapes[0]:
        return None
    if isinstance(element, ir.Attribute):
        scalar = build.tensor([], element_of(op.results[0]))
        value = ir.DenseElementsAttr.get_splat(scalar, element)
        element = build.op("constant", [], scalar, value=value)
    return build.broadcast(element, shapes[0], [])


def _element_of_splat(value: ir.Value) -> ir.Value | ir.Attribute | None:
    """Returns the element that all elements of a value equal: its attribute, or a scalar value."""
    maker = producer(value)
    if maker is not None and maker.name == BROADCAST and not shape_of(maker.operands[0]):
        value = maker.operands[0]
        maker = producer(value)
    if maker is not None and maker.name in CONSTANTS:
        return splat_element(maker)
    return value if not shape_of(value) else None


def _as_copies(op: ir.Operation) -> None:
    """Rewrites a reshape that merges a broadcast dimension with a neighbouring dimension of
    size 1."""
    spread = producer(op.operands[0])
    if spread is None or spread.name != BROADCAST:
        return
    value = spread.operands[0]
    shape, wide, made = shape_of(value), shape_of(spread.results[0]), shape_of(op.results[0])
    if len(wide) != len(shape) + 1 or len(made) != len(shape):
        return
    kept = list(integers(spread, "broadcast_dimensions"))
    (new,) = set(range(len(wide))) - set(kept)
    copies = wide[new]
    dims = [d for d in range(len(shape)) if shape[d] == 1 and kept[d] in (new - 1, new + 1)]
    for dim in dims:
        joined = [copies if d == dim else n for d, n in enumerate(shape)]
        alike = kept == sorted(kept) and [wide[d] for d in kept] == shape
        if alike and joined == made and 0 < copies <= _MOST_COPIES:
            build = Builder(ir.InsertionPoint(op), op.location)
            result = value if copies == 1 else build.concatenate([value] * copies, dim)
            replace(op, [result])
            if not has_uses(spread.results[0]):
                spread.erase()
            return


def reduce_from_identities(module: ir.Module) -> None:
    """Starts reduces and windows from the identity, if their initial value must be counted only
    once.

        %s = stablehlo.reduce(%x init: %five) applies stablehlo.add
    ==>
        %r = stablehlo.reduce(%x init: %identity) applies stablehlo.add
        %s = stablehlo.add %r, %five

    Devices can then reduce their parts. XLA would compute another reduce wrongly: its simplifier
    splits a reduce of a concatenation, which partitioning writes, and counts the initial value in
    each piece. XLA:CPU does not pad around windows, but partitioning pads with the initial value.
    """
    for op in ops_named(module.operation, {REDUCE, REDUCE_WINDOW}):
        kinds = reducer_kinds(Combining(op).combiner)
        if kinds is None or static_shapes(op.results) is None:
            continue
        # Keep initial values that may be counted any number of times.
        if IDEMPOTENT.issuperset(kinds) if op.name == REDUCE_WINDOW else starts_idempotent(op):
            continue
        for position, (result, kind) in enumerate(zip(op.results, kinds, strict=True), len(kinds)):
            start = op.operands[position]
            element = element_of(start)
            is_complex = isinstance(element, ir.ComplexType)
            identity = complex_identity(kind) if is_complex else identity_of(kind, element)
            if identity is None or is_identity_of(kind, start):
                continue
            build = Builder(ir.InsertionPoint(op), op.location)
            op.operands[position] = build.splat(identity, [], element)
            build = Builder(ir.InsertionPoint.after(op), op.location)
            spread = build.broadcast(start, shape_of(result), [])
            stand_in(result, build.same(kind, result, spread))


def insert_indexed_dims(module: ir.Module) -> None:
    """Inserts indexed dimensions of scatters, in place. A scatter stays if a window has more than
    one and less than all elements of an indexed dimension.

        scatter of windows [1, 1024] into [V, 1024], by two indices (jax.vmap of an embedding)
    ==>
        scatter of windows [1024], its first dimension inserted, by the first index; if the second
        is not 0, the first becomes -1

    XLA:TPU runs a scatter row by row if its windows have an indexed dimension: in a loop of five
    kernels, for any type, reducer and number of indices (libtpu 0.0.51). Besides, an inserted
    dimension can be divided in cases in which a dimension of the windows cannot.
    """
    for op in ops_named(module.operation, {SCATTER}):
        _insert(op)


def _insert(op: ir.Operation) -> None:
    numbers, count = scatter_numbers(op), len(op.results)
    whole, update = shape_of(op.operands[0]), shape_of(op.operands[count + 1])
    windows = numbers.window_dims(len(whole))
    # Maps window dimensions of the operand to dimensions of the updates.
    places = dict(zip(windows, numbers.windows, strict=True))
    indexed = [dim for dim in numbers.index_map if dim in places]
    ones = [dim for dim in indexed if update[places[dim]] == 1]
    full = [dim for dim in indexed if dim not in ones and update[places[dim]] == whole[dim]]
    element = element_of(op.operands[count])
    is_signed = isinstance(element, ir.IntegerType) and not element.is_unsigned
    if not indexed or len(ones) + len(full) < len(indexed) or (full and not is_signed):
        return
    if len(full) == len(numbers.index_map):
        return  # no component is left that could mark a window as out of bounds
    build = Builder(ir.InsertionPoint(op), op.location)
    kept = [dim for dim in numbers.index_map if dim not in full]
    if full:
        components = [n for n, dim in enumerate(numbers.index_map) if dim in kept]
        op.operands[count] = _only(build, op.operands[count], numbers.index_vector, components)
        for flag in ("indices_are_sorted", "unique_indices"):
            if flag in op.attributes:
                op.attributes[flag] = ir.BoolAttr.get(False, op.context)
    gone = {places[dim] for dim in ones}
    rows = [size for at, size in enumerate(update) if at not in gone]
    if ones:
        for position in range(count + 1, 2 * count + 1):
            op.operands[position] = build.reshape(op.operands[position], rows)
    left = [at for at in numbers.windows if at not in gone]
    op.attributes["scatter_dimension_numbers"] = bindings.ScatterDimensionNumbers.get(
        [at - sum(each < at for each in gone) for at in left],
        sorted([*numbers.omitted, *ones]),
        list(numbers.operand_batching),
        list(numbers.indices_batching),
        kept,
        numbers.index_vector,
        context=op.context,
    )


def select_components(build: Builder, indices: ir.Value, dim: int, kept: Sequence[int]) -> ir.Value:
    """Returns these components of indices; dimension `dim` holds the index vectors."""
    op = producer(indices)
    is_joined = op is not None and op.name == CONCATENATE and integer(op, "dimension") == dim
    if op is not None and is_joined and len(op.operands) == shape_of(indices)[dim]:
        parts = [op.operands[n] for n in kept]
    else:
        parts = [build.slice_along(indices, dim, n, n + 1) for n in kept]
    return parts[0] if len(parts) == 1 else build.concatenate(parts, dim)


def _only(build: Builder, indices: ir.Value, dim: int, kept: Sequence[int]) -> ir.Value:
    """Returns these components of indices. If another component of an index is not 0, all become
    -1, which is out of bounds."""
    shape = shape_of(indices)
    taken = select_components(build, indices, dim, kept)
    starts: ir.Value | None = None
    for component in range(shape[dim]):
        if component not in kept:
            part = build.slice_along(indices, dim, component, component + 1)
            is_start = build.compare("EQ", part, build.splat_like(0, part))
            starts = is_start if starts is None else build.same("and", starts, is_start)
    assert starts is not None, "a component is left out"
    if len(kept) > 1:
        starts = build.broadcast(starts, shape_of(taken), list(range(len(shape))))
    return build.same("select", starts, taken, build.splat_like(-1, taken))


def batch_rows(module: ir.Module) -> None:
    """Turns iotas in the indices of a module's gathers and scatters into batching dimensions.

        %i = concatenate of iota dim = 0 : 64x512x1 and %p : 64x512x1  (c[arange(64)[:, None], p])
        gather(%c, %i) start_index_map = [0, 1]
    ==>
        gather(%c, %p) start_index_map = [1], operand_batching_dims = [0],
                       start_indices_batching_dims = [0]

    Devices that have the same rows of operand and indices then need no other elements. An iota is
    in range, so that clamped starts and dropped updates do not change. If no component of the index
    is left (c[arange(64)]), a component of zeros replaces it, for a dimension whose slices are
    whole.
    """
    known = DeviceValues(module, ModuleFacts.from_module(module, []))
    rewrite_rows(module.operation, partial(_add_batching_dims, known))


def _add_batching_dims(
    known: DeviceValues, op: ir.Operation, rows: IndexedNumbers
) -> IndexedNumbers:
    indices, whole, vector = op.operands[1], shape_of(op.operands[0]), rows.index_vector
    if vector == len(shape_of(indices)):
        return rows
    sliced = shape_of(op.results[0] if op.name == GATHER else op.operands[2])
    taken = rows.window_dims(len(whole))
    full = [d for d, at in zip(taken, rows.windows, strict=True) if sliced[at] == whole[d]]
    pairs: dict[int, int] = dict(zip(rows.operand_batching, rows.indices_batching, strict=True))
    kept: list[int] = []
    for component, dim in enumerate(rows.index_map):
        is_last = not kept and not full and component == len(rows.index_map) - 1
        along = _iota_dim(known, indices, vector, component, whole[dim])
        if along in (None, vector, *pairs.values()) or dim not in rows.omitted or is_last:
            kept.append(component)
        else:
            pairs[dim] = along
    if len(kept) == len(rows.index_map):
        return rows
    build = Builder(ir.InsertionPoint(op), op.location)
    if kept:
        op.operands[1] = select_components(build, indices, vector, kept)
    else:
        shape = shape_of(indices)
        shape[vector] = 1
        op.operands[1] = build.splat(0, shape, element_of(indices))
    if "indices_are_sorted" in op.attributes:  # by all components
        op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    return rows._replace(
        omitted=tuple(dim for dim in rows.omitted if dim not in pairs),
        operand_batching=tuple(sorted(pairs)),
        indices_batching=tuple(pairs[dim] for dim in sorted(pairs)),
        index_map=tuple(rows.index_map[component] for component in kept) or (full[0],),
    )


def _iota_dim(
    known: DeviceValues, indices: ir.Value, dim: int, component: int, size: int
) -> int | None:
    """Returns the dimension along which a component of indices counts from 0 to `size` - 1; None
    for any other component. Index vectors are along `dim`."""
    op = producer(indices)
    if op is not None and op.name == "stablehlo.clamp":
        low, high = (known.known_tensor(op.operands[n]) for n in (0, 2))
        if low is None or high is None or (low > 0).any():
            return None
        if (high.take(component, 1 + dim) if high.ndim > 1 else high).min() < size - 1:
            return None
        return _iota_dim(known, op.operands[1], dim, component, size)
    if op is None or op.name != CONCATENATE or integer(op, "dimension") != dim:
        numbers = known.known_tensor(indices)
        return None if numbers is None else _along(numbers.take([component], 1 + dim), size)
    ends = np.cumsum([shape_of(piece)[dim] for piece in op.operands])
    piece = op.operands[int(np.searchsorted(ends, component, "right"))]
    places = list(range(len(shape_of(piece))))
    maker = producer(piece)
    while maker is not None and maker.name == BROADCAST:
        places = [places[place] for place in integers(maker, "broadcast_dimensions")]
        piece = maker.operands[0]
        maker = producer(piece)
    numbers = known.known_tensor(piece)
    along = None if numbers is None else _along(numbers, size)
    return None if along is None else places[along]


def _along(numbers: Values, size: int) -> int | None:
    """Returns the dimension along which numbers count from 0 to `size` - 1, the same on all
    devices."""
    shape = numbers.shape[1:]
    for dim, length in enumerate(shape):
        row = np.arange(size).reshape([size if d == dim else 1 for d in range(len(shape))])
        if length == size > 1 and len(numbers) == 1 and (numbers[0] == row).all():
            return dim
    return None
