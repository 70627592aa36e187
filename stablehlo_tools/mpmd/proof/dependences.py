"""Finds the arguments that each result of a function depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dataflow import captured_values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, CASE, IF, WHILE
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import callee_name, functions_by_name, terminator

_CHOICES = frozenset({IF, CASE})
_NOTHING = frozenset[int]()
Dependence = frozenset[int]


@dataclass
class Dependences:
    """The dependences of the functions of a module, each function read once.

    The results of an op depend on all of its operands. Barriers, loop carries, branches and calls
    are tracked element by element. The trip count of a loop, and the choice of a branch, count for
    all of their results.
    """

    module: ir.Module
    _known: dict[str, tuple[Dependence, ...]] = field(
        default_factory=dict[str, tuple[Dependence, ...]]
    )
    _functions: dict[str, ir.Operation] = field(default_factory=dict[str, ir.Operation])
    _values: dict[str, dict[ir.Value, Dependence]] = field(
        default_factory=dict[str, dict[ir.Value, Dependence]]
    )

    def result_dependences(self, name: str) -> tuple[Dependence, ...]:
        """Returns the numbers of the arguments that each result of a function depends on."""
        if name in self._known:
            return self._known[name]
        if not self._functions:
            self._functions = functions_by_name(self.module)
        block = Function(self._functions[name]).body
        values: dict[ir.Value, Dependence] = {
            argument: frozenset({number}) for number, argument in enumerate(block.arguments)
        }
        self._values[name] = values
        self._known[name] = self._block(block, values)
        return self._known[name]

    def takers(self, name: str, argument: int) -> list[Dependence]:
        """Returns the dependences of each op in a function's body that reads an argument."""
        self.result_dependences(name)
        block, values = Function(self._functions[name]).body, self._values[name]
        owners = [use.owner.operation for use in block.arguments[argument].uses]
        return [
            _join_dependences(values.get(result, _NOTHING) for result in owner.results)
            for owner in owners
            if owner.block == block and len(owner.results)
        ]

    def _block(self, block: ir.Block, values: dict[ir.Value, Dependence]) -> tuple[Dependence, ...]:
        """Returns the dependences of the block's results, and adds those of its ops to `values`."""
        for view in block.operations:
            op = view.operation
            results = op.results
            if not len(results):
                continue
            dependences = self._op(op, values)
            values.update(zip(results, dependences, strict=True))
        return tuple(values.get(value, _NOTHING) for value in terminator(block).operands)

    def _op(self, op: ir.Operation, values: dict[ir.Value, Dependence]) -> Sequence[Dependence]:
        operands = [values.get(operand, _NOTHING) for operand in op.operands]
        if op.name == BARRIER:
            return operands
        if op.name in CALLS:
            called = self.result_dependences(callee_name(op))
            return [_join_dependences(operands[number] for number in inner) for inner in called]
        if op.name == WHILE:
            return self._loop(op, operands, values)
        if op.name in _CHOICES:
            decided = operands[0]
            branches = [self._block(region.blocks[0], dict(values)) for region in op.regions]
            return [
                _join_dependences((decided, *results)) for results in zip(*branches, strict=True)
            ]
        outside = [values.get(value, _NOTHING) for value in captured_values(op)]
        return [_join_dependences([*operands, *outside])] * len(op.results)

    def _loop(
        self, op: ir.Operation, carried: list[Dependence], values: dict[ir.Value, Dependence]
    ) -> Sequence[Dependence]:
        condition, body = (region.blocks[0] for region in op.regions)
        # Up to a fixpoint: a carry may depend on an argument only after several iterations.
        while True:
            (decided,) = self._inside(condition, carried, values)
            ends = self._inside(body, carried, values)
            grown = [_join_dependences(pair) for pair in zip(carried, ends, strict=True)]
            if grown == carried:
                return [_join_dependences((one, decided)) for one in carried]
            carried = grown

    def _inside(
        self, block: ir.Block, carried: list[Dependence], values: dict[ir.Value, Dependence]
    ) -> tuple[Dependence, ...]:
        return self._block(block, values | dict(zip(block.arguments, carried, strict=True)))


def _join_dependences(parts: Iterable[Dependence]) -> Dependence:
    return _NOTHING.union(*parts)
