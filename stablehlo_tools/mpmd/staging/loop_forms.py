"""Rewrites the carries of the loop over microbatches into the forms that later steps recognise.

    %b = stablehlo.convert %a : tensor<f32>                  ==>  %a
    %b = select(%p, add(%a, %x), %a)                         ==>  add(%a, select(%p, %x, zeros))
    %j = reshape(dynamic_slice(iota, %i))                    ==>  %i
    reduce(%rows) by add, of %b = update(%rows, %x, %i)      ==>  %b = add(%a, %x)
    %b = scatter(%a, [%i], %row) that overwrites             ==>  dynamic_update_slice(%a, %row, %i)

jax writes the first for a weakly typed number, the third in a scan over `jnp.arange(n)`, and the
last for `losses.at[i].set(loss)`. The second, where %a is a carry, skips microbatches whose
gradients are not finite. The fourth is for gradients that a scan returns and a later sum adds up: a
rank would hold those of all microbatches. A scatter drops rows that are out of bounds, while a
slice clamps its index. So the third and the last are rewritten only if %i is known to be in bounds
in every iteration.

It also moves recurrences between iterations that do not depend on the work on microbatches before
the loop. Examples are a random key that is split in every iteration, or a rate.

    while(%i, %key, %sum) { %next, %own = split(%key)   … dropout(%own) … }
  ==>
    %keys = while(%j, %key, %keys) { … %keys[%j] = %key …  %next, %own = split(%key) … }
    while(%i, %key, %sum) { %own = split(%keys[%i]) … }

Stacks from outside the loop over microbatches that loops over layers read by rows become carries.
"""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import LoopCarries, is_accumulated
from stablehlo_tools.analysis.loop_values import LoopIndices
from stablehlo_tools.analysis.loops import (
    LoopBody,
    constant_trips,
    is_integer_scalar,
    known_integer,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import scatter_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    ADD,
    BROADCAST,
    CONCATENATE,
    CONVERT,
    DYNAMIC_SLICE,
    IOTA,
    REDUCE,
    RESHAPE,
    SCATTER,
    SELECT,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import add_carries
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import producer, splat_of
from stablehlo_tools.ir.views import Combining, Function, While
from stablehlo_tools.ir.walk import (
    entry_function,
    functions_by_name,
    ops_named,
    ops_where,
    terminator,
    values_used_outside,
)
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.mpmd.staging.step import heavy_ops

_SPREADING = frozenset({BROADCAST, RESHAPE})


def use_plain_forms(module: ir.Module) -> None:
    """Rewrites the heavy loops of `main` with known trip counts, in place."""
    block = Function(entry_function(module)).body
    effects = Effects(functions_by_name(module))
    for loop, trips in _heavy_loops(block):
        inside = While(loop).body
        for view in list(inside.operations):
            op = view.operation
            if op.name == CONVERT and op.operands[0].type == op.results[0].type:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
        for view in list(inside.operations):
            _select_term(view.operation)
        _count_directly(loop, trips, effects)
        _rewrite_scatters(loop, trips, effects)
        _add_up_rows(loop, trips, effects)
    # `_add_up_rows` may have rebuilt a loop, so find the loops again.
    for loop, trips in _heavy_loops(block):
        _Recurrences(loop, trips, effects).rewrite()


def _heavy_loops(block: ir.Block) -> Iterator[tuple[ir.Operation, int]]:
    """Yields the loops of a block with heavy work and a known trip count, with that count."""
    for loop in [view.operation for view in block.operations if view.operation.name == WHILE]:
        trips = constant_trips(loop)
        if trips is not None and heavy_ops(loop):
            yield loop, trips


def carry_stacks(block: ir.Block) -> None:
    """Makes nested loops carry the stacks from outside that they read by rows.

    A loop over layers is cut by its carries.
    """
    for outer in [view.operation for view in block.operations if view.operation.name == WHILE]:
        for loop in ops_named(outer, {WHILE}):
            if loop != outer:
                _carry_stacks(loop)


def _carry_stacks(loop: ir.Operation) -> None:
    inside = While(loop).body
    around = set(values_used_outside(loop)) - set(loop.operands)
    slices = [view.operation for view in inside.operations if view.operation.name == DYNAMIC_SLICE]
    stacks = list(dict.fromkeys(op.operands[0] for op in slices if op.operands[0] in around))
    if not stacks:
        return
    arguments = add_carries(loop, stacks, stacks)
    end = terminator(inside)
    # Yield the argument, not the stack from outside: the new carry is invariant.
    for number, (stack, argument) in enumerate(zip(stacks, arguments, strict=True)):
        end.operands[len(end.operands) - len(stacks) + number] = argument
        for op in slices:
            if op.operands[0] == stack:
                op.operands[0] = argument


def _select_term(op: ir.Operation) -> None:
    """Selects the term that is added to a carry, instead of the sum or the carry."""
    if op.name != SELECT:
        return
    for carried, added in ((2, 1), (1, 2)):
        carry, sum_ = op.operands[carried], op.operands[added]
        add = producer(sum_)
        if add is None or add.name != ADD or len(list(sum_.uses)) != 1:
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
    """Replaces numbers that are read from 0, 1, 2, … by the index."""
    inside = While(loop).body
    reading = [
        view.operation
        for view in inside.operations
        if view.operation.name == RESHAPE and not shape_of(view.operation.results[0])
    ]
    if not reading:
        return
    body = LoopBody(loop, effects)
    indices = LoopIndices(body, trips, known_integer)
    counts = [(op, _counted_by(op, body, indices)) for op in reading]
    for op, index in counts:
        if index is not None:
            build = Builder(ir.InsertionPoint(op), op.location)
            type_ = op.results[0].type
            number = index if index.type == type_ else build.op("convert", [index], type_)
            op.results[0].replace_all_uses_with(number)
            op.erase()


def _counted_by(op: ir.Operation, body: LoopBody, indices: LoopIndices) -> ir.Value | None:
    """Returns the index that a scalar read from an iota is equal to; None for any other scalar."""
    taken = producer(op.operands[0])
    if taken is None or taken.name != DYNAMIC_SLICE or not is_integer_scalar(op.results[0].type):
        return None
    array = taken.operands[0]
    carry = body.argument_number(array)
    if carry is not None:
        if carry not in body.invariant:
            return None
        array = body.loop.operands[carry]
    maker = producer(array)
    if maker is None or maker.name != IOTA or len(shape_of(array)) != 1:
        return None
    row = indices.values_by_iteration(taken.operands[1])
    is_inside = row is not None and min(row) >= 0 and max(row) < shape_of(array)[0]
    return taken.operands[1] if is_inside else None


def _rewrite_scatters(loop: ir.Operation, trips: int, effects: Effects) -> None:
    inside = While(loop).body
    scatters = [view.operation for view in inside.operations if view.operation.name == SCATTER]
    # scatters that write one unchanged window, into an array with the window's dimensions
    writing = [
        op
        for op in scatters
        if len(op.operands) == 3
        and len(shape_of(op.operands[1])) == 1
        and terminator(Combining(op).combiner).operands[0] == Combining(op).combiner.arguments[1]
    ]
    if not writing:
        return
    indices = LoopIndices(LoopBody(loop, effects), trips, known_integer)
    places = [_places(op, indices) for op in writing]
    for op, starts in zip(writing, places, strict=True):
        if starts is not None:
            array, update = op.operands[0], op.operands[2]
            build = Builder(ir.InsertionPoint(op), op.location)
            inserted = scatter_numbers(op).omitted
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


def _places(op: ir.Operation, indices: LoopIndices) -> list[ir.Value | None] | None:
    """Returns the start of the window in each dimension, None for row 0.

    Returns None instead of a list if the window may be out of bounds.
    """
    numbers = scatter_numbers(op)
    components = _components(op.operands[1])
    array = shape_of(op.operands[0])
    if components is None or numbers.operand_batching or len(components) != len(numbers.index_map):
        return None
    starts: list[ir.Value | None] = [None] * len(array)
    window = iter(shape_of(op.operands[2]))
    sizes = [1 if dim in numbers.omitted else next(window) for dim in range(len(array))]
    for dim, start in zip(numbers.index_map, components, strict=True):
        row = indices.values_by_iteration(start)
        if row is None or min(row) < 0 or max(row) > array[dim] - sizes[dim]:
            return None
        starts[dim] = start
    return starts


def _components(index: ir.Value) -> list[ir.Value] | None:
    """Returns the scalars that form a vector; None if they are unknown."""
    maker = producer(index)
    if maker is None:
        return None
    if maker.name in _SPREADING and not shape_of(maker.operands[0]):
        return [maker.operands[0]] if shape_of(index) == [1] else None
    if maker.name != CONCATENATE:
        return None
    parts = [_components(operand) for operand in maker.operands]
    known = [part for part in parts if part is not None]
    return [one for part in known for one in part] if len(known) == len(parts) else None


def _add_up_rows(loop: ir.Operation, trips: int, effects: Effects) -> None:
    """Replaces stacks of rows that are only summed after the loop by carried sums."""
    sums_of = {n: sums for n, value in enumerate(loop.results) if (sums := _sums_of_rows(value))}
    carries = LoopCarries(LoopBody(loop, effects), trips)
    rows: dict[int, ir.Value] = {}
    for carry in sums_of:
        stack = carries.rows_written(carry)
        if stack and not stack.read and shape_of(loop.results[carry])[0] == trips:
            rows[carry] = stack.written.accesses[0].op.operands[1]
    if not rows:
        return
    build, totals = Builder(ir.InsertionPoint(loop), loop.location), [sums_of[c][0] for c in rows]
    zeros = [build.splat(0, shape_of(op.results[0]), element_of(op.results[0])) for op in totals]
    inside = While(loop).body
    add_carries(loop, zeros, zeros)
    end = terminator(inside)
    # `add_carries` has erased `loop`.
    rebuilt = end.parent
    assert rebuilt is not None, "a terminator is in an op"
    for place, (carry, row) in enumerate(rows.items(), len(end.operands) - len(rows)):
        total = inside.arguments[place]
        build = Builder(ir.InsertionPoint(end), end.location)
        added = build.convert(build.reshape(row, shape_of(total)), element_of(total))
        end.operands[place] = build.same("add", total, added)
        end.operands[carry] = inside.arguments[carry]
        for sum_ in sums_of[carry]:
            sum_.results[0].replace_all_uses_with(rebuilt.results[place])
            sum_.erase()


def _sums_of_rows(stack: ir.Value) -> list[ir.Operation]:
    """Returns the users of a stack, or of its conversion, if all add up its rows; else []."""
    users = [use.owner.operation for use in stack.uses]
    if len(users) == 1 and users[0].name == CONVERT:
        users = [use.owner.operation for use in users[0].results[0].uses]
    are_sums = all(
        op.name == REDUCE
        and len(op.operands) == 2
        and list(integers(op, "dimensions")) == [0]
        and reducer_kind(Combining(op).combiner) == "add"
        and splat_of(op.operands[1]) == 0
        for op in users
    )
    return users if are_sums else []


class _Recurrences:
    """The carries of a loop that depend only on each other and on the number of the iteration."""

    def __init__(self, loop: ir.Operation, trips: int, effects: Effects) -> None:
        self._loop, self._trips, self._effects = loop, trips, effects
        self._body = LoopBody(loop, effects)
        self._flow = Dataflow.from_block(self._body.block, opened=())
        self._communicates = classify_communication(loop.context)
        self._carry_of = {number: carry for carry, number in enumerate(self._flow.root.arguments)}

    def rewrite(self) -> None:
        """Computes them in a loop before this one, which then reads their values row by row."""
        counter = next(iter(sorted(self._body.steps)), None)
        carries = self._found()
        if not carries or counter is None:
            return
        stacks, last = self._stack(carries)
        end = terminator(self._body.block)
        build = Builder(ir.InsertionPoint.at_block_begin(self._body.block), self._loop.location)
        # the number of the iteration, from a counter
        step, start = self._body.steps[counter], self._loop.operands[counter]
        row = build.same("subtract", self._body.arguments[counter], start)
        if step != 1:
            row = build.same("divide", row, build.splat(step, [], element_of(row)))
        for carry, stack, value in zip(carries, stacks, last, strict=True):
            argument = self._body.arguments[carry]
            sizes = shape_of(argument)
            starts = [row, *[build.i32(0)] * len(sizes)]
            taken = build.reshape(build.dynamic_slice(stack, starts, [1, *sizes]), sizes)
            argument.replace_all_uses_with(taken)
            # After the replacement of its uses: the loop yields the carry unchanged.
            end.operands[carry] = argument
            self._loop.results[carry].replace_all_uses_with(value)

    def _found(self) -> list[int]:
        """Returns the largest set of carries that depend only on each other."""
        body = self._body
        carries = [
            carry
            for carry, argument in enumerate(body.arguments)
            if carry not in body.invariant
            and carry not in body.steps
            and not is_accumulated(body.ends[carry], argument)
        ]
        nodes = {carry: self._nodes([carry]) for carry in carries}
        carries = [carry for carry in carries if all(map(self._is_light, nodes[carry]))]
        known = body.invariant | body.steps.keys()
        while True:
            kept = [c for c in carries if self._read(nodes[c], c) <= known | set(carries)]
            if kept == carries:
                return carries
            carries = kept

    def _nodes(self, carries: list[int]) -> list[Node]:
        """Returns the nodes that compute the next values of carries, in order."""
        ends = [self._flow.numbers[self._body.ends[carry]] for carry in carries]
        return [self._flow.nodes[index] for index in sorted(self._flow.ancestors(ends))]

    def _read(self, nodes: list[Node], carry: int) -> set[int]:
        """Returns the carries that a next value is computed from."""
        read = {n for node in nodes for n in node.inputs}
        read.add(self._flow.numbers[self._body.ends[carry]])
        return {self._carry_of[n] for n in read if n in self._carry_of}

    def _is_light(self, node: Node) -> bool:
        if self._effects.has_effect(node.op) or heavy_ops(node.op):
            return False
        return not ops_where(node.op, lambda op: self._communicates(op) is not None)

    def _stack(self, carries: list[int]) -> tuple[list[ir.Value], list[ir.Value]]:
        """Writes a loop that stacks the values of all iterations. Returns stacks and final
        values."""
        body, operands = self._body, self._loop.operands
        nodes = self._nodes(carries)
        read = {c for carry in carries for c in self._read(nodes, carry)}
        counters = sorted(read & body.steps.keys())
        build = Builder(ir.InsertionPoint(self._loop), self._loop.location)
        empty = [
            build.splat(0, [self._trips, *shape_of(operands[c])], element_of(operands[c]))
            for c in carries
        ]
        moving = [*carries, *counters]
        start = [operands[c] for c in moving]
        loop = CountedLoop(build, build.i32(self._trips), [*start, *empty])
        values, stacks = loop.arguments[: len(moving)], loop.arguments[len(moving) :]
        stand_ins = {body.arguments[c]: operands[c] for c in sorted(body.invariant)}
        stand_ins |= {body.arguments[c]: v for c, v in zip(moving, values, strict=True)}
        inside = loop.inside
        written: list[ir.Value] = []
        for stack, value in zip(stacks, values, strict=False):
            sizes = shape_of(value)
            starts = [loop.counter, *[inside.i32(0)] * len(sizes)]
            written.append(inside.update(stack, inside.reshape(value, [1, *sizes]), starts))
        for node in self._nodes(moving):
            copy = copy_with(node.op, stand_ins, inside.point)
            stand_ins |= dict(zip(node.op.results, copy.results, strict=True))
        following = [stand_ins.get(body.ends[c], body.ends[c]) for c in moving]
        results = loop.close([*following, *written])
        return results[len(moving) :], results[: len(carries)]
