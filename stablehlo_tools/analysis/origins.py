"""Where values come from, across calls, loops, branches and manual computations.

What control flow hands on is the same value elsewhere; what an op computes is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, COMPUTATIONS
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.symbols import FUNCTION, callee_name, functions_by_name, symbol_name
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk

_BARRIER = "stablehlo.optimization_barrier"


class Origins:
    """Follows the values of one module backwards."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module  # which ends its ops when nobody holds it
        self._entry = entry_function(module)
        self._functions = functions_by_name(module)
        self._calls: dict[str, list[ir.Operation]] = {}
        self.ops: list[ir.Operation] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            self.ops.append(op)
            if op.name in CALLS:
                self._calls.setdefault(callee_name(op), []).append(op)
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)

    @property
    def arguments(self) -> int:
        """How many arguments the program has."""
        return len(self._entry.regions[0].blocks[0].arguments)

    def argument(self, value: ir.Value) -> int | None:
        """Which argument of the program a value is; None for all others."""
        if producer(value) is not None:
            return None
        argument = ir.BlockArgument(value)
        return argument.arg_number if argument.owner.owner.operation == self._entry else None

    def handed(self, value: ir.Value) -> Sequence[ir.Value] | None:
        """The values that this one may be elsewhere; None for what an op computes."""
        op = producer(value)
        if op is None:
            argument = ir.BlockArgument(value)
            return self._into(argument.owner.owner.operation, argument.arg_number)
        number = ir.OpResult(value).result_number
        if op.name == _BARRIER:
            return [op.operands[number]]
        if op.name == WHILE:
            return _carried(op, number)
        if op.name in BRANCHES or op.name in COMPUTATIONS:
            return [terminator(region.blocks[0]).operands[number] for region in op.regions]
        if op.name not in CALLS:
            return None
        callee = self._functions.get(callee_name(op))
        if callee is None or not len(callee.regions[0].blocks):
            return []
        return [terminator(callee.regions[0].blocks[0]).operands[number]]

    def _into(self, op: ir.Operation, number: int) -> Sequence[ir.Value]:
        """What an argument of an op's region is given; nothing for those of a reduction."""
        if op.name == FUNCTION:
            calls = self._calls.get(symbol_name(op), [])
            return [call.operands[number] for call in calls if number < len(call.operands)]
        if op.name == WHILE:
            return _carried(op, number)
        return [op.operands[number]] if op.name in COMPUTATIONS else []


def _carried(loop: ir.Operation, number: int) -> list[ir.Value]:
    return [loop.operands[number], terminator(loop.regions[1].blocks[0]).operands[number]]
