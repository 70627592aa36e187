"""What is known before the run of each value, on every device, iteration by iteration.

Known are integers that follow from constants, device ids and counters, and values that are zeros.
Both are evaluated forwards. Which values can be known at all is found first, once, so that an
iteration costs only those: a loop's carry can be known if it can be before the loop and, that
given, after each iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.demand.program import ENTER, LEAVE, Code, Need, OpInstance, Program
from stablehlo_tools.analysis.demand.tracked_dims import TrackedDims
from stablehlo_tools.analysis.demand.zeros import (
    Values,
    ZeroTracking,
    computed_splat,
    converted,
    is_splat,
    merged,
    updated,
)
from stablehlo_tools.analysis.device_arithmetic import (
    COMPUTED,
    apply,
    element_dtype,
)
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shape
from stablehlo_tools.dialect.names import BARRIER, DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    DEVICE_IDS,
)
from stablehlo_tools.ir.constants import splat_of


@dataclass(frozen=True)
class Marking:
    """Marks in `can` what can be known; what is marked at first stays.

    `plain` says so of the result of an op with one; `partly`, whether a branch's result may be
    known when not all regions' are; `same[n]` is the value that n, a shard, is handed on from.
    """

    can: list[bool]
    plain: Callable[[OpInstance], bool]
    partly: bool
    walked: set[int]
    same: dict[int, int]

    def mark(self, code: Code) -> None:
        """Marks the values of a block whose arguments are marked."""
        can = self.can
        for step in code.steps:
            if step.name == WHILE:
                self._loop(step)
            elif step.name in BRANCHES:
                self._branches(step)
            elif step.name == BARRIER:
                for operand, result in zip(step.operands, step.results, strict=True):
                    can[result] = can[operand]
            elif step.name == ENTER:
                for result in step.results:
                    if result in self.same:
                        can[result] = can[result] or can[self.same[result]]
            elif step.name != LEAVE and len(step.results) == 1 and not can[step.results[0]]:
                can[step.results[0]] = self.plain(step)

    def listed(self, code: Code) -> list[OpInstance]:
        """The steps of a block that are to be evaluated in each iteration."""
        return [step for step in code.steps if self._is_listed(step)]

    def _is_listed(self, step: OpInstance) -> bool:
        inside = [n for region in step.regions for n in _all_results(region)]
        return any(self.can[number] for number in (*step.results, *inside))

    def _branches(self, step: OpInstance) -> None:
        for region in step.regions:
            self.mark(region)
        enough = any if self.partly else all
        for position, result in enumerate(step.results):
            self.can[result] = enough(self.can[r.ends[position]] for r in step.regions)

    def _loop(self, loop: OpInstance) -> None:
        condition, body = loop.regions
        can = self.can
        hopes = [can[operand] for operand in loop.operands]
        if loop.number not in self.walked:
            rows = zip(hopes, body.ends, body.arguments, strict=True)
            hopes = [hope and end == argument for hope, end, argument in rows]
        while True:
            # A constant of the body is marked from the start; what depends on a carry starts anew.
            for block in (condition, body):
                for argument, hope in zip(block.arguments, hopes, strict=True):
                    can[argument] = hope
                self._clear(block)
                self.mark(block)
            after = [hope and can[end] for hope, end in zip(hopes, body.ends, strict=True)]
            if after == hopes:
                break
            hopes = after
        for result, hope in zip(loop.results, hopes, strict=True):
            can[result] = hope

    def _clear(self, code: Code) -> None:
        for step in code.steps:
            if step.operands and step.name not in (ENTER, LEAVE):
                for result in step.results:
                    self.can[result] = False
            for region in step.regions:
                self._clear(region)


def _all_results(code: Code) -> list[int]:
    results = list(code.ends)
    for step in code.steps:
        results += step.results
        for region in step.regions:
            results += _all_results(region)
    return results


Carries = list[tuple[Values | None, Need | None]]

_CONSTANTS = frozenset({"stablehlo.constant", "stablehlo.iota"})
_LARGEST = 1 << 12  # elements of a tensor that is computed in full


class TooMuchWorkError(Exception):
    """The analysis would take longer than it may."""


class Budget:
    """How many steps may still be taken, and how many iterations of all loops together."""

    def __init__(self, steps: int, iterations: int) -> None:
        self.left = steps
        self.iterations = iterations

    def spend(self, steps: int) -> None:
        """Raises TooMuchWorkError where that is more than there is left."""
        self.left -= steps
        if self.left < 0:
            raise TooMuchWorkError

    def iterate(self, steps: int) -> None:
        """Spends the steps of one iteration, and the iteration."""
        self.iterations -= 1
        if self.iterations < 0:
            raise TooMuchWorkError
        self.spend(steps)


class Knowledge:
    """What is known of each value now; `forward` brings the values of a block up to date.

    `walked` are the numbers of the loops that are followed, `histories` what each of them carried
    into its iterations when it last ran; None where nobody knows how often it does. `endless` are
    those that never end.
    """

    def __init__(
        self,
        program: Program,
        module: ir.Module,
        facts: ModuleFacts,
        tracked: TrackedDims,
        same: dict[int, int],
        walked: set[int],
        budget: Budget,
    ) -> None:
        self.now: list[Values | None] = [None] * len(program.types)
        self.zeros = ZeroTracking(program, module, facts, tracked, self.of_devices)
        self.histories: dict[int, list[Carries] | None] = {}
        self.endless: set[int] = set()
        self._program = program
        self._devices = facts.grid.size
        self._budget = budget
        self._walked = walked
        self._same = _inner_ends(program, same)
        self._shapes = [static_shape(type_) for type_ in program.types]
        self._dtypes = [element_dtype(type_) for type_ in program.types]
        self._integers = self._marking(self._is_computed, partly=False)
        self._zero = self._marking(self._may_be_zero, partly=True)
        self._lists: dict[int, list[tuple[OpInstance, bool, bool]]] = {}
        outside = DeviceValues(module, facts)
        for step in program.steps:
            self._start(step, outside)
        self._integers.mark(program.main)
        self._zero.mark(program.main)

    def forward(self, code: Code) -> None:
        """Evaluates a block whose arguments are up to date."""
        for step, integer, zero in self._listed(code):
            if step.name == WHILE:
                self._after(step)
            elif step.name in BRANCHES:
                self._branches(step)
            elif step.name == BARRIER:
                self._bind(step.results, self._carries(step.operands))
            elif step.name == ENTER:
                inside = [number for number in step.results if number in self._same]
                self._bind(inside, self._carries([self._same[number] for number in inside]))
            else:
                if integer:
                    self.now[step.results[0]] = self._computed(step)
                if zero:
                    self.zeros.evaluate(step)

    def enter(self, body: Code, carries: Carries) -> None:
        """Brings a loop's body up to date in one iteration."""
        self._budget.spend(len(self._listed(body)))
        self._bind(body.arguments, carries)
        self.forward(body)

    def of_devices(self, value: int) -> Values | None:
        """What is known now of an integer tensor, a row for each device by its flattened id; None
        where nothing is. (`now` holds a single row where all devices have the same.)"""
        known = self.now[value]
        if known is None or len(known) == self._devices:
            return known
        return np.broadcast_to(known, (self._devices, *known.shape[1:]))

    def _marking(self, plain: Callable[[OpInstance], bool], *, partly: bool) -> Marking:
        can = [False] * len(self._program.types)
        return Marking(can, plain, partly, self._walked, self._same)

    def _is_computed(self, step: OpInstance) -> bool:
        if step.name in _CONSTANTS or self._dtypes[step.results[0]] is None:
            return False
        can = self._integers.can
        return (step.name in COMPUTED or step.name == DYNAMIC_UPDATE_SLICE) and all(
            can[v] for v in step.operands
        )

    def _may_be_zero(self, step: OpInstance) -> bool:
        return self.zeros.is_tracked(step, self._zero.can)

    def _listed(self, code: Code) -> list[tuple[OpInstance, bool, bool]]:
        """The steps of a block to evaluate: whether for integers, whether for zeros."""
        key = id(code)
        if key not in self._lists:
            integers = {step.number for step in self._integers.listed(code)}
            zero = {step.number for step in self._zero.listed(code)}
            self._lists[key] = [
                (step, step.number in integers, step.number in zero)
                for step in code.steps
                if (step.number in integers or step.number in zero)
                and step.name not in _CONSTANTS | DEVICE_IDS | {LEAVE}
            ]
        return self._lists[key]

    def _carries(self, numbers: Sequence[int]) -> Carries:
        return [(self.now[number], self.zeros.now[number]) for number in numbers]

    def _bind(self, numbers: Sequence[int], carries: Carries) -> None:
        for number, (known, zero) in zip(numbers, carries, strict=True):
            self.now[number] = known
            self.zeros.now[number] = zero

    def _handed(self, numbers: Sequence[int], to: Sequence[int]) -> Carries:
        """What is known of values, by the places of those that take them over."""
        return [
            (self.now[n], None if self.zeros.now[n] is None else self.zeros.handed(n, taker))
            for n, taker in zip(numbers, to, strict=True)
        ]

    def _simulated(self, loop: OpInstance) -> list[Carries] | None:
        """What a loop carries into each iteration; None if nobody knows how often it runs.

        The operands must be up to date.
        """
        condition, body = loop.regions
        if loop.number not in self._walked or not self._integers.can[condition.ends[0]]:
            return None
        carries = self._handed(loop.operands, body.arguments)
        history: list[Carries] = []
        steps = 1 + len(self._listed(condition)) + len(self._listed(body))
        while True:
            self._bind(condition.arguments, carries)
            self.forward(condition)
            goes_on = self.now[condition.ends[0]]
            if goes_on is None or goes_on.min() != goes_on.max():
                return None
            if not goes_on.all():
                break
            if history and _are_same_integers(history[-1], carries):
                self.endless.add(loop.number)  # what goes on once goes on for ever
                return None
            history.append(carries)
            self._budget.iterate(steps)
            self._bind(body.arguments, carries)
            self.forward(body)
            carries = self._handed(body.ends, body.arguments)
        self._bind(body.arguments, carries)
        self._bind(loop.results, self._handed(body.arguments, loop.results))
        return history

    def _after(self, loop: OpInstance) -> None:
        """What is known of a loop's results."""
        history = self._simulated(loop)
        self.histories[loop.number] = history
        if history is not None:
            return
        body = loop.regions[1]
        rows = zip(loop.operands, body.arguments, body.ends, loop.results, strict=True)
        for first, argument, end, result in rows:
            if end == argument:
                self._bind([result], self._handed([first], [result]))
            else:
                self._bind([result], [(None, None)])

    def _branches(self, step: OpInstance) -> None:
        for region in step.regions:
            self.forward(region)
        chosen = chosen_region(self.of_devices(step.operands[0]), step)
        for position, result in enumerate(step.results):
            parts = [self.of_devices(region.ends[position]) for region in step.regions]
            self.now[result] = merged(chosen, parts, _LARGEST)
        self.zeros.merge(step, chosen)

    def _computed(self, step: OpInstance) -> Values | None:
        operands = [self.now[operand] for operand in step.operands]
        known = [operand for operand in operands if operand is not None]
        if len(known) != len(operands):
            return None
        shape, dtype = self._shapes[step.results[0]], self._dtypes[step.results[0]]
        if shape and all(is_splat(part) for part in known):
            result = computed_splat(step, known, shape)
            if result is not None:
                return converted(result, dtype)
        if shape is None or math.prod(shape) > _LARGEST:
            return None
        if step.name == DYNAMIC_UPDATE_SLICE:
            return updated(known[0], known[1], known[2:])
        result = apply(step.op, known)
        return None if result is None else converted(result, dtype)

    def _start(self, step: OpInstance, outside: DeviceValues) -> None:
        """What is known all along: constants, ids, and what crosses a manual computation."""
        if step.name == "stablehlo.constant" and self.zeros.start(step):
            self._zero.can[step.results[0]] = True
        if step.name in _CONSTANTS:
            number = step.results[0]
            self.now[number] = self._constant(step.op)
            self._integers.can[number] = self.now[number] is not None
        elif step.name in DEVICE_IDS or step.name in (ENTER, LEAVE):
            for number in step.results:
                value = self._program.values[number]
                if number not in self._same and element_dtype(value.type) is not None:
                    self.now[number] = outside.of(value)
                    self._integers.can[number] = self.now[number] is not None

    def _constant(self, op: ir.Operation) -> Values | None:
        shape, dtype = static_shape(op.results[0].type), element_dtype(op.results[0].type)
        if shape is None or dtype is None:
            return None
        splat = splat_of(op.results[0]) if op.name == "stablehlo.constant" else None
        if splat is not None:
            return np.broadcast_to(np.array(splat).astype(dtype), (1, *shape))
        if math.prod(shape) > _LARGEST:
            return None
        known = apply(op, [])
        return None if known is None else converted(known, dtype)


def _are_same_integers(before: Carries, after: Carries) -> bool:
    """Whether all that is known of the carries, as integers, is as it was an iteration before."""
    return all(
        one is other or (one is not None and other is not None and np.array_equal(one, other))
        for (one, _), (other, _) in zip(before, after, strict=True)
    )


def chosen_region(predicate: Values | None, step: OpInstance) -> Values | None:
    """Which region of an `if` or `case` each device runs."""
    if predicate is None or predicate.ndim != 1:
        return None
    last = len(step.regions) - 1
    if step.name == "stablehlo.if":
        return np.where(predicate, 0, 1)
    return np.where((predicate < 0) | (predicate > last), last, predicate)


def _inner_ends(program: Program, same: dict[int, int]) -> dict[int, int]:
    """For the shards that are handed on, the values inside of the computation that made them."""
    ends = {
        result: end
        for step in program.steps
        if step.name == LEAVE
        for result, end in zip(step.results, step.operands, strict=True)
    }
    return {inside: ends[outside] for inside, outside in same.items()}
