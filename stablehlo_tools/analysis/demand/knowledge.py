"""What is known before the run of each value, on every device, iteration by iteration.

Known are integers that follow from constants, device ids and counters, and values that are zeros.
Both are evaluated forwards. Which values can be known at all is found first, once, so that an
iteration costs only those: a loop's carry can be known if it can be before the loop and, that
given, after each iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.dataflow import Body, Node, carries, handed_on, solve
from stablehlo_tools.analysis.demand.program import ENTER, LEAVE, Need, Program, TrackedDims
from stablehlo_tools.analysis.demand.zeros import (
    Values,
    ZeroTracking,
    computed_splat,
    converted,
    is_splat,
    merged,
    updated,
)
from stablehlo_tools.analysis.device_values import (
    COMPUTED,
    DeviceValues,
    apply,
    chosen_regions,
    element_dtype,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shape
from stablehlo_tools.dialect.names import BARRIER, DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, DEVICE_IDS
from stablehlo_tools.ir.values import splat_of


class Marking:
    """Which values can be known: all but those that an op makes of what cannot.

    `given` are known from the start. `plain` says, of the result of an op with one, whether it can
    be known, given the values that cannot; `partly`, whether a branch's result may be known when
    not all regions' are. Of a loop that is not walked only what it leaves alone can be.
    """

    def __init__(
        self,
        program: Program,
        plain: Callable[[Node, Set[int]], bool],
        walked: Set[Node],
        *,
        partly: bool,
    ) -> None:
        self.given: set[int] = set()
        self._program = program
        self._plain = plain
        self._walked = walked
        self._lost = all if partly else any
        self._unknown: Set[int] = frozenset()

    def mark(self) -> None:
        """Finds the most values that can be known together: what cannot spreads, loops included,
        until nothing more is lost."""
        start = dict.fromkeys(self._program.root.arguments, True)

        def spread(node: Node, unknown: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
            lost = self._lost_of(node, unknown.keys())
            return ((number, True) for number in lost if number not in self.given)

        self._unknown = solve(self._program, start, spread, everywhere=True).keys()

    def can(self, number: int) -> bool:
        """Whether a value can be known."""
        return number not in self._unknown

    def lists(self, node: Node) -> bool:
        """Whether an op is to be evaluated in each iteration."""
        return any(map(self.can, node.results)) or any(
            any(map(self.can, body.returned)) or any(map(self.lists, body.nodes))
            for body in node.bodies
        )

    def _lost_of(self, node: Node, unknown: Set[int]) -> Iterable[int]:
        """The values of an op that cannot be known, given those that cannot."""
        if node.name == WHILE:
            is_walked = node in self._walked
            for carry in carries(node):
                is_kept = is_walked or carry.returned == carry.argument
                if not is_kept or carry.operand in unknown or carry.returned in unknown:
                    yield from (carry.condition, carry.argument, carry.result)
        elif node.name in BRANCHES:
            for result, returned in handed_on(node):
                if self._lost(number in unknown for number in returned):
                    yield result
        elif node.name == BARRIER:
            yield from (r for n, r in zip(node.operands, node.results, strict=True) if n in unknown)
        elif node.name == ENTER:
            kept = self._program.kept
            yield from (n for n in node.results if n not in kept or kept[n] in unknown)
        elif node.name == LEAVE or len(node.results) != 1 or not self._plain(node, unknown):
            yield from node.results


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
        walked: Set[Node],
        budget: Budget,
    ) -> None:
        self.now: list[Values | None] = [None] * len(program.types)
        self.zeros = ZeroTracking(program, module, facts, tracked, self.of_devices)
        self.histories: dict[Node, list[Carries] | None] = {}
        self.endless: set[Node] = set()
        self._program = program
        self._devices = facts.grid.size
        self._budget = budget
        self._walked = walked
        self._shapes = [static_shape(type_) for type_ in program.types]
        self._dtypes = [element_dtype(type_) for type_ in program.types]
        self._integers = Marking(program, self._is_computed, walked, partly=False)
        self._zero = Marking(program, self.zeros.may_be, walked, partly=True)
        self._lists: dict[Body, list[tuple[Node, bool, bool]]] = {}
        outside = DeviceValues(module, facts)
        for node in program.nodes:
            self._start(node, outside)
        self._integers.mark()
        self._zero.mark()

    def forward(self, code: Body) -> None:
        """Evaluates a block whose arguments are up to date."""
        for node, integer, zero in self._listed(code):
            if node.name == WHILE:
                self._after(node)
            elif node.name in BRANCHES:
                for region in node.bodies:
                    self.forward(region)
                chosen = self.regions_run(node)
                for result, returned in handed_on(node):
                    self.now[result] = merged(chosen, [*map(self.of_devices, returned)], _LARGEST)
                self.zeros.merge(node, chosen)
            elif node.name == BARRIER:
                self._bind(node.results, self._carries(node.operands))
            elif node.name == ENTER:
                kept = self._program.kept
                inside = [number for number in node.results if number in kept]
                self._bind(inside, self._carries([kept[number] for number in inside]))
            else:
                if integer:
                    self.now[node.results[0]] = self._computed(node)
                if zero:
                    self.zeros.evaluate(node)

    def enter(self, body: Body, carries: Carries) -> None:
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

    def regions_run(self, branch: Node) -> Values | None:
        """The region of an `if` or `case` that each device runs; None where that is not known."""
        index = self.of_devices(branch.operands[0])
        return None if index is None or index.ndim != 1 else chosen_regions(branch.op, index)

    def _is_computed(self, node: Node, unknown: Set[int]) -> bool:
        if node.name in _CONSTANTS or self._dtypes[node.results[0]] is None:
            return False
        is_computed = node.name in COMPUTED or node.name == DYNAMIC_UPDATE_SLICE
        return is_computed and unknown.isdisjoint(node.operands)

    def _listed(self, code: Body) -> list[tuple[Node, bool, bool]]:
        """The steps of a block to evaluate: whether for integers, whether for zeros."""
        if code not in self._lists:
            evaluated = [n for n in code.nodes if n.name not in _CONSTANTS | DEVICE_IDS | {LEAVE}]
            marks = [(n, self._integers.lists(n), self._zero.lists(n)) for n in evaluated]
            self._lists[code] = [mark for mark in marks if any(mark[1:])]
        return self._lists[code]

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

    def _simulated(self, loop: Node) -> list[Carries] | None:
        """What a loop carries into each iteration; None if nobody knows how often it runs.

        The operands must be up to date.
        """
        condition, body = loop.bodies
        if loop not in self._walked or not self._integers.can(condition.returned[0]):
            return None
        carries = self._handed(loop.operands, body.arguments)
        history: list[Carries] = []
        steps = 1 + len(self._listed(condition)) + len(self._listed(body))
        while True:
            self._bind(condition.arguments, carries)
            self.forward(condition)
            goes_on = self.now[condition.returned[0]]
            if goes_on is None or goes_on.min() != goes_on.max():
                return None
            if not goes_on.all():
                break
            if history and _are_same_integers(history[-1], carries):
                self.endless.add(loop)  # what goes on once goes on for ever
                return None
            history.append(carries)
            self._budget.iterate(steps)
            self._bind(body.arguments, carries)
            self.forward(body)
            carries = self._handed(body.returned, body.arguments)
        self._bind(body.arguments, carries)
        self._bind(loop.results, self._handed(body.arguments, loop.results))
        return history

    def _after(self, loop: Node) -> None:
        """What is known of a loop's results."""
        history = self._simulated(loop)
        self.histories[loop] = history
        if history is not None:
            return
        for carry in carries(loop):
            if carry.returned == carry.argument:
                self._bind([carry.result], self._handed([carry.operand], [carry.result]))
            else:
                self._bind([carry.result], [(None, None)])

    def _computed(self, node: Node) -> Values | None:
        operands = [self.now[operand] for operand in node.operands]
        known = [operand for operand in operands if operand is not None]
        if len(known) != len(operands):
            return None
        shape, dtype = self._shapes[node.results[0]], self._dtypes[node.results[0]]
        if shape and all(is_splat(part) for part in known):
            result = computed_splat(node, known, shape)
            if result is not None:
                return converted(result, dtype)
        if shape is None or math.prod(shape) > _LARGEST:
            return None
        if node.name == DYNAMIC_UPDATE_SLICE:
            return updated(known[0], known[1], known[2:])
        result = apply(node.op, known)
        return None if result is None else converted(result, dtype)

    def _start(self, node: Node, outside: DeviceValues) -> None:
        """What is known all along: constants, ids, and what crosses a manual computation."""
        if node.name == "stablehlo.constant" and self.zeros.start(node):
            self._zero.given.add(node.results[0])
        if node.name in _CONSTANTS:
            number = node.results[0]
            self._note(number, self._constant(node.op))
        elif node.name in DEVICE_IDS or node.name in (ENTER, LEAVE):
            for number in node.results:
                value = self._program.values[number]
                if number not in self._program.kept and element_dtype(value.type) is not None:
                    self._note(number, outside.of(value))

    def _note(self, number: int, known: Values | None) -> None:
        self.now[number] = known
        if known is not None:
            self._integers.given.add(number)

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
