"""Finds the arguments of a training step that are an optimizer's state, and their gradients.

    func @main(%w, %m, %batch) -> (%w1, %m1) {
      %g = …                                 // of %w and %batch: the gradient
      %m1 = stablehlo.add %m, %g             // %m is state: its new value is %m1
      %w1 = stablehlo.subtract %w, %m1       // %w is a parameter: a product depends on it
    }

An argument is state if the program returns it changed, by elementwise ops and reductions, and no
matrix product, gather or loop depends on it: the moments of Adam and Lion, the rows and columns of
Adafactor. The momentum of Muon and the statistics of Shampoo are not state in this sense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BROADCAST, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import CONSTANTS, is_float, producer
from stablehlo_tools.ir.walk import terminator, values_used_outside

_HEAVY = ops_with_any(Trait.CONTRACTION | Trait.LOOP | Trait.BRANCH | Trait.OPAQUE) | ops_with(
    Trait.INDEXED
)
ON_THE_WAY = ELEMENTWISE | {SHARDING_CONSTRAINT}  # ops between a state and its new value
_FILLED = CONSTANTS | {BROADCAST}  # a rate, a scale: the same for all elements


class OptimizerState:
    """The state among the arguments of a block without calls.

    `aliased` maps arguments to the results that share their memory, if the program states that.
    """

    def __init__(self, block: ir.Block, aliased: Mapping[int, int]) -> None:
        self._block = block
        self._aliased = aliased
        self.arguments: list[ir.Value] = list(block.arguments)
        self.returned: list[ir.Value] = list(terminator(block).operands)
        self._results_of: dict[ir.Value, list[int]] = {}
        for number, value in enumerate(self.returned):
            self._results_of.setdefault(value, []).append(number)
        self._made: dict[int, list[int]] = {}  # cache of `made_of`
        # Values on which a product, a gather, a loop or a call of a library depends.
        steering: set[ir.Value] = set()
        for view in reversed(list(self._block.operations)):
            op = view.operation
            if op.name in _HEAVY or any(result in steering for result in op.results):
                steering.update(values_used_outside(op))
        self._steering = steering
        # Maps the arguments that are state to the results with their new values.
        self.states = dict(self._find_states())

    def made_of(self, argument: int) -> list[int]:
        """Returns the results that elementwise ops make of an argument, the nearest first."""
        if argument not in self._made:
            self._made[argument] = self._reachable_results(self.arguments[argument])
        return self._made[argument]

    def is_parameter(self, argument: int) -> bool:
        """Returns True if a result is made of an argument by elementwise ops, and a product, a
        gather or a loop depends on the argument."""
        value = self.arguments[argument]
        if not isinstance(value.type, ir.RankedTensorType) or value not in self._steering:
            return False
        return is_float(value.type) and bool(self.made_of(argument))

    def parameters(self) -> dict[int, int]:
        """Maps each result that is the new value of a parameter to the parameter's argument
        number."""
        of: dict[int, int] = {}
        for number in range(len(self.arguments)):
            if number not in self.states and self.is_parameter(number):
                for result in self.made_of(number):
                    of.setdefault(result, number)
        return of

    def gradients(self, argument: int) -> list[ir.Value]:
        """Returns the values that update a state: those of its shape at which its chain of
        elementwise ops begins."""
        shape = shape_of(self.arguments[argument])
        found: list[ir.Value] = []
        pending, seen = [self.returned[self.states[argument]]], set[ir.Value]()
        while pending:
            value = pending.pop()
            op = producer(value)
            if value in seen or op is None or shape_of(value) != shape:
                continue
            seen.add(value)
            if op.name in ON_THE_WAY:
                pending += op.operands
            elif op.name not in _FILLED and is_float(value.type):
                found.append(value)
        return found

    def _find_states(self) -> Iterator[tuple[int, int]]:
        """Yields each argument that is state with the result that is its new value. That is the
        result that shares its memory or, without aliasing, the one that fewest elementwise ops make
        of it."""
        taken: set[int] = set()
        for number, value in enumerate(self.arguments):
            type_ = value.type
            if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
                continue
            if not type_.rank or not is_float(type_) or value in self._steering:
                continue
            reached = [n for n in self.made_of(number) if n not in taken]
            aliased = self._aliased.get(number)
            if aliased is None:
                result = next((n for n in reached if self.returned[n].type == type_), None)
            else:
                result = aliased if aliased in reached else None
            if result is not None:
                taken.add(result)
                yield number, result

    def _reachable_results(self, value: ir.Value) -> list[int]:
        shape = shape_of(value)
        layer, seen = [value], {value}
        found: list[int] = []
        while layer:
            found += sorted(n for each in layer for n in self._results_of.get(each, ()))
            following: list[ir.Value] = []
            for each in layer:
                for use in each.uses:
                    op = use.owner.operation
                    if op.name not in ON_THE_WAY or op.results[0] in seen:
                        continue
                    if shape_of(op.results[0]) == shape:
                        seen.add(op.results[0])
                        following.append(op.results[0])
            layer = following
        return list(dict.fromkeys(found))
