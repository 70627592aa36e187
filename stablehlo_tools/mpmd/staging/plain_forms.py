"""Puts what the loop over microbatches does with its carries into the form that is looked for.

    %b = stablehlo.convert %a : tensor<f32>                  ==>  %a
    %b = select(%p, add(%a, %x), %a)                         ==>  add(%a, select(%p, %x, zeros))
    %j = reshape(dynamic_slice(iota, %i))                    ==>  %i
    %b = scatter(%a, [%i], %row) by what is written          ==>  dynamic_update_slice(%a, %row, %i)

jax writes the first where a number is weakly typed, the third in a scan over `jnp.arange(n)`, the
last for `losses.at[i].set(loss)`. The second, where %a is a carry, leaves out microbatches whose
gradients are not finite. A scatter drops what is out of bounds, and a slice is moved back: so the
last two are rewritten only where %i is known to be inside in every iteration.
"""

from __future__ import annotations

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_values import LoopIndices
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import constant_trips, is_integer_scalar, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer
from stablehlo_tools.mpmd.staging.microbatches import heavy_ops

_WHILE = "stablehlo.while"
_ADD = "stablehlo.add"
_CONVERT = "stablehlo.convert"
_SELECT = "stablehlo.select"
_IOTA = "stablehlo.iota"
_RESHAPE = "stablehlo.reshape"
_SLICE = "stablehlo.dynamic_slice"
_SCATTER = "stablehlo.scatter"
_SPREADING = frozenset({"stablehlo.broadcast_in_dim", _RESHAPE})
_CONCATENATE = "stablehlo.concatenate"


def use_plain_forms(block: ir.Block, effects: Effects) -> None:
    """Rewrites the heavy loops of a block that run a known number of times, in place."""
    for loop in [view.operation for view in block.operations if view.operation.name == _WHILE]:
        trips = constant_trips(loop)
        if trips is None or not heavy_ops(loop):
            continue
        inside = loop.regions[1].blocks[0]
        for view in list(inside.operations):
            _drop_conversion(view.operation)
        for view in list(inside.operations):
            _select_term(view.operation)
        _count_directly(loop, trips, effects)
        _rewrite_scatters(loop, trips, effects)


def _drop_conversion(op: ir.Operation) -> None:
    if op.name == _CONVERT and op.operands[0].type == op.results[0].type:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _select_term(op: ir.Operation) -> None:
    """Selects what is added to a carry, rather than the sum or the carry."""
    if op.name != _SELECT:
        return
    for carried, added in ((2, 1), (1, 2)):
        carry, sum_ = op.operands[carried], op.operands[added]
        add = producer(sum_)
        if add is None or add.name != _ADD or len(list(sum_.uses)) != 1:
            continue
        if not isinstance(carry, ir.BlockArgument) or list(add.operands).count(carry) != 1:
            continue
        term = add.operands[1] if add.operands[0] == carry else add.operands[0]
        build = Builder(ir.InsertionPoint(op), op.location)
        nothing = build.splat(0, shape_of(term), element_of(term))
        sides = (term, nothing) if added == 1 else (nothing, term)
        chosen = build.op("select", [op.operands[0], *sides], term.type)
        op.results[0].replace_all_uses_with(build.same("add", carry, chosen))
        op.erase()
        add.erase()
        return


def _count_directly(loop: ir.Operation, trips: int, effects: Effects) -> None:
    """Reads numbers off the index by which they are read out of 0, 1, 2, …"""
    inside = loop.regions[1].blocks[0]
    reading = [
        view.operation
        for view in inside.operations
        if view.operation.name == _RESHAPE and not shape_of(view.operation.results[0])
    ]
    if not reading:
        return
    body = LoopBody(loop, effects)
    indices = LoopIndices(body, trips, known_integer)
    found = [(op, _counted_by(op, body, indices)) for op in reading]
    for op, index in found:
        if index is not None:
            build = Builder(ir.InsertionPoint(op), op.location)
            kind = op.results[0].type
            number = index if index.type == kind else build.op("convert", [index], kind)
            op.results[0].replace_all_uses_with(number)
            op.erase()


def _counted_by(op: ir.Operation, body: LoopBody, indices: LoopIndices) -> ir.Value | None:
    """The index that a scalar read out of an iota is equal to; None for any other scalar."""
    taken = producer(op.operands[0])
    if taken is None or taken.name != _SLICE or not is_integer_scalar(op.results[0].type):
        return None
    array = taken.operands[0]
    carry = body.argument_number(array)
    if carry is not None:
        if carry not in body.invariant:
            return None
        array = body.loop.operands[carry]
    maker = producer(array)
    if maker is None or maker.name != _IOTA or len(shape_of(array)) != 1:
        return None
    row = indices.of(taken.operands[1])
    is_inside = row is not None and min(row) >= 0 and max(row) < shape_of(array)[0]
    return taken.operands[1] if is_inside else None


def _rewrite_scatters(loop: ir.Operation, trips: int, effects: Effects) -> None:
    inside = loop.regions[1].blocks[0]
    scatters = [view.operation for view in inside.operations if view.operation.name == _SCATTER]
    writing = [op for op in scatters if _replaces(op)]
    if not writing:
        return
    indices = LoopIndices(LoopBody(loop, effects), trips, known_integer)
    places = [_places(op, indices) for op in writing]
    for op, starts in zip(writing, places, strict=True):
        if starts is not None:
            _as_slice(op, starts)


def _replaces(op: ir.Operation) -> bool:
    """Whether a scatter writes one window as it is, into an array that has the window's dims."""
    if len(op.operands) != 3 or len(shape_of(op.operands[1])) != 1:
        return False
    block = op.regions[0].blocks[0]
    return terminator(block).operands[0] == block.arguments[1]


def _places(op: ir.Operation, indices: LoopIndices) -> list[ir.Value | None] | None:
    """Where the window begins in each dimension, None for the first row; None where it may be out
    of bounds."""
    numbers = _Numbers(op)
    found = _components(op.operands[1])
    array = shape_of(op.operands[0])
    if found is None or numbers.batching or len(found) != len(numbers.scattered):
        return None
    starts: list[ir.Value | None] = [None] * len(array)
    window = iter(shape_of(op.operands[2]))
    sizes = [1 if dim in numbers.inserted else next(window) for dim in range(len(array))]
    for dim, start in zip(numbers.scattered, found, strict=True):
        row = indices.of(start)
        if row is None or min(row) < 0 or max(row) > array[dim] - sizes[dim]:
            return None
        starts[dim] = start
    return starts


class _Numbers:
    """The dimension numbers of a scatter, as far as they matter for a single window."""

    def __init__(self, op: ir.Operation) -> None:
        text = str(op.attributes["scatter_dimension_numbers"])
        self.inserted = _listed(text, "inserted_window_dims")
        self.scattered = _listed(text, "scatter_dims_to_operand_dims")
        self.batching = _listed(text, "input_batching_dims")


def _listed(text: str, name: str) -> list[int]:
    _, found, rest = text.partition(f"{name} = [")
    listed = rest.partition("]")[0] if found else ""
    return [int(number) for number in listed.split(",") if number.strip()]


def _components(index: ir.Value) -> list[ir.Value] | None:
    """The scalars that a vector is put together of."""
    maker = producer(index)
    if maker is None:
        return None
    if maker.name in _SPREADING and not shape_of(maker.operands[0]):
        return [maker.operands[0]] if shape_of(index) == [1] else None
    if maker.name != _CONCATENATE:
        return None
    found = [_components(operand) for operand in maker.operands]
    known = [part for part in found if part is not None]
    return [one for part in known for one in part] if len(known) == len(found) else None


def _as_slice(op: ir.Operation, starts: list[ir.Value | None]) -> None:
    array, update = op.operands[0], op.operands[2]
    build = Builder(ir.InsertionPoint(op), op.location)
    inserted = _Numbers(op).inserted
    window = iter(shape_of(update))
    sizes = [1 if dim in inserted else next(window) for dim in range(len(starts))]
    given = next(start for start in starts if start is not None)
    zero = build.splat(0, [], ir.RankedTensorType(given.type).element_type)
    placed = [zero if start is None else start for start in starts]
    written = build.op(
        "dynamic_update_slice", [array, build.reshape(update, sizes), *placed], array.type
    )
    op.results[0].replace_all_uses_with(written)
    op.erase()
