"""Sinks collectives whose results are rows of a buffer: one collective of all rows, after the loop.

    %y = "stablehlo.all_reduce"(%x)                                   // tensor<8x128xf32>
    %row = stablehlo.reshape %y                                       // tensor<1x8x128xf32>
    %next = stablehlo.dynamic_update_slice %rows, %row, %i, %0, %0    // of tensor<3x8x128xf32>
  ==>
    %next = stablehlo.dynamic_update_slice %all_x, %x_row, %i, %0, %0
  and after the loop
    %rows = "stablehlo.all_reduce"(%all_x)                            // tensor<3x8x128xf32>

For that, every row must be written once. In a higher buffer the written rows must be adjacent: they
are written into it after the collective, and its other rows do not change. Values are bitwise the
same, except for sums of floats that a compiler may re-associate for a larger operand.

The collectives, and the ops between them and the buffer, then run on one row for each iteration,
stacked along a new first dimension (`run_stacked`). Their attributes have to count that dimension:

    %y = stablehlo.transpose %x, dims = [0, 2, 1]             // tensor<1x8x128>, of one iteration
  ==>
    %y = stablehlo.transpose %x, dims = [0, 1, 3, 2]          // tensor<3x1x8x128>, of all three

Sums that a loop accumulates in the rows of a buffer (`row_sum`) are also reduced on all rows after
it. The ranks of a pipeline add a chunk's gradients to the chunk's row. In ticks without work of
their own (`%valid` is false) they write the row back unchanged:

    %old = stablehlo.dynamic_slice %sums, %row            // in the loop
    %g = "stablehlo.all_reduce"(%x)
    %new = stablehlo.add %old, %g
    %put = stablehlo.select %valid, %new, %old
    %next = stablehlo.dynamic_update_slice %sums, %put, %row
  ==>
    %old = stablehlo.dynamic_slice %local, %row           // in the loop, from zero
    %new = stablehlo.add %old, %x
    %put = stablehlo.select %valid, %new, %old
    %next = stablehlo.dynamic_update_slice %local, %put, %row

    %g = "stablehlo.all_reduce"(%local_at_the_end)        // after it, all rows at once
    %total = stablehlo.add %sums_at_the_start, %g

The chain from the collective to the sum must be linear, as for sums of whole carries (`sums`, which
has the bound of the rounding). Rows may be written in any order, several times or never, and the
loop may run any number of times. But `%row` and `%valid` must be the same on all devices of a
group: otherwise a term that one device leaves out would be missing on the others. They are traced
to constants, loop counters and values that are known for each device before the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loop_carries import AddedRow, added_row
from stablehlo_tools.analysis.loop_values import AlikeInGroups, LoopIndices, is_monotonic
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    REDUCE,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.dialect.traits import COLLECTIVES, ELEMENTWISE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.clone import emptied_clone, reshaped_clone
from stablehlo_tools.ir.values import describe_op, key_of, maker_of
from stablehlo_tools.ir.walk import values_used
from stablehlo_tools.transforms.parts.bucket_collectives.merged_writing import reshape_if_needed
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import OpenedLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    has_sharding,
    is_static_tensor,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sums import (
    ChainOp,
    chain_from,
    takes_number,
    why_not_linear,
)


@dataclass(frozen=True)
class RowStore:
    """A `dynamic_update_slice` that writes one row of a carry; `rows` are the rows by iteration."""

    op: ir.Operation
    carry: int
    rows: tuple[int, ...]

    @property
    def first(self) -> int:
        """The lowest row that is written; the rows of all other iterations follow it."""
        return min(self.rows)


@dataclass(frozen=True, eq=False)
class StackedOps:
    """`ops` that run after the loop on the stacked rows of `read`, and `stores` of their
    results."""

    trips: int
    ops: Sequence[ir.Operation]
    stores: Sequence[RowStore]
    read: Sequence[ir.Value]  # the operands that differ from iteration to iteration


def plan_stacking(
    body: LoopBody, dependents: Sequence[ir.Operation], indices: LoopIndices, trips: int | None
) -> StackedOps | str:
    """Plans to run collectives, with all their dependents, on the rows of all iterations.

    Returns the reason if they cannot.
    """
    if trips is None:
        return "the trip count of the loop is unknown"
    if not trips:
        return "the loop never runs"
    made: set[ir.Value] = {value for op in dependents for value in op.results}
    stores: list[RowStore] = []
    ops: list[ir.Operation] = []
    for op in dependents:
        if op.name == DYNAMIC_UPDATE_SLICE:
            store = _store(body, op, indices, trips)
            if isinstance(store, str):
                return store
            stores.append(store)
            continue
        reason = _why_not(body, op, made)
        if reason:
            return reason
        ops.append(op)
    if not stores:
        return "the loop does not carry its result"
    other = next((store for store in stores if store.rows != stores[0].rows), None)
    if other is not None:
        return f"the {describe_op(other.op)} writes other rows than the {describe_op(stores[0].op)}"
    read = [value for op in ops for value in body.reads(op) if value not in made]
    moving = [v for v in dict.fromkeys(read) if body.is_moving(v) or not body.is_indexed(v)]
    stranger = next((value for value in moving if not is_static_tensor(value.type)), None)
    if stranger is not None:
        return f"a {stranger.type} of each iteration cannot be stacked"
    return StackedOps(trips, ops, stores, moving)


def _why_not(body: LoopBody, op: ir.Operation, made: set[ir.Value]) -> str | None:
    """Says why an op cannot run on stacked rows; None if it can.

    `made`: the values that depend on the collective.
    """
    if body.is_costly(op):
        return f"the {describe_op(op)} needs its result"
    carried = [n for value in op.results for n in body.carries_of(value)]
    if carried:
        return f"the next iteration reads its result, carry {carried[0]}"
    if not has_rule(op) or has_sharding(op):
        return f"the {describe_op(op)} needs its result and cannot run on stacked values"
    if body.communicates(op) and len(op.operands) != 1:
        return f"the {describe_op(op)} has several operands"
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return f"the {describe_op(op)} has a value without a static shape"
    fixed = [op.operands[i] for i in parameters_of(op)] + captured_by(body, op)
    if any(v in made or body.is_moving(v) or not body.is_indexed(v) for v in fixed):
        return f"the {describe_op(op)} has a parameter that changes in the loop"
    return None


def _store(body: LoopBody, op: ir.Operation, indices: LoopIndices, trips: int) -> RowStore | str:
    """Returns the store of an update that writes one row of its own buffer in each iteration.

    Returns the reason if it does not.
    """
    buffer = op.operands[0]
    first = op.operands[2] if len(op.operands) > 2 else None
    carry = body.argument_number(buffer)
    if carry is None:
        return f"the {describe_op(op)} writes into the result of another op"
    if body.carries_of(op.results[0]) != [carry] or body.users.get(op.results[0]):
        return f"the result of the {describe_op(op)} is not just the next value of carry {carry}"
    users = body.users.get(buffer, [])
    if len(users) > 1:
        other = next(user for user in users if key_of(user) != key_of(op))
        return f"the buffer, carry {carry}, is also read by the {describe_op(other)}"
    if body.carries_of(buffer) or list(op.operands).count(buffer) > 1:
        return f"the buffer, carry {carry}, is read more than once"
    if body.is_read_by_condition(carry):
        return f"the condition reads the buffer, carry {carry}"
    if not is_static_tensor(buffer.type) or first is None:
        return f"the {describe_op(op)} writes into a buffer without dimensions of a known size"
    whole, part = shape_of(op.operands[0]), shape_of(op.operands[1])
    if part != [1, *whole[1:]]:
        return f"the {describe_op(op)} does not write one whole row of the first dimension"
    rows = indices.values_by_iteration(first) if body.is_indexed(first) else None
    if rows is None:
        return f"the rows that the {describe_op(op)} writes are not known before the run"
    low = min(rows)
    inside = low >= 0 and low + trips <= whole[0]
    if not inside or sorted(rows) != list(range(low, low + trips)) or not is_monotonic(rows):
        return f"the {describe_op(op)} does not write the rows one after the other"
    return RowStore(op, carry, tuple(rows))


class RowsWriter:
    """Stacks the operands of the ops in rows, in the order of the stores, and runs the ops on the
    stack."""

    def __init__(self, body: LoopBody, plan: StackedOps) -> None:
        self._body = body
        self._plan = plan
        self.dead = [store.carry for store in plan.stores]
        self.removed = [*plan.ops, *(store.op for store in plan.stores)]
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves a buffer for each stacked value; reuses dead buffers first."""
        for value in self._plan.read:
            shape = [self._plan.trips, *_row(value)[1:]]
            type_ = ir.RankedTensorType.get(shape, element_of(value), loc=self._body.loop.location)
            number = opened.carry_of_rows(value, self._plan.stores[0].rows, type_)
            self._numbers.append(number)

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes rows in the body, and the ops and stores after the loop."""
        trips = self._plan.trips
        known: dict[ir.Value, ir.Value] = {}
        for number, value in zip(self._numbers, self._plan.read, strict=True):
            if not opened.is_handed_on(number):
                opened.hand_on(number, self._with_row(opened, number, value))
            builder = opened.behind(opened.new.location)
            whole = [trips, *shape_of(value)]
            known[value] = reshape_if_needed(builder, opened.result(number), whole)
        collectives: list[ir.Operation] = []
        for op in self._plan.ops:
            read = [
                (known[value], True) if value in known else (opened.after.get(value, 0), False)
                for value in op.operands
            ]
            captured = {v: opened.after.get(v, 0) for v in captured_by(self._body, op)}
            results = run_stacked(op, trips, read, captured, opened.point)
            known.update(zip(op.results, results, strict=True))
            if self._body.communicates(op):
                collectives.append(maker_of(known[op.results[0]]))
        buffers: dict[int, ir.Value] = {}
        for store in self._plan.stores:
            builder = opened.behind(store.op.location)
            whole = shape_of(store.op.results[0])
            rows = reshape_if_needed(builder, known[store.op.operands[1]], [trips, *whole[1:]])
            if whole[0] != trips:
                index = element_of(store.op.operands[2])
                places = (store.first, *[0] * (len(whole) - 1))
                starts = [builder.splat(n, [], index) for n in places]
                rows = builder.update(self._body.loop.operands[store.carry], rows, starts)
            buffers[store.carry] = rows
        return buffers, collectives

    def _with_row(self, opened: OpenedLoop, number: int, value: ir.Value) -> ir.Value:
        """Writes this iteration's value into its row of a buffer."""
        store = self._plan.stores[0]
        builder = Builder(opened.inside, store.op.location)
        row = reshape_if_needed(builder, value, _row(value))
        first = store.op.operands[2]
        if store.first:
            lowest = builder.splat(store.first, [], element_of(first))
            first = builder.op("subtract", [first, lowest], first.type)
        rest = len(_row(value)) - 1
        starts = [first] + [builder.splat(0, [], element_of(first))] * rest
        buffer = opened.argument(number)
        return builder.update(buffer, row, starts)


def _row(value: ir.Value) -> Sequence[int]:
    """Returns the shape of a value as one row: with a first dimension of size 1."""
    shape = shape_of(value)
    return shape if shape[:1] == [1] else [1, *shape]


# Sharding constraints are excluded: one would have to say how the new dimension is sharded.
_STACKABLE = ELEMENTWISE | COLLECTIVES | {REDUCE} | (FORMATTING - {SHARDING_CONSTRAINT})

# Attributes that refer to dimensions: by one number, by some numbers, by one number for each
# dimension of the operand, or by one entry for each (with its value for the new first dimension).
_ONE_DIMENSION = frozenset(
    {"all_gather_dim", "concat_dimension", "dimension", "scatter_dimension", "split_dimension"}
)
_DIMENSIONS = frozenset({"dimensions"})
_EVERY_DIMENSION = frozenset({"broadcast_dimensions", "permutation"})
_FOR_EACH = {
    "start_indices": 0,
    "limit_indices": None,  # as many as there are iterations
    "strides": 1,
    "edge_padding_low": 0,
    "edge_padding_high": 0,
    "interior_padding": 0,
}


def has_rule(op: ir.Operation) -> bool:
    """Returns True if an op can run on stacked rows."""
    return op.name in _STACKABLE


def parameters_of(op: ir.Operation) -> range:
    """Returns the numbers of the operands that must be the same in all iterations."""
    count = len(op.operands)
    if op.name in (PAD, DYNAMIC_SLICE):
        return range(1, count)
    return range(count // 2 if op.name == REDUCE else count, count)


def captured_by(body: LoopBody, op: ir.Operation) -> list[ir.Value]:
    """Returns the values of the loop's body that an op's region reads."""
    inner = values_used(op)[len(op.operands) :]
    return [value for value in dict.fromkeys(inner) if body.is_inside(value)]


def run_stacked(
    op: ir.Operation,
    trips: int,
    operands: Sequence[tuple[ir.Value, bool]],
    captured: Mapping[ir.Value, ir.Value],
    point: ir.InsertionPoint,
    element: ir.Type | None = None,
) -> list[ir.Value]:
    """Writes an op for all iterations, and returns its results.

    `operands`: each with True if it is stacked. `captured`: replacements for the values that its
    region captures. `element`: the operands' current element type, if it differs from the op's, for
    a sum in another type.
    """
    builder = Builder(point, op.location)
    fixed = parameters_of(op)
    shape = shape_of(op.results[0])
    given = [
        value if number in fixed else _stack_operand(op, value, is_stacked, trips, shape, builder)
        for number, (value, is_stacked) in enumerate(operands)
    ]
    if op.name == DYNAMIC_SLICE:  # the same start indices for all rows
        value, *starts = given
        if not starts:
            return [value]
        starts.insert(0, builder.splat(0, [], element_of(starts[0])))
        return [builder.dynamic_slice(value, starts, [trips, *shape])]
    types = [
        builder.tensor([trips, *shape_of(old)], element or element_of(old)) for old in op.results
    ]
    # A reducer in another element type is written new: the old region has the old types.
    if element is not None and len(op.regions):
        copy = emptied_clone(op, given, types, point, keep_shardings=True)
        write_reducer("add", element, copy.regions[0], op.location)
    else:
        copy = reshaped_clone(op, given, types, point, captured=captured)
    _count_from_next(copy, trips, builder)
    return list(copy.results)


def _stack_operand(
    op: ir.Operation,
    value: ir.Value,
    is_stacked: bool,
    trips: int,
    shape: Sequence[int],
    builder: Builder,
) -> ir.Value:
    """Returns an operand with a row for each iteration; broadcasts scalars of elementwise ops."""
    rank = len(shape_of(value)) - is_stacked
    if op.name in ELEMENTWISE and rank == 0 and len(shape):
        if not is_stacked:
            return value
        return builder.broadcast(value, [trips, *shape], [0])
    if is_stacked:
        return value
    return builder.broadcast(value, [trips, *shape_of(value)], range(1, rank + 1))


def _count_from_next(op: ir.Operation, trips: int, builder: Builder) -> None:
    """Shifts an op's attributes to tensors with one more dimension at the front."""
    for name, attribute in list(op.attributes.items()):
        if name in _ONE_DIMENSION:
            op.attributes[name] = builder.integer(ir.IntegerAttr(attribute).value + 1)
        elif name in _DIMENSIONS or name in _EVERY_DIMENSION:
            first = [0] if name in _EVERY_DIMENSION else []
            numbers = [dim + 1 for dim in ir.DenseI64ArrayAttr(attribute)]
            op.attributes[name] = builder.integers([*first, *numbers])
        elif name in _FOR_EACH:
            of_new = _FOR_EACH[name]
            first = trips if of_new is None else of_new
            op.attributes[name] = builder.integers([first, *ir.DenseI64ArrayAttr(attribute)])


@dataclass(frozen=True, eq=False)
class RowSum:
    """A collective, and the ops after it, whose result is added to a row of a carry."""

    steps: Sequence[ChainOp]
    row: AddedRow
    buffer: ir.Value

    @property
    def local(self) -> ir.Value:
        """The value that the loop accumulates instead."""
        first = self.steps[0]
        return first.op.operands[first.through]

    @property
    def rows(self) -> list[int]:
        """The sizes of the dimensions that the row indices select from."""
        return [shape_of(self.buffer)[dim] for dim in self.row.dims]

    @property
    def local_rows(self) -> ir.Type:
        """The type of the carry that replaces the buffer in the loop."""
        shape = [*self.rows, *shape_of(self.local)]
        return ir.RankedTensorType.get(
            shape, element_of(self.buffer), loc=self.steps[0].op.location
        )


def row_sum(body: LoopBody, collective: Collective, alike: AlikeInGroups) -> RowSum | str:
    """Plans to run a collective on the sums of all rows, or says why it cannot."""
    chain = chain_from(body, collective, lambda op: op.name == ADD)
    if isinstance(chain, str):
        return chain
    steps, op, value = chain
    row = added_row(body, op, value)
    if isinstance(row, str):
        return row
    buffer = body.arguments[row.carry]
    if not is_static_tensor(buffer.type):
        return f"carry {row.carry} has no static shape"
    reason = why_not_linear(body, steps, "add", element_of(buffer))
    if reason:
        return reason
    unknown = next((step.op for step in steps if not has_rule(step.op)), None)
    if unknown is not None:
        return f"the {describe_op(unknown)} cannot run on stacked values"
    valid = [] if row.valid is None else [row.valid]
    if not alike(body.loop, [step.op for step in steps], [*row.starts, *valid]):
        return "the devices of a group are not known to add to the same row"
    return RowSum(steps, row, buffer)


class RowSumWriter:
    """Accumulates the operand of the first collective, and runs the chain on all rows of the
    sums."""

    def __init__(self, body: LoopBody, plan: RowSum) -> None:
        self._body = body
        self._plan = plan
        self._element = element_of(plan.buffer)
        self.dead = [plan.row.carry]
        self.removed = [*(step.op for step in plan.steps), *plan.row.ops]
        self._where = plan.row.ops[-1].location
        self._number = -1

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves a carry for the local sums of all rows."""
        identity = identity_of("add", self._element)
        assert identity is not None, "of an accumulation that was planned"
        self._number = opened.carry(self._plan.local_rows, identity)

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the sums in the body, and the chain and the totals after the loop."""
        plan, number = self._plan, self._number
        # In the body: add this iteration's term to its row.
        row, local = plan.row, plan.local
        builder = Builder(opened.inside, self._where)
        sums = opened.argument(number)
        index = element_of(row.ops[0].operands[1])
        starts = [*row.starts, *[builder.splat(0, [], index)] * len(shape_of(local))]
        sizes = [*[1] * len(row.dims), *shape_of(local)]
        old = builder.dynamic_slice(sums, starts, sizes)
        term = reshape_if_needed(builder, builder.convert(local, self._element), sizes)
        new = builder.same("add", old, term)
        if row.valid is not None:
            new = builder.op("select", [row.valid, new, old], new.type)
        opened.hand_on(number, builder.update(sums, new, starts))
        count = prod(plan.rows)
        shape = [count, *shape_of(plan.local)]
        value = reshape_if_needed(opened.behind(self._where), opened.result(number), shape)
        collectives: list[ir.Operation] = []
        for step in plan.steps:
            if step.op.name == CONVERT:
                continue
            # An op of the chain runs on all rows, in the type of the sums.
            there = opened.behind(step.op.location)
            given: list[tuple[ir.Value, bool]] = []
            for place, operand in enumerate(step.op.operands):
                if place == step.through:
                    given.append((value, True))
                    continue
                other = opened.after.get(operand, 0)
                if takes_number(step.op):
                    other = there.convert(other, self._element)
                given.append((other, False))
            value = run_stacked(step.op, count, given, {}, opened.point, self._element)[0]
            if self._body.communicates(step.op):
                collectives.append(maker_of(value))
        builder = opened.behind(self._where)
        start = self._body.loop.operands[plan.row.carry]
        total = builder.same("add", start, reshape_if_needed(builder, value, shape_of(start)))
        return {plan.row.carry: total}, collectives
