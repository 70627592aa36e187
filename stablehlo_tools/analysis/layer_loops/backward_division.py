"""Finds backward loops over layers, and the part of each that can run in a second loop after it.

A loop is a backward loop if it reads rows that another loop over layers has written: the residuals.

Ops whose results only leave such a loop, and that the chain of cotangents does not need, can wait.
These are gradients of weights. The values that the second loop reads from the first are chosen to
hold the fewest bytes. They are a minimum cut between the ops that only the first loop can run and
the ops that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.cheapest_cut import cheapest_cut
from stablehlo_tools.analysis.layer_loops.linked_loops import loops_ahead, loops_behind, range_of
from stablehlo_tools.analysis.loop_carries import layer_loops
from stablehlo_tools.analysis.loops import FORMATTING, Counted, LoopBody, count_trips, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, full_names, ops_with
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of, maker_of, producer, skip_constraints
from stablehlo_tools.ir.walk import is_inside, ops_named

_UPDATE = "stablehlo.dynamic_update_slice"
_CONSTRAINT = "sdy.sharding_constraint"
# Ops that dominate the time of a layer: a second loop pays off only if such an op can wait.
_WORK = ops_with(Trait.CONTRACTION) | full_names("scatter while")
_CHEAP = ELEMENTWISE | FORMATTING


@dataclass(frozen=True)
class BackwardLoop:
    """A loop over layers that may be divided. `counted` is its counter; `reverse` is True if its
    rows go from the last to the first."""

    body: LoopBody
    counted: Counted
    reverse: bool

    @property
    def op(self) -> ir.Operation:
        """The loop."""
        return self.body.loop

    @property
    def trips(self) -> int:
        """The trip count."""
        return self.counted.trips[0]


@dataclass(frozen=True)
class BackwardDivision:
    """A loop in two: the carries that move to the second, and the values that each iteration of the
    first stores for it."""

    loop: BackwardLoop
    moved: tuple[int, ...]
    stored: tuple[ir.Value, ...]

    @property
    def stored_bytes(self) -> int:
        """The bytes that an iteration stores."""
        return sum(size_of(value) or 0 for value in self.stored)


def layer_chains(block: ir.Block, effects: Effects) -> list[BackwardLoop]:
    """Returns the loops over layers whose iterations depend on those before, in program order.

    Loops in nested blocks are included.
    """
    known = {key_of(loop.op): loop for loop in layer_loops(block, effects)}
    ops = [
        op
        for op in ops_named(block.owner.operation, {WHILE})
        if key_of(op) in known or range_of(op) is not None
    ]
    chains: list[BackwardLoop] = []
    for op in ops:
        count, loop = count_trips(op, known_integer), known.get(key_of(op))
        if isinstance(count, Counted) and len(set(count.trips)) == 1 and count.trips[0]:
            body = LoopBody(op, effects)
            if has_chain(body):
                chains.append(BackwardLoop(body, count, loop is not None and loop.reverse))
    return chains


def backward_loops(
    chains: Sequence[BackwardLoop], block: ir.Block, effects: Effects
) -> list[BackwardLoop]:
    """Returns the loops that read rows which another loop with a chain has written.

    A loop inside such a reader or writer belongs to its layer and is left out.
    """
    bodies = {key_of(loop.op): loop.body for loop in chains}
    for op in ops_named(block.owner.operation, {WHILE}):
        if key_of(op) not in bodies:
            body = LoopBody(op, effects)
            if has_chain(body):
                bodies[key_of(op)] = body
    # for each loop, the loops with a chain that have written rows of the stacks that it reads
    writers = [
        [
            op
            for op, carry in loops_ahead(loop.op.operands[n] for n in sorted(loop.body.invariant))
            if key_of(op) in bodies and is_write(bodies[key_of(op)], carry)
        ]
        for loop in chains
    ]
    readers = [loop for loop, ops in zip(chains, writers, strict=True) if ops]
    around = [*(loop.op for loop in readers), *(op for ops in writers for op in ops)]
    return [loop for loop in readers if not any(is_inside(loop.op, other) for other in around)]


def awaited_carries(
    loop: BackwardLoop, chains: Sequence[BackwardLoop], divisions: Sequence[BackwardDivision]
) -> list[int]:
    """Returns the carries of a loop whose results the chain of another loop reads."""
    keys = {key_of(each.op) for each in chains}
    late = {(key_of(each.loop.op), carry) for each in divisions for carry in each.moved}
    awaited: list[int] = []
    for carry, result in enumerate(loop.op.results):
        taken = [(key_of(op), place) for op, place in loops_behind(result)]
        if any(each[0] in keys and each not in late for each in taken):
            awaited.append(carry)
    return awaited


def _needs(body: LoopBody, values: Iterable[ir.Value]) -> tuple[set[int], set[int]]:
    """Returns the positions of ops, and the carries, that values depend on in any iteration."""
    ops, carries = set[int](), set[int]()
    pending = list(values)
    while pending:
        value = pending.pop()
        number = body.argument_number(value)
        if number is not None:
            if number not in carries:
                carries.add(number)
                pending.append(body.ends[number])
            continue
        if not body.is_inside(value):
            continue
        maker = maker_of(value)
        position = body.position_of[key_of(maker)]
        if position not in ops:
            ops.add(position)
            pending += body.reads(maker)
    return ops, carries


def divide(loop: BackwardLoop, fixed: Iterable[int]) -> BackwardDivision | None:
    """Returns the division of a loop; None if no op is worth moving. The `fixed` carries stay in
    the first loop."""
    return _BackwardDivider(loop, frozenset(fixed)).division()


def states(body: LoopBody) -> list[int]:
    """Returns the carries that iterations change, without counters."""
    known = body.invariant | body.steps.keys()
    return [carry for carry in range(len(body.arguments)) if carry not in known]


def is_write(body: LoopBody, carry: int) -> bool:
    """Returns True if iterations only write rows of a carry, and read rows only before that."""
    argument, value = body.arguments[carry], body.ends[carry]
    updates: list[ir.Operation] = []
    while (op := producer(value)) is not None and op.name in (_UPDATE, _CONSTRAINT):
        if op.name == _UPDATE:
            updates.append(op)
            if not all(body.is_indexed(start) for start in list(op.operands)[2:]):
                return False
        value = op.operands[0]
    return value == argument and bool(updates)


def is_accumulator(body: LoopBody, carry: int) -> bool:
    """Returns True if iterations only add to a carry."""
    argument = body.arguments[carry]
    end = producer(skip_constraints(body.ends[carry]))
    users = [use.owner.operation for use in argument.uses]
    return end is not None and end.name == "stablehlo.add" and users == [end]


def has_chain(body: LoopBody) -> bool:
    """Returns True if an iteration depends on the results of the one before."""
    return any(not is_write(body, c) and not is_accumulator(body, c) for c in states(body))


def size_of(value: ir.Value) -> int | None:
    """Returns the bytes of a value; None if it is not a static tensor that a stack can hold."""
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        width = 2 * _width(element.element_type)
    else:
        width = _width(element)
    return prod(shape_of(value)) * max(width, 8) // 8 if width else None


def _width(element: ir.Type) -> int:
    return element.width if isinstance(element, ir.IntegerType | ir.FloatType) else 0


class _BackwardDivider:
    def __init__(self, loop: BackwardLoop, fixed: frozenset[int]) -> None:
        self._loop = loop
        self._body = loop.body
        self._fixed = fixed

    def division(self) -> BackwardDivision | None:
        # carries that no other state depends on
        body = self._body
        every = states(body)
        needed = {c: _needs(body, [body.ends[c]])[1] for c in every}
        waiting = [
            c
            for c in every
            if c not in self._fixed
            and (is_write(body, c) or is_accumulator(body, c))
            and not any(c in needed[other] for other in every if other != c)
        ]
        kept = self._kept(waiting)
        moved = [
            c for c in waiting if any(self._is_work(body.ops[n]) for n in self._exclusive(c, kept))
        ]
        if not moved or not has_chain(body):
            return None
        resting = [c for c in waiting if c not in moved]
        kept |= _needs(body, (body.ends[c] for c in resting))[0]
        stored = self._choose_stored_values(moved, kept)
        if stored is None:
            return None
        # Carries without expensive ops move too if the first loop need not store more for them.
        kept, at_hand = self._kept(waiting), {*stored}
        riders = [c for c in resting if self._can_move(c, self._exclusive(c, kept), at_hand)]
        return BackwardDivision(self._loop, tuple(sorted([*moved, *riders])), tuple(stored))

    def _kept(self, waiting: Sequence[int]) -> set[int]:
        """Returns the ops that must stay in the first loop: the chain, and ops with effects."""
        body = self._body
        values = [body.ends[c] for c in states(body) if c not in waiting]
        for op in body.ops:
            if not len(op.results) or body.effects.has_effect(op):
                values += body.reads(op)
                values += op.results
        return _needs(body, values)[0]

    def _exclusive(self, carry: int, kept: set[int]) -> set[int]:
        return _needs(self._body, [self._body.ends[carry]])[0] - kept

    def _is_work(self, op: ir.Operation) -> bool:
        return op.name in _WORK or self._body.communicates(op)

    def _choose_stored_values(self, moved: Sequence[int], kept: set[int]) -> list[ir.Value] | None:
        """Returns the values of fewest bytes that the first loop stores for the second; None
        without a cut."""
        body = self._body
        ours = _needs(body, (body.ends[c] for c in moved))[0] - kept
        # The expensive ones of our ops, and the ops that depend on them in the same iteration.
        working = [body.ops[position] for position in sorted(ours)]
        following = body.depending_on(list(filter(self._is_work, working)), later=False)
        late = ours & {body.position_of[key_of(op)] for op in following}
        # Ops that depend on carries that move, which the first loop does not have.
        arguments = [body.arguments[carry] for carry in moved]
        users = [op for argument in arguments for op in body.users.get(argument, ())]
        computed = body.depending_on(users, later=False)
        hanging = {*arguments, *(result for op in computed for result in op.results)}
        numbers: dict[ir.Value, int] = {}
        for value in [*body.arguments, *(result for op in body.ops for result in op.results)]:
            # The second loop computes the other values without the first.
            if not (body.is_indexed(value) or value in body.behind_barrier):
                numbers[value] = len(numbers)
        prices: list[int | None] = [
            None if value in hanging else size_of(value) for value in numbers
        ]
        edges: list[tuple[int, int]] = []
        starts = [numbers[body.arguments[c]] for c in states(body) if c not in moved]
        ends: set[int] = set()
        for position, op in enumerate(body.ops):
            inputs = [numbers[value] for value in body.reads(op) if value in numbers]
            if position in late:
                ends.update(inputs)
            results = [numbers[result] for result in op.results if result in numbers]
            if position in ours or (op.name in _CHEAP and not len(op.regions)):
                edges += [(tail, head) for tail in inputs for head in results]
            else:
                starts += results
        made = {numbers[r] for position in late for r in body.ops[position].results if r in numbers}
        cut = cheapest_cut(prices, edges, starts, sorted(ends - made))
        return None if cut is None else [list(numbers)[number] for number in cut]

    def _can_move(self, carry: int, exclusive: set[int], stored: set[ir.Value]) -> bool:
        """Returns True if a carry can move as well without more stored values.

        This holds if all operands of its ops are available in the second loop.
        """
        body = self._body
        pending, seen = [body.ends[carry]], set[ir.Value]()
        while pending:
            value = pending.pop()
            if value in seen or value in stored or value in body.behind_barrier:
                continue
            seen.add(value)
            if body.is_indexed(value) or body.argument_number(value) == carry:
                continue
            maker = producer(value)
            if maker is None or key_of(maker) not in body.position_of:
                return False
            cheap = maker.name in _CHEAP and not len(maker.regions)
            if not cheap and body.position_of[key_of(maker)] not in exclusive:
                return False
            pending += body.reads(maker)
        return True
