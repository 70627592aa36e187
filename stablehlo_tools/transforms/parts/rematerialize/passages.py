"""Finds the residuals of a forward: the values that its backward reads.

There are two kinds of passages. A *loop* over layers writes rows of stacks that another loop reads,
one iteration each, mostly in reverse. In a *block* of ops, unrolled layers, ops after a border read
values from before it.

If the backward already recomputes values, as jax.checkpoint does, they are recognized as values of
the forward (`same_values`). So the choice is between all values that the backward reads of the
forward, kept or recomputed so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import inf

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import LoopCarries, StackRows
from stablehlo_tools.analysis.loops import (
    Counted,
    LoopBody,
    count_trips,
    is_integer_scalar,
    known_integer,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    BARRIER,
    MANUAL_COMPUTATION,
    RESHAPE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.clone import counterparts
from stablehlo_tools.ir.values import (
    CONSTANTS,
    has_uses,
    maker_of,
    producer,
    skip_constraints,
    splat_of,
)
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, terminator, values_used_outside
from stablehlo_tools.transforms.parts.rematerialize.same_values import SameValues

_CONTRACTIONS = ops_with(Trait.CONTRACTION)
_WAIST = 1.05  # times the fewest live bytes: the most for a waist
_EDGE = 6  # 1/6 of the ops at either end does not count for the fewest live bytes
_FEW_WAISTS = 3  # the most waists that a value of a waist may cross
_VIEWS = frozenset({BARRIER, SHARDING_CONSTRAINT, RESHAPE})
_NEVER_REPEATED = ops_with(Trait.OPAQUE) | ops_with(Trait.EFFECT) | ops_with(Trait.TOKEN)


@dataclass
class ResidualPassage:
    """Values by their numbers: those that the forward produces, and those that the backward reads.

    `makers`: the op that produces each value in the forward. `constraints`: its sharding constraint
    there. `given`: values that the backward can read at no cost: constants, counters and values
    from outside of both. `required`: those that the backward reads. `reads`: its ops, with the
    forward values that each reads. `trips`: how often forward and backward run.
    """

    same: SameValues
    trips: int
    effects: Effects
    values: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    makers: dict[int, ir.Operation] = field(default_factory=dict[int, ir.Operation])
    given: set[int] = field(default_factory=set[int])
    required: set[int] = field(default_factory=set[int])
    reads: list[tuple[ir.Operation, list[ir.Value]]] = field(
        default_factory=list[tuple[ir.Operation, list[ir.Value]]]
    )
    constraints: dict[int, ir.Operation] = field(default_factory=dict[int, ir.Operation])

    def add_forward(self, op: ir.Operation) -> None:
        """Numbers an op of the forward."""
        self.same.add(op)
        for result in op.results:
            number = self.same[result]
            self.values.setdefault(number, result)
            if op.name in CONSTANTS:
                self.given.add(number)
            if op.name == SHARDING_CONSTRAINT:
                self.constraints.setdefault(number, op)
            elif op.name != BARRIER:
                self.makers.setdefault(number, op)

    def read_backward(self, ops: Sequence[ir.Operation], ends: Sequence[ir.Value]) -> None:
        """Records the forward values that the numbered ops of a backward read to compute `ends`.

        Skips ops that only recompute values of the forward.
        """
        needed = set(ends)
        for op in reversed(ops):
            if op.name in (BARRIER, SHARDING_CONSTRAINT):
                needed.update(
                    o for o, r in zip(op.operands, op.results, strict=True) if r in needed
                )
                continue
            runs = not len(op.results) or self.effects.has_effect(op)
            if not runs and not any(result in needed for result in op.results):
                continue
            used = list(dict.fromkeys(values_used_outside(op)))
            read = [value for value in used if self.is_of_forward(value)]
            needed.update(value for value in used if not self.is_of_forward(value))
            if read:
                self.reads.append((op, read))
                self.required.update(self.same[value] for value in read)
        self.reads.reverse()

    def is_of_forward(self, value: ir.Value) -> bool:
        """Returns True if the forward produces a value that is not available at no cost."""
        number = self.same[value]
        return number in self.values and number not in self.given

    def numbers_read(self, op: ir.Operation) -> list[int]:
        """Returns the numbers of an op's operands and captured values, each once."""
        return list(dict.fromkeys(self.same[value] for value in values_used_outside(op)))

    def can_repeat(self, op: ir.Operation) -> bool:
        """Returns True if an op may run again: it has no effect, token or hidden state."""
        return op.name not in _NEVER_REPEATED and not self.effects.has_effect(op)


@dataclass(frozen=True)
class StackedResidual:
    """A value that is kept in rows of a stack.

    `carry`: the carry of the backward that holds the stack. `offset`: the row among those of an
    iteration.
    """

    carry: int
    written: StackRows
    offset: int


@dataclass
class LoopPassage(ResidualPassage):
    """A loop over layers, and the loop that reads the rows that it writes.

    `is_mirrored`: the backward reads the last row first. `stacked`: the rows of values that are
    kept now.
    """

    forward: LoopBody = field(kw_only=True)
    backward: LoopBody = field(kw_only=True)
    counts: tuple[Counted, Counted] = field(kw_only=True)
    is_mirrored: bool = field(kw_only=True)
    stacked: dict[int, StackedResidual] = field(default_factory=dict[int, "StackedResidual"])


@dataclass
class BlockPassage(ResidualPassage):
    """The ops of a block before and after a border, at which most bytes are live.

    `forward`: those before it. `backward`: those after it. `loops`: results of loops that write
    rows for other loops; these are never repeated. `waists`: the numbers of the values that cross
    places with the fewest live bytes, as between layers.
    """

    forward: list[ir.Operation] = field(kw_only=True)
    backward: list[ir.Operation] = field(kw_only=True)
    loops: set[ir.Value] = field(kw_only=True)
    waists: list[frozenset[int]] = field(default_factory=list[frozenset[int]])

    def in_copy(self, block: ir.Block, effects: Effects) -> BlockPassage:
        """Returns the passage in a copy of its block; `effects` are those of the copy."""
        values = counterparts(self.backward[-1].block, block)
        ops = [view.operation for view in block.operations]
        silent, copied = (
            [op for op in listed if not len(op.results)]
            for listed in (self.backward, ops[len(self.forward) :])
        )

        def op_in_copy(op: ir.Operation) -> ir.Operation:
            has_result = len(op.results) > 0
            return maker_of(values[op.results[0]]) if has_result else copied[silent.index(op)]

        return replace(
            self,
            same=self.same.in_copy(values),
            effects=effects,
            values={number: values[value] for number, value in self.values.items()},
            makers={n: maker_of(values[op.results[0]]) for n, op in self.makers.items()},
            constraints={n: maker_of(values[op.results[0]]) for n, op in self.constraints.items()},
            reads=[(op_in_copy(op), [values[v] for v in read]) for op, read in self.reads],
            forward=ops[: len(self.forward)],
            backward=ops[len(self.forward) :],
            loops={values.get(value, value) for value in self.loops},
        )

    def can_repeat(self, op: ir.Operation) -> bool:
        return super().can_repeat(op) and op.results[0] not in self.loops


def blocks_of(module: ir.Module) -> list[ir.Block]:
    """Returns the blocks that may hold a forward and its backward, outer blocks first."""
    blocks = [Function(entry_function(module)).body]
    for block in blocks:
        for view in block.operations:
            if view.operation.name in (WHILE, MANUAL_COMPUTATION):
                blocks.append(view.operation.regions[-1].blocks[0])
    return blocks


def block_passage(
    block: ir.Block, effects: Effects, size_of: Callable[[ir.Value], float], loops: set[ir.Value]
) -> BlockPassage | None:
    """Returns the residuals that cross the border of a block; None if there are none.

    `size_of`: the bytes of a value. `loops`: results of loops that are never repeated.
    """
    ops = [view.operation for view in block.operations]
    border = _border(ops, size_of)
    forward, backward = ops[:border], ops[border:]
    if len(backward) < 2:
        return None  # only the terminator follows
    passage = BlockPassage(
        SameValues(), 1, effects, forward=forward, backward=backward, loops=loops
    )
    for op in forward:
        passage.add_forward(op)
    for op in backward[:-1]:
        passage.same.add(op)
    passage.read_backward(backward, [])
    passage.waists = _waists(passage, size_of)
    return passage if passage.required else None


def _waists(passage: BlockPassage, size_of: Callable[[ir.Value], float]) -> list[frozenset[int]]:
    """Finds the places in the forward that the fewest bytes cross, and the values that cross each.

    Searches between the first and the last contraction. A value that crosses many waists, like a
    mask for all layers, belongs to none. Neither does one that depends on no contraction, like a
    converted weight.
    """
    same, ops = passage.same, passage.forward
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        read = [same.root(same[value]) for value in values_used_outside(op)]
        last.update(dict.fromkeys(read, position))
        if op.name in _CONTRACTIONS or any(number in made for number in read):
            for result in op.results:
                made.setdefault(same.root(same[result]), position)
    crossing = {
        n: (first, last[n], size)
        for n, first in made.items()
        if last.get(n, first) > first
        and n in passage.values
        and n not in passage.given
        and 0 < (size := size_of(passage.values[n])) < inf
    }
    change = [0.0] * (len(ops) + 1)
    for first, end, size in crossing.values():
        change[first] += size
        change[end] -= size
    alive = list(accumulate(change))
    work = [position for position, op in enumerate(ops) if op.name in _CONTRACTIONS]
    if len(work) < 2:
        return []
    inner = range(work[0], work[-1])
    edge = len(inner) // _EDGE  # at the ends, arguments cross, which are not counted
    least = _WAIST * min(alive[position] for position in inner[edge : len(inner) - edge])
    waists: list[frozenset[int]] = []
    runs = [[*run] for narrow, run in groupby(inner, lambda at: alive[at] <= least) if narrow]
    places = [min(run, key=lambda at: alive[at]) for run in runs]
    for place in places:
        crossed = [
            n
            for n, (first, end, _) in crossing.items()
            if first <= place < end and sum(first <= at < end for at in places) <= _FEW_WAISTS
        ]
        if crossed:
            waists.append(frozenset(crossed))
    return waists


def _border(ops: Sequence[ir.Operation], size_of: Callable[[ir.Value], float]) -> int:
    """Returns the number of ops after which the most bytes of a block's own values are live."""
    lies_in: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, int] = {}
    for position, op in enumerate(ops):
        for value in values_used_outside(op):
            last[lies_in.get(value, value)] = position
        # A view keeps the storage of its operand live.
        if op.name in _VIEWS and len(op.results) == len(op.operands):
            for result, operand in zip(op.results, op.operands, strict=True):
                lies_in[result] = lies_in.get(operand, operand)
    change = [0.0] * (len(ops) + 1)
    for position, op in enumerate(ops):
        for result in op.results:
            if result not in lies_in and result in last and op.name not in CONSTANTS:
                size = size_of(result)
                change[position] += size if size < inf else 0.0
                change[last[result]] -= size if size < inf else 0.0
    alive = list(accumulate(change))
    return max(range(len(ops)), key=alive.__getitem__) + 1 if ops else 0


def loop_passages(
    block: ir.Block, effects: Effects, is_wanted: Callable[[ir.Operation], bool]
) -> list[LoopPassage]:
    """Returns the passages between the wanted loops of a block, in the order of their backwards."""
    readings = _readings([op for op in _loops_of(block) if is_wanted(op)], effects)
    passages: list[LoopPassage] = []
    for number, backward in enumerate(readings):
        for forward in readings[:number]:
            passage = _passage(forward, backward, effects)
            if passage is not None and passage.required:
                passages.append(passage)
    return passages


@dataclass(frozen=True)
class RowReader:
    """A loop that reads rows, and its slices for each update of the writer, in order.

    `takes_last_first`: it reads the rows in the reverse order of writing.
    """

    loop: ir.Operation
    slices: list[list[ir.Operation]]
    takes_last_first: bool


@dataclass(frozen=True)
class KeptRows:
    """Rows that a loop writes into a new stack and that only other loops read.

    `stack`: the loop's result. `updates`: the ops that write rows.
    """

    stack: ir.Value
    trips: int
    updates: list[ir.Operation]
    readers: list[RowReader]


def kept_rows(block: ir.Block, effects: Effects) -> list[KeptRows]:
    """Returns the rows that loops of a block keep for other loops of it."""
    readings = _readings(_loops_of(block), effects)
    found: dict[ir.Value, KeptRows] = {}
    for number, backward in enumerate(readings):
        for forward in readings[:number]:
            for written, read in _links(forward, backward):
                stack = forward.op.results[written.carry]
                unused = not has_uses(backward.op.results[read.carry])
                start = splat_of(skip_constraints(forward.op.operands[written.carry]))
                if not unused or start is None:
                    continue
                updates = [access.op for access in written.accesses]
                kept = found.setdefault(stack, KeptRows(stack, forward.trips, updates, []))
                slices = [
                    [
                        access.op
                        for access in read.accesses
                        if (access.offset, access.count) == (update.offset, update.count)
                    ]
                    for update in written.accesses
                ]
                kept.readers.append(
                    RowReader(backward.op, slices, written.is_reverse != read.is_reverse)
                )
    return [kept for stack, kept in found.items() if _count_uses(stack) == len(kept.readers)]


def _count_uses(value: ir.Value) -> int:
    """Counts the uses of a value, through sharding constraints."""
    users = [use.owner.operation for use in value.uses]
    through = [user for user in users if user.name == SHARDING_CONSTRAINT]
    return len(users) - len(through) + sum(_count_uses(user.results[0]) for user in through)


@dataclass(frozen=True)
class _LoopReading:
    """A counted loop, and the rows that it reads and writes, by carry."""

    body: LoopBody
    counted: Counted
    carries: LoopCarries

    @property
    def trips(self) -> int:
        return self.counted.trips[0]

    @property
    def op(self) -> ir.Operation:
        return self.body.loop


def _loops_of(block: ir.Block) -> list[ir.Operation]:
    return [view.operation for view in block.operations if view.operation.name == WHILE]


def _readings(loops: Sequence[ir.Operation], effects: Effects) -> list[_LoopReading]:
    readings: list[_LoopReading] = []
    for op in loops:
        # A loop over layers runs a known number of times, at least twice, on all devices.
        count = count_trips(op, known_integer)
        if isinstance(count, str) or len(set(count.trips)) != 1 or count.trips[0] < 2:
            continue
        if len(set(count.starts)) == 1:
            body = LoopBody(op, effects)
            readings.append(_LoopReading(body, count, LoopCarries(body, count.trips[0])))
    return readings


def _passage(forward: _LoopReading, backward: _LoopReading, effects: Effects) -> LoopPassage | None:
    if forward.trips != backward.trips:
        return None
    links = _links(forward, backward)
    if not links:
        return None
    mirrored = {written.is_reverse != read.is_reverse for written, read in links}
    if len(mirrored) != 1:
        return None
    passage = LoopPassage(
        SameValues(),
        forward.trips,
        effects,
        forward=forward.body,
        backward=backward.body,
        counts=(forward.counted, backward.counted),
        is_mirrored=mirrored.pop(),
    )
    body, same = forward.body, passage.same
    _number_arguments(passage, forward, passage.given, range(passage.trips))
    for number, argument in enumerate(body.arguments):
        if number not in body.invariant and number not in body.steps:
            passage.values.setdefault(same[argument], argument)
    for value in dict.fromkeys(value for op in body.ops for value in values_used_outside(op)):
        if not body.is_inside(value):
            same.add_leading_to(value)
    for op in body.ops:
        if len(op.results) == 1 and is_integer_scalar(op.results[0].type):
            _note(passage, forward, op.results[0], range(passage.trips))
        passage.add_forward(op)
        if op.results and all(body.is_indexed(r) and is_integer_scalar(r.type) for r in op.results):
            passage.given.update(same[result] for result in op.results)
    _number_backward(passage, backward, links)
    return passage


def _links(forward: _LoopReading, backward: _LoopReading) -> list[tuple[StackRows, StackRows]]:
    """Returns pairs of rows written by the forward and the same rows read by the backward."""
    links: list[tuple[StackRows, StackRows]] = []
    for carry in sorted(backward.body.invariant):
        source = skip_constraints(backward.op.operands[carry])
        maker = producer(source)
        if maker is None or maker != forward.op:
            continue
        stack = forward.carries.rows_written(ir.OpResult(source).result_number)
        read = backward.carries.rows_read(carry)
        if stack is None or read is None or stack.read is not None:
            continue
        if (stack.written.first, stack.written.span) == (read.first, read.span):
            links.append((stack.written, read))
    return links


def _number_backward(
    passage: LoopPassage, backward: _LoopReading, links: Sequence[tuple[StackRows, StackRows]]
) -> None:
    body, same = backward.body, passage.same
    order = range(passage.trips)[::-1] if passage.is_mirrored else range(passage.trips)
    _number_arguments(passage, backward, set(), order)
    for written, read in links:
        rows = {(access.offset, access.count): access.op for access in written.accesses}
        for access in read.accesses:
            update = rows.get((access.offset, access.count))
            if update is not None and access.count == 1:
                same.same(access.op.results[0], update.operands[1])
                number = same.root(same[update.operands[1]])
                passage.stacked[number] = StackedResidual(read.carry, written, access.offset)
    for op in body.ops:
        if len(op.results) == 1 and is_integer_scalar(op.results[0].type):
            _note(passage, backward, op.results[0], order)
        for value in op.operands:
            if not body.is_inside(value):
                same.add_leading_to(value)
        same.add(op)
    passage.read_backward([*body.ops, terminator(body.block)], [])


def _number_arguments(
    passage: LoopPassage, reading: _LoopReading, given: set[int], order: Iterable[int]
) -> None:
    """Numbers the invariants and counters of a loop.

    Counters get their values in the order of the forward's iterations.
    """
    body, same = reading.body, passage.same
    for number, argument in enumerate(body.arguments):
        if number in body.invariant:
            outside = skip_constraints(reading.op.operands[number])
            same.add_leading_to(outside)
            same.same(argument, outside)
            given.add(same[argument])
        elif number in body.steps:
            _note(passage, reading, argument, order)
            given.add(same[argument])


def _note(
    passage: LoopPassage, reading: _LoopReading, value: ir.Value, order: Iterable[int]
) -> None:
    integers = reading.carries.indices.values_by_iteration(value)
    if integers is not None:
        passage.same.is_integers(value, [integers[i] for i in order])
