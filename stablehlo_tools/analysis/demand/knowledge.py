"""Evaluates each value before the run, on every device, iteration by iteration.

Two kinds of facts are evaluated, both forwards: integers that follow from constants, device ids and
counters, and zeros, for each device or each place. The values that can be known at all are found
first, once, so that an iteration evaluates only those. A loop's carry can be known if its initial
value can, and if its next value can under that assumption.

A permute of zeros has no effect: devices that receive nothing have zeros, too. A product is zeros
only if both factors are, because zero times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from stablehlo_tools.analysis.dataflow import Body, Node, carries, handed_on, solve
from stablehlo_tools.analysis.demand.demand_program import (
    ENTER,
    LEAVE,
    DemandProgram,
    DimMap,
    ElementAccess,
    Need,
)
from stablehlo_tools.analysis.device_values import (
    COMPUTED,
    DeviceValues,
    Values,
    apply,
    chosen_regions,
    clamped_starts,
    element_dtype,
)
from stablehlo_tools.dialect.dimensions import static_shape
from stablehlo_tools.dialect.names import (
    BARRIER,
    COLLECTIVE_PERMUTE,
    CONSTANT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    PAD,
    SELECT,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    DEVICE_IDS,
    ELEMENTWISE,
    LAYOUT,
    Trait,
    ops_with,
)
from stablehlo_tools.ir.values import splat_of

_MOVED = LAYOUT | ops_with(Trait.PIECE) - {GATHER}


def is_splat(values: Values) -> bool:
    """Returns True if a tensor is one number on each device; it checks only shape and strides."""
    if values.size == len(values):
        return True
    parts = zip(values.strides[1:], values.shape[1:], strict=True)
    return values.size > 0 and all(stride == 0 or size == 1 for stride, size in parts)


def lone(values: Values) -> Values:
    """Returns the number of a splat, for each device."""
    return values[(slice(None), *[0] * (values.ndim - 1))]


def make_splat(numbers: Values, shape: tuple[int, ...]) -> Values:
    """Returns a splat of one number for each device."""
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (len(numbers), *shape))


def computed_splat(node: Node, operands: list[Values], shape: tuple[int, ...]) -> Values | None:
    """Returns the result of an op on splats; None if it is not a splat or unknown."""
    if node.name in _MOVED:
        return make_splat(lone(operands[0]), shape)
    if node.name not in ELEMENTWISE:
        return None
    computed = apply(node.op, [lone(operand) for operand in operands])
    return None if computed is None else make_splat(computed, shape)


def convert_values(values: Values, dtype: np.dtype[Any] | None) -> Values:
    """Returns the values as another NumPy type; a view stays one."""
    if values.dtype == dtype or dtype is None:
        return values
    if not is_splat(values) or values.ndim == 1:
        return values.astype(dtype)
    return make_splat(lone(values).astype(dtype), values.shape[1:])


def update_slice(whole: Values, part: Values, starts: list[Values]) -> Values:
    """Returns the result of dynamic_update_slice on known tensors."""
    devices = max(len(array) for array in (whole, part, *starts))
    result = np.array(np.broadcast_to(whole, (devices, *whole.shape[1:])))
    begins = [
        np.broadcast_to(clamped_starts(start, size, extent), devices)
        for start, size, extent in zip(starts, part.shape[1:], whole.shape[1:], strict=True)
    ]
    for device in range(devices):
        window = tuple(
            slice(int(begin[device]), int(begin[device]) + size)
            for begin, size in zip(begins, part.shape[1:], strict=True)
        )
        result[(device, *window)] = part[device % len(part)]
    return result


def select_region_rows(
    chosen: Values | None, parts: list[Values | None], most: int
) -> Values | None:
    """Returns the rows of the region that each device runs.

    None if a part is unknown, or if the parts have more than `most` numbers for each device.
    """
    known = [part for part in parts if part is not None]
    if chosen is None or len(known) != len(parts):
        return None
    if sum(part.size for part in known) > most * len(chosen):
        return None
    return np.stack(known)[chosen, np.arange(len(chosen))]


# Zeros of one operand become zeros of the result.
KEEPING = ops_with(Trait.ZERO_OF_ZERO) | {SHARDING_CONSTRAINT}
# Zeros of all operands become zeros of the result.
JOINING = ops_with(Trait.ZERO_OF_ZEROS)


def map_zero_places(zeros: Need, places: int, dim_map: DimMap | None) -> Need:
    """Returns the zero places of a result that holds only elements of one operand."""
    if dim_map is None:
        return np.broadcast_to(zeros.all(axis=1, keepdims=True), (len(zeros), places))
    if dim_map.is_whole:
        return zeros
    result_zeros = np.ones((len(zeros), places), np.bool_)
    result_zeros[:, dim_map.results] = zeros[:, dim_map.operands]
    return result_zeros


def select_zeros(predicate: Values | None, one: Need, other: Need, dimension: int | None) -> Need:
    """Returns the places where the result of a select is zeros.

    If the predicate is unknown, both sides must be zeros.
    """
    if predicate is None:
        return one & other
    if is_splat(predicate):
        return np.where(lone(predicate)[:, None], one, other)
    either = one | ~places_with_value(predicate, True, dimension)
    return either & (other | ~places_with_value(predicate, False, dimension))


def places_with_value(predicate: Values, wanted: bool, dimension: int | None) -> Need:
    """Returns, by device and place, if a known predicate has a wanted value at any element."""
    if is_splat(predicate):
        return (lone(predicate) == wanted)[:, None]
    mask = predicate == wanted
    if dimension is None:
        return mask.reshape(len(mask), -1).any(axis=1)[:, None]
    along = np.moveaxis(mask, 1 + dimension, 1)
    return along.reshape(len(mask), along.shape[1], -1).any(axis=2)


def window(access: ElementAccess, index: Values, extent: int) -> Need:
    """Returns the places that an access touches on each device; `index` has one number for each."""
    places = np.arange(extent)
    starts = index.reshape(len(index))
    if access.clamps:
        starts = clamped_starts(starts, access.size, extent)
    starts = starts.astype(np.int64)
    return (places >= starts[:, None]) & (places < starts[:, None] + access.size)


Rule = Callable[[], Need | None]


class ZeroTracking:
    """Tracks zeros: `now[n]` says where value n is zeros; None if no place is known to be.

    `known` returns the known integers of a value, with a row for each device.
    """

    def __init__(self, program: DemandProgram, known: Callable[[int], Values | None]) -> None:
        self.now: list[Need | None] = [None] * len(program.types)
        self._tracked = program.tracked
        self._known = known
        self._devices = program.devices
        self._program = program
        self._outside = program.is_global
        self._rules: dict[Node, Rule] = {}

    def start(self, node: Node) -> bool:
        """Notes a constant of positive zeros, and returns True if it is one."""
        number = splat_of(node.op.results[0])
        if number is None:
            return False
        parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
        if any(part != 0 or np.signbit(part) for part in parts):
            return False
        shape = (self._devices, self._tracked.counts[node.results[0]])
        self.now[node.results[0]] = np.broadcast_to(np.True_, shape)
        return True

    def may_be(self, node: Node, unknown: Set[int]) -> bool:
        """Returns True if a result may be known to be zeros, given the values that may not."""
        if self._outside and self._program.computation(node) is None:
            return False
        known = [operand not in unknown for operand in node.operands]
        if node.name == COLLECTIVE_PERMUTE:
            return True  # on devices that are not a target
        if node.name in (SELECT, DYNAMIC_UPDATE_SLICE):
            return any(known)
        if node.name in KEEPING or node.name == DYNAMIC_SLICE:
            return known[0]
        return (node.name in JOINING or node.name == PAD) and all(known)

    def evaluate(self, node: Node) -> None:
        """Updates the result of an op."""
        if node not in self._rules:
            self._rules[node] = self._rule(node)
        zeros = self._rules[node]()
        self.now[node.results[0]] = zeros if zeros is not None and zeros.any() else None

    def merge(self, node: Node, chosen: Values | None) -> None:
        """Updates the results of an `if` or `case`."""
        for result, returned in handed_on(node):
            parts = [self.zeros_for_receiver(end, result) for end in returned]
            if chosen is None:
                zeros = np.logical_and.reduce(parts)
            else:
                zeros = np.stack(parts)[chosen, np.arange(self._devices)]
            self.now[result] = zeros if zeros.any() else None

    def zeros_for_receiver(self, value: int, to: int) -> Need:
        """Returns the places where a value is zeros, as places of the value that receives it."""
        zero = self._zeros_of(value)
        if self._tracked.alike(value, to):
            return zero
        return map_zero_places(zero, self._tracked.counts[to], None)

    def _zeros_of(self, value: int) -> Need:
        zeros, shape = self.now[value], (self._devices, self._tracked.counts[value])
        return np.zeros(shape, np.bool_) if zeros is None else zeros

    def _zeros_in_result(self, value: int, result: int, dim_map: DimMap | None) -> Need:
        return map_zero_places(self._zeros_of(value), self._tracked.counts[result], dim_map)

    def _rule(self, node: Node) -> Rule:
        result, name = node.results[0], node.name
        if name == COLLECTIVE_PERMUTE:
            return self._permute(node)
        parts = [(v, self._tracked.dim_map(node, i)) for i, v in enumerate(node.operands)]
        if name == SELECT:
            (_, _), one, other = parts
            return lambda: select_zeros(
                self._known(node.operands[0]),
                self._zeros_in_result(one[0], result, one[1]),
                self._zeros_in_result(other[0], result, other[1]),
                self._tracked.dimensions[result],
            )
        if name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE):
            return self._access(node)
        if name == PAD:
            parts[1] = (node.operands[1], None)
            dim_map = parts[0][1]
            if dim_map is not None and not dim_map.is_whole:

                def pad_rule() -> Need:
                    beside = self._zeros_in_result(node.operands[1], result, None)
                    inside = np.zeros_like(beside)
                    inside[:, dim_map.results] = True
                    return np.where(
                        inside, self._zeros_in_result(node.operands[0], result, dim_map), beside
                    )

                return pad_rule
        taken = parts[:1] if name in KEEPING else parts
        return lambda: np.logical_and.reduce(
            [self._zeros_in_result(v, result, dim_map) for v, dim_map in taken]
        )

    def _permute(self, node: Node) -> Rule:
        """Returns the rule of a permute: zeros on targets of zeros, and if nothing is received."""
        collective = self._program.communication(node)
        groups = self._program.facts.groups(collective) if collective is not None else None
        if groups is None:
            return lambda: None
        sources, targets = [source for source, _ in groups], [target for _, target in groups]
        operand, result = node.operands[0], node.results[0]
        dim_map = self._tracked.dim_map(node, 0)

        def rule() -> Need:
            zeros = self._zeros_in_result(operand, result, dim_map)
            result_zeros = np.ones_like(zeros)
            result_zeros[targets] = zeros[sources]
            return result_zeros

        return rule

    def _access(self, node: Node) -> Rule:
        buffer, result = node.operands[0], node.results[0]
        reads = node.name == DYNAMIC_SLICE
        access = self._tracked.access(node)
        extent = self._tracked.counts[buffer]
        whole = self._tracked.dim_map(node, 0)

        def rule() -> Need:
            index = self._known(node.operands[access.index]) if access is not None else None
            if access is None or index is None:
                kept = self._zeros_in_result(buffer, result, whole)
                return (
                    kept if reads else kept & self._zeros_in_result(node.operands[1], result, None)
                )
            at = window(access, index, extent)
            if reads:
                inside = (self._zeros_of(buffer) | ~at).all(axis=1, keepdims=True)
                return np.broadcast_to(inside, (self._devices, self._tracked.counts[result]))
            written = self._zeros_of(node.operands[1]).all(axis=1, keepdims=True)
            before = self._zeros_of(buffer)
            return np.where(at, written if access.overwrites else written & before, before)

        return rule


class Marking:
    """The values that can be known: all except those that depend on unknown ones.

    `given` are known from the start. `plain` returns True if the result of an op with one result
    can be known, given the unknown values. `partly` is True if a branch's result can be known when
    only some regions' are. Only the invariant carries of a loop that is not walked can be known.
    """

    def __init__(
        self,
        program: DemandProgram,
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
        """Finds the largest set of values that can be known.

        Unknown values spread, also through loops, to a fixed point.
        """
        start = dict.fromkeys(self._program.root.arguments, True)

        def lose(node: Node, unknown: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
            lost = self._lost_of(node, unknown.keys())
            return ((number, True) for number in lost if number not in self.given)

        self._unknown = solve(self._program, start, lose, everywhere=True).keys()

    def can(self, number: int) -> bool:
        """Returns True if a value can be known."""
        return number not in self._unknown

    def needs_evaluation(self, node: Node) -> bool:
        """Returns True if an op must be evaluated in each iteration."""
        return any(map(self.can, node.results)) or any(
            any(map(self.can, body.returned)) or any(map(self.needs_evaluation, body.nodes))
            for body in node.bodies
        )

    def _lost_of(self, node: Node, unknown: Set[int]) -> Iterable[int]:
        """Yields the values of an op that cannot be known, given those that cannot."""
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

_CONSTANTS = frozenset({CONSTANT, IOTA})
_LARGEST = 1 << 12  # elements of a tensor that is computed in full


class DemandTooLargeError(Exception):
    """The analysis would exceed its budget."""


class StepBudget:
    """The steps that remain, and the iterations that remain of all loops together."""

    def __init__(self, steps: int, iterations: int) -> None:
        self.left = steps
        self.iterations = iterations

    def spend(self, steps: int) -> None:
        """Spends steps. Raises DemandTooLargeError if that is more than remains."""
        self.left -= steps
        if self.left < 0:
            raise DemandTooLargeError

    def iterate(self, steps: int) -> None:
        """Spends an iteration and its steps. Raises DemandTooLargeError if too few remain."""
        self.iterations -= 1
        if self.iterations < 0:
            raise DemandTooLargeError
        self.spend(steps)


class Knowledge:
    """The current knowledge of each value; `forward` updates the values of a block.

    `walked` are the loops that are followed. `histories` has the carries before each iteration of
    their last run; None if the trip count is unknown. `endless` are the loops that never end.
    """

    def __init__(self, program: DemandProgram, walked: Set[Node], budget: StepBudget) -> None:
        self.now: list[Values | None] = [None] * len(program.types)
        self.zeros = ZeroTracking(program, self.of_devices)
        self.histories: dict[Node, list[Carries] | None] = {}
        self.endless: set[Node] = set()
        self._program = program
        self._devices = program.devices
        self._budget = budget
        self._walked = walked
        self._shapes = [static_shape(type_) for type_ in program.types]
        self._dtypes = [element_dtype(type_) for type_ in program.types]
        self._integers = Marking(program, self._is_computed, walked, partly=False)
        self._zero = Marking(program, self.zeros.may_be, walked, partly=True)
        self._lists: dict[Body, list[tuple[Node, bool, bool]]] = {}
        outside = DeviceValues(program.module, program.facts)
        for node in program.nodes:
            self._start(node, outside)
        self._integers.mark()
        self._zero.mark()

    def forward(self, code: Body) -> None:
        """Evaluates a block whose arguments are up to date."""
        for node, integer, zero in self._ops_to_evaluate(code):
            if node.name == WHILE:
                self.histories[node] = self._simulate_loop(node)
                if self.histories[node] is not None:
                    continue
                for carry in carries(node):
                    known: Carries = [(None, None)]
                    if carry.returned == carry.argument:
                        known = self._carries_for_receivers([carry.operand], [carry.result])
                    self._bind([carry.result], known)
            elif node.name in BRANCHES:
                for region in node.bodies:
                    self.forward(region)
                chosen = self.regions_run(node)
                for result, returned in handed_on(node):
                    self.now[result] = select_region_rows(
                        chosen, [*map(self.of_devices, returned)], _LARGEST
                    )
                self.zeros.merge(node, chosen)
            elif node.name == BARRIER:
                self._bind(node.results, self._carries(node.operands))
            elif node.name == ENTER:
                kept = self._program.kept
                inside = [number for number in node.results if number in kept]
                self._bind(inside, self._carries([kept[number] for number in inside]))
            else:
                if integer:
                    self.now[node.results[0]] = self._compute_result(node)
                if zero:
                    self.zeros.evaluate(node)

    def enter(self, body: Body, carries: Carries) -> None:
        """Updates a loop's body in one iteration."""
        self._budget.spend(len(self._ops_to_evaluate(body)))
        self._bind(body.arguments, carries)
        self.forward(body)

    def of_devices(self, value: int) -> Values | None:
        """Returns the known value of an integer tensor, a row for each device by its flattened id.

        None if it is unknown. (`now` holds a single row if all devices have the same value.)
        """
        known = self.now[value]
        if known is None or len(known) == self._devices:
            return known
        return np.broadcast_to(known, (self._devices, *known.shape[1:]))

    def regions_run(self, branch: Node) -> Values | None:
        """Returns the region of an `if` or `case` that each device runs; None if it is unknown."""
        index = self.of_devices(branch.operands[0])
        return None if index is None or index.ndim != 1 else chosen_regions(branch.op, index)

    def _is_computed(self, node: Node, unknown: Set[int]) -> bool:
        if node.name in _CONSTANTS or self._dtypes[node.results[0]] is None:
            return False
        is_computed = node.name in COMPUTED or node.name == DYNAMIC_UPDATE_SLICE
        return is_computed and unknown.isdisjoint(node.operands)

    def _ops_to_evaluate(self, code: Body) -> list[tuple[Node, bool, bool]]:
        """Returns the ops of a block to evaluate, each with flags for integers and for zeros."""
        if code not in self._lists:
            evaluated = [n for n in code.nodes if n.name not in _CONSTANTS | DEVICE_IDS | {LEAVE}]
            marks = [
                (n, self._integers.needs_evaluation(n), self._zero.needs_evaluation(n))
                for n in evaluated
            ]
            self._lists[code] = [mark for mark in marks if any(mark[1:])]
        return self._lists[code]

    def _carries(self, numbers: Sequence[int]) -> Carries:
        return [(self.now[number], self.zeros.now[number]) for number in numbers]

    def _bind(self, numbers: Sequence[int], carries: Carries) -> None:
        for number, (known, zero) in zip(numbers, carries, strict=True):
            self.now[number] = known
            self.zeros.now[number] = zero

    def _carries_for_receivers(self, numbers: Sequence[int], to: Sequence[int]) -> Carries:
        """Returns the knowledge of values, in the places of the values that receive them."""
        return [
            (
                self.now[n],
                None if self.zeros.now[n] is None else self.zeros.zeros_for_receiver(n, taker),
            )
            for n, taker in zip(numbers, to, strict=True)
        ]

    def _simulate_loop(self, loop: Node) -> list[Carries] | None:
        """Returns the carries before each iteration of a loop; None if its trip count is unknown.

        The operands must be up to date.
        """
        condition, body = loop.bodies
        if loop not in self._walked or not self._integers.can(condition.returned[0]):
            return None
        carries = self._carries_for_receivers(loop.operands, body.arguments)
        history: list[Carries] = []
        steps = 1 + len(self._ops_to_evaluate(condition)) + len(self._ops_to_evaluate(body))
        while True:
            self._bind(condition.arguments, carries)
            self.forward(condition)
            goes_on = self.now[condition.returned[0]]
            # A loop is followed only if all devices run it equally often.
            if goes_on is None or goes_on.min() != goes_on.max():
                return None
            if not goes_on.all():
                break
            if history and all(
                one is other
                or (one is not None and other is not None and np.array_equal(one, other))
                for (one, _), (other, _) in zip(history[-1], carries, strict=True)
            ):
                self.endless.add(loop)  # equal carries: it never ends
                return None
            history.append(carries)
            self._budget.iterate(steps)
            self._bind(body.arguments, carries)
            self.forward(body)
            carries = self._carries_for_receivers(body.returned, body.arguments)
        self._bind(body.arguments, carries)
        self._bind(loop.results, self._carries_for_receivers(body.arguments, loop.results))
        return history

    def _compute_result(self, node: Node) -> Values | None:
        operands = [self.now[operand] for operand in node.operands]
        known = [operand for operand in operands if operand is not None]
        if len(known) != len(operands):
            return None
        shape, dtype = self._shapes[node.results[0]], self._dtypes[node.results[0]]
        if shape and all(is_splat(part) for part in known):
            result = computed_splat(node, known, shape)
            if result is not None:
                return convert_values(result, dtype)
        if shape is None or math.prod(shape) > _LARGEST:
            return None
        if node.name == DYNAMIC_UPDATE_SLICE:
            return update_slice(known[0], known[1], known[2:])
        result = apply(node.op, known)
        return None if result is None else convert_values(result, dtype)

    def _start(self, node: Node, outside: DeviceValues) -> None:
        """Notes values known from the start: constants, ids, and edges of manual computations."""
        if node.name == CONSTANT and self.zeros.start(node):
            self._zero.given.add(node.results[0])
        if node.name in _CONSTANTS:
            number = node.results[0]
            shape, dtype, known = self._shapes[number], self._dtypes[number], None
            splat = splat_of(node.op.results[0]) if node.name == CONSTANT else None
            if shape is not None and dtype is not None and splat is not None:
                known = np.broadcast_to(np.array(splat).astype(dtype), (1, *shape))
            elif shape is not None and dtype is not None and math.prod(shape) <= _LARGEST:
                known = apply(node.op, [])
            self._note(number, None if known is None else convert_values(known, dtype))
        elif node.name in DEVICE_IDS or node.name in (ENTER, LEAVE):
            for number in node.results:
                value = self._program.values[number]
                if number not in self._program.kept and element_dtype(value.type) is not None:
                    self._note(number, outside.known_tensor(value))

    def _note(self, number: int, known: Values | None) -> None:
        self.now[number] = known
        if known is not None:
            self._integers.given.add(number)
