"""Which arguments of a training step are an optimizer's state, and what they are updated by.

    func @main(%w, %m, %batch) -> (%w1, %m1) {
      %g = …                                 // of %w and %batch: the gradient
      %m1 = stablehlo.add %m, %g             // %m is state: it comes back as %m1
      %w1 = stablehlo.subtract %w, %m1       // %w is a parameter: a product depends on it
    }

An argument is state if the program gives it back changed, by elementwise ops and reductions, and
nothing that multiplies matrices, gathers or loops depends on it: the moments of Adam and Lion, the
rows and columns of Adafactor. The momentum of Muon and the statistics of Shampoo are none.
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
ON_THE_WAY = ELEMENTWISE | {SHARDING_CONSTRAINT}  # from a state to what it comes back as
_FILLED = CONSTANTS | {BROADCAST}  # a rate, a scale: the same for all elements


class OptimizerState:
    """The state among the arguments of a block, which has no calls.

    `aliased`: by argument, the result that lies in its memory, where the program says so.
    """

    def __init__(self, block: ir.Block, aliased: Mapping[int, int]) -> None:
        self._block = block
        self._aliased = aliased
        self.arguments: list[ir.Value] = list(block.arguments)
        self.returned: list[ir.Value] = list(terminator(block).operands)
        self._results_of: dict[ir.Value, list[int]] = {}
        for number, value in enumerate(self.returned):
            self._results_of.setdefault(value, []).append(number)
        self._made: dict[int, list[int]] = {}  # by argument, what is found once
        # What a product, a gather, a loop or a call of a library depends on.
        steering: set[ir.Value] = set()
        for view in reversed(list(self._block.operations)):
            op = view.operation
            if op.name in _HEAVY or any(result in steering for result in op.results):
                steering.update(values_used_outside(op))
        self._steering = steering
        # The arguments that are state, and the results that they become.
        self.states = dict(self._find_states())

    def made_of(self, argument: int) -> list[int]:
        """The results that elementwise ops make of an argument, the nearest first."""
        if argument not in self._made:
            self._made[argument] = self._followed(self.arguments[argument])
        return self._made[argument]

    def is_parameter(self, argument: int) -> bool:
        """Whether an argument is given back by elementwise ops, and the forward depends on it."""
        value = self.arguments[argument]
        if not isinstance(value.type, ir.RankedTensorType) or value not in self._steering:
            return False
        return is_float(value.type) and bool(self.made_of(argument))

    def parameters(self) -> dict[int, int]:
        """The argument that each result is the new value of, where that is a parameter."""
        of: dict[int, int] = {}
        for number in range(len(self.arguments)):
            if number not in self.states and self.is_parameter(number):
                for result in self.made_of(number):
                    of.setdefault(result, number)
        return of

    def gradients(self, argument: int) -> list[ir.Value]:
        """What a state is updated by: values of its shape that no elementwise op makes of
        others."""
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
        """Arguments that are state, each with the result that it is given back as: the one that it
        shares memory with, or else the one that fewest elementwise ops make of it."""
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

    def _followed(self, value: ir.Value) -> list[int]:
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
