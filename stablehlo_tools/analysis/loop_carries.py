"""Classifies the carries of a loop, and finds loops over layers by the kinds of their carries.

    counter       each iteration adds a constant to it                      `body.steps`
    invariant     every iteration yields it unchanged                       `body.invariant`
    read rows     an invariant stack: each iteration slices its own rows    `rows_read`
    written rows  a stack: each iteration updates its own rows              `rows_written`
    accumulated   each iteration adds a term to it, or writes rows that no
                  other does: iterations can run in any order, in parts     `accumulator`
    flow          anything else: an iteration needs the one before it

A scan of layers reads rows of stacked weights, writes rows of stacked outputs and carries the
activations as flows. A loop over microbatches accumulates losses and gradients. A carry can be of
several kinds: rows that are written in order are also accumulated. Each analysis and pass decides
which kinds it accepts.

A `while` that counts is a loop over layers if it slices stacked weights. Each iteration slices one
row, or a fixed number of rows, in order or in reverse. Every other carry is a counter, a constant,
a stacked result with rows that each iteration writes, or a flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_values import LoopIndices, written_positions
from stablehlo_tools.analysis.loops import Key, LoopBody, count_trips, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    SCATTER,
    SELECT,
    SHARDING_CONSTRAINT,
    SUBTRACT,
    WHILE,
)
from stablehlo_tools.dialect.reducers import REDUCERS, reducer_kind
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import describe_op, is_float, key_of, producer, skip_constraints
from stablehlo_tools.ir.views import Combining, While
from stablehlo_tools.ir.walk import enclosing, is_inside, ops_named

ROWS = "rows"  # the reducer of rows that are written
_THROUGH = frozenset({SHARDING_CONSTRAINT, CONVERT})
_ONLY_LEFT = frozenset({SUBTRACT, DYNAMIC_UPDATE_SLICE, SCATTER})


@dataclass(frozen=True)
class RowAccess:
    """A slice or an update of `count` rows, starting at row `offset` of the iteration's rows."""

    op: ir.Operation
    offset: int
    count: int = 1


@dataclass(frozen=True)
class StackRows:
    """Rows `first` to `first + span * trips` of an array, `span` of them for each iteration.

    `carry` is the array's position among the loop's operands. If `is_reverse`, the first iteration
    has the last rows.
    """

    carry: int
    first: int
    span: int
    accesses: tuple[RowAccess, ...]
    is_reverse: bool = False


class WrittenStack(NamedTuple):
    """The rows of a carry that each iteration writes, and the rows that it reads before that."""

    written: StackRows
    read: StackRows | None


@dataclass(frozen=True)
class AccumulationLink:
    """An op that reads an accumulator as its operand `place` and returns the next one."""

    op: ir.Operation
    place: int


@dataclass(frozen=True)
class Accumulator:
    """A carry that every iteration adds to, with the ops that do so, in order.

    `reducer` combines partial results: `add`, `maximum`, …; for ROWS, the parts are added to zeros.
    `replaced` is True if all rows are written, so that the carry's initial value does not matter.
    """

    carry: int
    reducer: str
    links: tuple[AccumulationLink, ...]
    replaced: bool = False


class LoopCarries:
    """The carries of a loop that runs `trips` times on every device."""

    def __init__(self, body: LoopBody, trips: int) -> None:
        self.body = body
        self.trips = trips
        self.indices = LoopIndices(body, trips, known_integer)

    def rows_read(self, carry: int) -> StackRows | None:
        """Returns the rows that slices read of a carry; None if another op reads it."""
        return self._read(carry, _users(self.body.arguments[carry]))

    def rows_written(self, carry: int) -> WrittenStack | None:
        """Returns the rows that updates write of a carry; None unless they write each row once.

        If the iteration also reads the carry, it must read the same rows, and before it writes
        them.
        """
        # The updates from a carry to its next value. Each result is read only by the next update.
        value = self.body.ends[carry]
        updates: list[ir.Operation] = []
        op = producer(value)
        while op is not None and op.name in (SHARDING_CONSTRAINT, DYNAMIC_UPDATE_SLICE):
            if op.name == DYNAMIC_UPDATE_SLICE:
                updates.append(op)
            value = op.operands[0]
            op = producer(value)
        alone = all(len(list(op.results[0].uses)) == 1 for op in updates)
        updates = updates[::-1] if alone and value == self.body.arguments[carry] else []
        written = self._rows(carry, updates)
        if written is None:
            return None
        taken = [row for a in written.accesses for row in range(a.offset, a.offset + a.count)]
        if sorted(taken) != list(range(written.span)):
            return None
        argument = self.body.arguments[carry]
        others = [(op, value) for op, value in _users(argument) if op not in updates]
        if not others:
            return WrittenStack(written, None)
        read = self._read(carry, others)
        if read is None or (read.first, read.span) != (written.first, written.span):
            return None
        return WrittenStack(written, read)

    def accumulator(self, carry: int) -> Accumulator | None:
        """Returns how a carry is accumulated; None if its iterations depend on their order."""
        links = _links(self.body.ends[carry], self.body.arguments[carry]) or []
        reducers = {reducer for link in links if (reducer := _reducer(link.op)) is not None}
        # Truncation to integers does not commute with a sum: partial sums would be truncated, too.
        converts = [link.op for link in links if link.op.name == CONVERT]
        cuts_off = any(
            is_float(c.operands[0].type) != is_float(c.results[0].type) for c in converts
        )
        if len(reducers) != 1 or cuts_off:
            return None
        reducer = reducers.pop()
        if reducer != ROWS:
            return Accumulator(carry, reducer, tuple(links))
        updates = [link.op for link in links if link.op.name == DYNAMIC_UPDATE_SLICE]
        is_whole = _writes_whole(updates, self.indices, self.trips)
        return None if is_whole is None else Accumulator(carry, ROWS, tuple(links), is_whole)

    def _read(self, carry: int, users: list[tuple[ir.Operation, ir.Value]]) -> StackRows | None:
        """Returns the rows that slices read of a carry; None if other ops read it."""
        end = self.body.ends[carry]
        slices: list[ir.Operation] = []
        for op, value in users:
            if op.name == "stablehlo.return" and value == end:
                continue
            if op.name != DYNAMIC_SLICE or op.operands[0] != value:
                return None
            slices.append(op)
        return self._rows(carry, slices)

    def _rows(self, carry: int, ops: Sequence[ir.Operation]) -> StackRows | None:
        """Returns the rows that slices or updates of a carry cover.

        None unless they move by one constant step and each iteration touches only its own rows.
        """
        firsts = [row for op in ops if (row := self._first_rows(op)) is not None]
        if not firsts or len(firsts) < len(ops):
            return None
        slopes = {row[1] - row[0] for row in firsts}
        if len(slopes) != 1 or 0 in slopes:
            return None
        slope = slopes.pop()
        lows = [min(row[0], row[-1]) for row in firsts]
        first, span = min(lows), abs(slope)
        if max(lows) - first >= span:
            return None
        size = shape_of(ops[0].operands[0])[0]
        if first < 0 or first + span * self.trips > size:
            first = size - span * self.trips  # the last offsets leave the end of the window unused
            if first < 0 or any(not 0 <= low - first < span for low in lows):
                return None
        accesses = tuple(
            RowAccess(op, low - first, _part(op)[0]) for op, low in zip(ops, lows, strict=True)
        )
        if any(access.offset + access.count > span for access in accesses):
            return None
        return StackRows(carry, first, span, accesses, slope < 0)

    def _first_rows(self, op: ir.Operation) -> list[int] | None:
        """Returns the first row of a slice or an update of whole rows, for each iteration.

        None if it does not move by a constant step.
        """
        whole, part = shape_of(op.operands[0]), _part(op)
        if self.trips < 2 or not whole or part[1:] != whole[1:]:
            return None
        row = self.indices.values_by_iteration(op.operands[1 if op.name == DYNAMIC_SLICE else 2])
        if row is None or any(not 0 <= place < whole[0] for place in row):
            return None
        step = row[1] - row[0]
        return row if all(b - a == step for a, b in pairwise(row)) else None


def accumulates_by(op: ir.Operation) -> str | None:
    """Returns the reducer by which an op of two operands accumulates; None for any other op.

    A subtraction accumulates by `add`.
    """
    name = ADD if op.name == SUBTRACT else op.name
    short = name.removeprefix("stablehlo.")
    return short if short in REDUCERS else None


def tree_reducer(op: ir.Operation) -> str | None:
    """Returns the reducer of an op that can be a node of an accumulation tree; None for others.

    A product is not a node: a scaled term is linear, so the scaling stays below the tree. `xor` is
    not supported, because no program was seen to accumulate by it.
    """
    reducer = accumulates_by(op)
    return None if reducer in ("multiply", "xor") else reducer


def is_accumulated(end: ir.Value, argument: ir.Value) -> bool:
    """Returns True if iterations use a carry only to add to it."""
    return _links(end, argument) is not None


def is_sum(end: ir.Value, argument: ir.Value) -> bool:
    """Returns True if iterations use a carry only to add to it, in its own type."""
    links = _links(end, argument)
    return links is not None and all(_reducer(link.op) == "add" for link in links)


def _users(value: ir.Value) -> list[tuple[ir.Operation, ir.Value]]:
    """Returns the ops that read a value or a constraint of it, each with the value read."""
    users: list[tuple[ir.Operation, ir.Value]] = []
    for use in value.uses:
        op = use.owner.operation
        if op.name == SHARDING_CONSTRAINT:
            users += _users(op.results[0])
        else:
            users.append((op, value))
    return users


def _part(op: ir.Operation) -> list[int]:
    """Returns the shape of a slice's result or of an update."""
    return shape_of(op.results[0] if op.name == DYNAMIC_SLICE else op.operands[1])


def _links(end: ir.Value, argument: ir.Value) -> list[AccumulationLink] | None:
    """Returns the ops from `argument` to `end`; None unless only the next op reads each result."""
    if len(list(argument.uses)) != 1:
        return None
    links: list[AccumulationLink] = []
    value = argument
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        if value == end:
            return links or None
        user, place = uses[0].owner.operation, uses[0].operand_number
        known = _reducer(user) is not None or user.name in _THROUGH
        if not known or (user.name in _ONLY_LEFT and place):
            return None
        links.append(AccumulationLink(user, place))
        value = user.results[0]


def _reducer(op: ir.Operation) -> str | None:
    """Returns the reducer of an op on an accumulator; for a scatter, that of its region."""
    if op.name == DYNAMIC_UPDATE_SLICE:
        return ROWS
    if op.name == SCATTER:
        kind = reducer_kind(Combining(op).combiner)
        return None if kind == "xor" else kind
    reducer = accumulates_by(op)
    return None if reducer == "xor" else reducer  # no pass can combine parts by xor


def _writes_whole(updates: Sequence[ir.Operation], indices: LoopIndices, trips: int) -> bool | None:
    """Returns True if a chain of updates writes every row of an array once, in any order.

    False if some rows are not written; None if this is not known or a row is written twice. Rows
    may be of any dimension. As in StableHLO, a start is clamped to the last position that fits.
    """
    # In a single iteration no start moves, so `written_positions` would find no dimension.
    if len(updates) == 1 and trips == 1 and shape_of(updates[0].operands[0]):
        return shape_of(updates[0].operands[0]) == shape_of(updates[0].operands[1])
    ranges: list[tuple[int, int]] = []
    dims: set[int] = set()
    is_broad = True
    for op in updates:
        positions = written_positions(op, indices)
        if positions is None:
            return None
        dim, starts = positions
        array, update = shape_of(op.operands[0]), shape_of(op.operands[1])
        last = array[dim] - update[dim]
        ranges += [(at, at + update[dim]) for at in (min(max(s, 0), last) for s in starts)]
        dims.add(dim)
        is_broad = is_broad and array[:dim] + array[dim + 1 :] == update[:dim] + update[dim + 1 :]
    ranges.sort()
    if len(dims) != 1 or any(first[1] > second[0] for first, second in pairwise(ranges)):
        return None
    count = sum(limit - start for start, limit in ranges)
    return is_broad and count == shape_of(updates[0].operands[0])[dims.pop()]


# Accumulation by a tree of ops of one kind: `%next = %sum + (%a + %b) - %c`.


@dataclass(frozen=True)
class AccumulatedTerm:
    """A value that a tree combines; `negative` if it is subtracted."""

    value: ir.Value
    negative: bool


@dataclass(frozen=True)
class Tree:
    """The tree by which a carry is accumulated. `leaves` are all leaves except the carry itself."""

    carry: int
    reducer: str
    leaves: Sequence[AccumulatedTerm]
    nodes: Sequence[ir.Operation]  # from the root down


class Trees:
    """The trees of a body, each computed once."""

    def __init__(self, body: LoopBody) -> None:
        self._body = body
        self._over: dict[Key, Tree | str] = {}

    def over(self, op: ir.Operation) -> Tree | str:
        """Returns the tree of an op with a `tree_reducer`, or why it accumulates no carry."""
        path: list[ir.Operation] = []
        while key_of(op) not in self._over:
            path.append(op)
            above = self._above(op)
            if not isinstance(above, ir.Operation):
                self._over[key_of(op)] = above
            else:
                op = above
        tree = self._over[key_of(op)]
        self._over.update((key_of(node), tree) for node in path)
        return tree

    def _above(self, op: ir.Operation) -> ir.Operation | Tree | str:
        """Returns the node above an op, the tree if the op is its root, or why there is neither."""
        body, value = self._body, op.results[0]
        carries, users = body.carries_of(value), body.users.get(value, [])
        if carries:
            carry, reducer = carries[0], tree_reducer(op)
            assert reducer is not None, "one of the trees"
            if len(carries) > 1 or users:
                return f"the sum of the {describe_op(op)} has other readers than carry {carry}"
            nodes, leaves = _below(body, op, reducer)
            here = [leaf for leaf in leaves if leaf.value == body.arguments[carry]]
            if len(here) != 1 or here[0].negative:
                return f"the {describe_op(op)} does not add it to carry {carry}"
            others = [leaf for leaf in leaves if leaf != here[0]]
            return _why_not_private(body, carry, nodes) or Tree(carry, reducer, others, nodes)
        above = only_user(body, value)
        if isinstance(above, str) or tree_reducer(above) == tree_reducer(op):
            return above
        return f"the {describe_op(above)} reads the sum in the same iteration"


def only_user(body: LoopBody, value: ir.Value) -> ir.Operation | str:
    """Returns the only op that reads a value, or says what else reads it."""
    users, carries = body.users.get(value, []), body.carries_of(value)
    if len(users) == 1 and not carries:
        return users[0]
    if carries:
        return f"its result is carry {carries[0]} unchanged"
    if not users:
        return "its result has no readers"
    return f"both the {describe_op(users[0])} and the {describe_op(users[1])} read its result"


def _below(
    body: LoopBody, root: ir.Operation, reducer: str
) -> tuple[list[ir.Operation], list[AccumulatedTerm]]:
    """Returns the nodes of a tree, from the root down, and its leaves, from left to right."""
    nodes, leaves = [root], list[AccumulatedTerm]()
    pending = _operands(root, negative=False)
    while pending:
        leaf = pending.pop()
        maker = producer(leaf.value)
        users = body.users.get(leaf.value, [])
        is_read_once = body.is_inside(leaf.value) and len(users) == 1
        is_read_once = is_read_once and list(users[0].operands).count(leaf.value) == 1
        is_node = maker is not None and tree_reducer(maker) == reducer and is_read_once
        if maker is None or not is_node or body.carries_of(leaf.value):
            leaves.append(leaf)
            continue
        nodes.append(maker)
        pending += _operands(maker, negative=leaf.negative)
    return nodes, leaves


def _operands(node: ir.Operation, *, negative: bool) -> list[AccumulatedTerm]:
    """Returns the operands of a node as leaves, the right one first."""
    left, right = node.operands
    flips = node.name == SUBTRACT
    return [AccumulatedTerm(right, negative != flips), AccumulatedTerm(left, negative)]


def _why_not_private(body: LoopBody, carry: int, nodes: Sequence[ir.Operation]) -> str | None:
    """Says which op or carry outside its own tree reads the accumulator; None if there is none."""
    accumulator = body.arguments[carry]
    own = {key_of(node) for node in nodes}
    other = next((u for u in body.users.get(accumulator, []) if key_of(u) not in own), None)
    if other is not None:
        return f"the {describe_op(other)} also reads the accumulator, carry {carry}"
    if body.carries_of(accumulator):
        return f"the loop also returns the accumulator as carry {body.carries_of(accumulator)[0]}"
    if body.is_read_by_condition(carry):
        return f"the condition reads the accumulator, carry {carry}"
    return None


_ROW_RANK = 1  # rows of a stack of rank 1 are scalars: a rate for each layer, not weights


@dataclass(frozen=True)
class LayerLoop:
    """A `while` that runs `trips` times, through its stacks in order, or in reverse.

    `counters` gives what each iteration adds to a carry. `reads` and `writes` are stacks, at most
    one of each kind for a carry. If a carry has both, each row is read before it is written.
    """

    op: ir.Operation
    trips: int
    reverse: bool
    counters: dict[int, int]
    constants: frozenset[int]
    reads: dict[int, StackRows]
    writes: dict[int, StackRows]
    flows: tuple[int, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The stacks that the loop reads and that may be weights.

        Their rows are vectors of floats, or matrices of any type, because weights may be quantised.
        """
        types = {carry: self.op.operands[carry].type for carry in self.reads}
        return tuple(
            carry
            for carry, type_ in types.items()
            if ir.RankedTensorType(type_).rank > (_ROW_RANK if is_float(type_) else _ROW_RANK + 1)
        )

    @property
    def block(self) -> ir.Block:
        """The block of an iteration."""
        return While(self.op).body


def layer_loops(block: ir.Block, effects: Effects) -> list[LayerLoop]:
    """Returns the layer loops of a block and of loops in it, in the order of the text.

    A loop around a layer loop is left out if the inner loop's weights do not change in it: it is a
    loop over batches. So is a loop in a manual computation in a layer loop: it is part of a layer,
    such as the ring of an attention.
    """
    whiles = ops_named(block.owner.operation, {WHILE})
    found = [loop for op in whiles if (loop := read_layer_loop(op, effects)) is not None]
    around = {loop.op: enclosing(loop.op, MANUAL_COMPUTATION) for loop in found}
    loops = [
        loop
        for loop in found
        if (outer := around[loop.op]) is None or not any(is_inside(outer, o.op) for o in found)
    ]
    return [outer for outer in loops if not any(_keeps_weights(outer, loop) for loop in loops)]


def _keeps_weights(outer: LayerLoop, inner: LayerLoop) -> bool:
    """Returns True if all weights of the inner loop come from outside of the outer one."""
    if inner is outer or not is_inside(inner.op, outer.op):
        return False
    for carry in inner.weights:
        value = skip_constraints(inner.op.operands[carry])
        maker = producer(value)
        if maker is not None and is_inside(maker, outer.op):
            return False
        is_carried = maker is None and value in list(outer.block.arguments)
        if is_carried and ir.BlockArgument(value).arg_number not in outer.constants:
            return False
    return True


def read_layer_loop(
    loop: ir.Operation, effects: Effects, *, weights: bool = True
) -> LayerLoop | None:
    """Returns the loop as a loop over layers; None if it reads no slices of stacked weights.

    Without `weights`, for layers that share theirs, a loop that reads or writes any rows is
    accepted.
    """
    count = count_trips(loop, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1 or count.trips[0] < 2:
        return None
    body = LoopBody(loop, effects)
    carries = LoopCarries(body, count.trips[0])
    reads: dict[int, StackRows] = {}
    writes: dict[int, StackRows] = {}
    for carry in range(len(body.arguments)):
        if carry in body.steps:
            continue
        stack = None if carry in body.invariant else carries.rows_written(carry)
        read = carries.rows_read(carry) if carry in body.invariant else stack and stack.read
        if read is not None:
            reads[carry] = read
        if stack is not None:
            writes[carry] = stack.written
    reverse = _direction(reads, writes)
    if reverse is None:
        return None
    known = {*body.steps, *body.invariant, *writes}
    layers = LayerLoop(
        loop,
        carries.trips,
        reverse,
        dict(body.steps),
        frozenset(body.invariant - reads.keys()),
        reads,
        writes,
        tuple(c for c in range(len(body.arguments)) if c not in known),
    )
    return layers if layers.weights or not weights else None


def _direction(reads: dict[int, StackRows], writes: dict[int, StackRows]) -> bool | None:
    """Returns True if the loop goes through its stacks in reverse; None if it has no direction.

    It has none without stacks, or if two are written in opposite directions. Stacks that are read
    in the opposite direction are removed from `reads`.
    """
    written = {rows.is_reverse for rows in writes.values()}
    if len(written) > 1 or not (reads or written):
        return None
    reverse = written.pop() if written else next(iter(reads.values())).is_reverse
    for carry in list(reads):
        if reads[carry].is_reverse != reverse:
            if carry in writes:
                return None
            del reads[carry]
    return reverse


# Carries to which each iteration adds one row, and does nothing else:
#
#     %old = stablehlo.dynamic_slice %sums, %row
#     %new = stablehlo.add %old, %term
#     %put = stablehlo.select %valid, %new, %old            // or %new itself
#     %next = stablehlo.dynamic_update_slice %sums, %put, %row


@dataclass(frozen=True, eq=False)
class AddedRow:
    """A row of a carry that an iteration adds to.

    The row has size 1 along `dims`, and starts at the indices `starts`. `valid` is a boolean scalar
    that says if anything is added; None if it always is. `ops` are the ops of the addition.
    """

    carry: int
    dims: Sequence[int]
    starts: Sequence[ir.Value]
    valid: ir.Value | None
    ops: Sequence[ir.Operation]


def added_row(body: LoopBody, new: ir.Operation, term: ir.Value) -> AddedRow | str:
    """Returns the row that stores the sum of its old value and `term`, or why there is none."""
    old = next((producer(value) for value in new.operands if value != term), None)
    if new.name != ADD or old is None or old.name != DYNAMIC_SLICE:
        return f"the {describe_op(new)} does not add it to a row of a carry"
    put, valid = new, None
    store = only_user(body, new.results[0])
    if not isinstance(store, str) and store.name == SELECT:
        put, valid = store, store.operands[0]
        if list(put.operands)[1:] != [new.results[0], old.results[0]] or shape_of(valid):
            return f"the {describe_op(put)} does not choose between the sum and the old value"
        store = only_user(body, put.results[0])
    if isinstance(store, str):
        return store
    carry = body.argument_number(store.operands[0])
    if store.name != DYNAMIC_UPDATE_SLICE or carry is None or store.operands[1] != put.results[0]:
        return f"the {describe_op(store)} does not store it in a row of a carry"
    starts = list(store.operands)[2:]
    if list(old.operands) != [store.operands[0], *starts]:
        return f"the {describe_op(old)} and the {describe_op(store)} access different rows"
    ops = {key_of(op): op for op in (old, new, put, store)}
    reason = _read_otherwise(body, carry, list(ops.values()))
    if reason:
        return reason
    dims = row_dims(shape_of(store.operands[0]), shape_of(old.results[0]))
    if dims is None:
        return f"the {describe_op(store)} does not write one whole row of the first dimensions"
    return AddedRow(carry, dims, [starts[dim] for dim in dims], valid, list(ops.values()))


def only_adds(body: LoopBody, carry: int) -> bool:
    """Returns True if iterations use a carry only to add to it, or to a row of it.

    Such a loop can start from zeros: its result is then added to the initial value.
    """
    end = body.ends[carry]
    if is_sum(end, body.arguments[carry]):
        return True
    store = producer(end)
    put = producer(store.operands[1]) if store and store.name == DYNAMIC_UPDATE_SLICE else None
    new = producer(put.operands[1]) if put is not None and put.name == SELECT else put
    if new is None or new.name != ADD:
        return False
    rows = [added_row(body, new, term) for term in new.operands]
    return any(isinstance(row, AddedRow) and row.carry == carry for row in rows)


def _read_otherwise(body: LoopBody, carry: int, ops: Sequence[ir.Operation]) -> str:
    """Says what else reads the sums, before or after the addition; empty if nothing does."""
    own = {key_of(op) for op in ops}
    buffer, old, store = body.arguments[carry], ops[0].results[0], ops[-1].results[0]
    for value in (buffer, old, store):
        other = next((u for u in body.users.get(value, ()) if key_of(u) not in own), None)
        if other is not None:
            return f"the {describe_op(other)} also reads the sums, carry {carry}"
    if body.carries_of(buffer) or body.carries_of(old) or body.carries_of(store) != [carry]:
        return f"the sums are more than the next value of carry {carry}"
    if body.is_read_by_condition(carry):
        return f"the condition reads the sums, carry {carry}"
    return ""


def row_dims(whole: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """Returns the dimensions along which a part is one row; in all others it is whole.

    None unless the dimensions before the last of them are of size 1.
    """
    pairs = list(enumerate(zip(whole, part, strict=True)))
    dims = [dim for dim, (size, taken) in pairs if taken != size]
    before = range(dims[-1] if dims else 0)
    if any(part[dim] != 1 for dim in dims) or any(part[dim] != 1 for dim in before):
        return None
    return dims
