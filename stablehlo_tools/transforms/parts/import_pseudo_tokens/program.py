"""What recognition asks of a module, gathered in one walk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CALL
from stablehlo_tools.ir.symbols import FUNCTION, callee_name, functions_by_name
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.import_pseudo_tokens.patterns import TOKENED, is_zero_constant


@dataclass(frozen=True, eq=False)
class Program:
    """A module's functions, calls, zeros and collectives. An op's key is its first result."""

    functions: dict[str, ir.Operation]
    calls: dict[str, list[ir.Operation]] = field(
        default_factory=lambda: defaultdict[str, list[ir.Operation]](list)
    )
    zeros: list[ir.Value] = field(default_factory=list[ir.Value])
    tokened: list[ir.Operation] = field(default_factory=list[ir.Operation])
    positions: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])

    @staticmethod
    def of(module: ir.Module) -> Program:
        """Walks the module once."""
        program = Program(functions_by_name(module))

        def visit(op: ir.Operation) -> ir.WalkResult:
            if len(op.results):
                program.positions[op.results[0]] = len(program.positions)
            if op.name in TOKENED:
                program.tokened.append(op)
            elif op.name == CALL:
                program.calls[callee_name(op)].append(op)
            elif is_zero_constant(op):
                program.zeros.append(op.results[0])
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)
        return program

    def position(self, op: ir.Operation) -> int:
        """The place in the program of an op that has results."""
        return self.positions[op.results[0]]

    def callee(self, call: ir.Operation) -> ir.Operation | None:
        """The function of one block that a call leads to and that only calls reach."""
        function = self.functions.get(callee_name(call))
        if function is None or is_public(function) or len(function.regions[0].blocks) != 1:
            return None
        return function

    def entries(self) -> Sequence[tuple[str, ir.Operation]]:
        """The public functions that have a body, by name: `main` alone, where there is one."""
        public = [
            (name, function)
            for name, function in self.functions.items()
            if is_public(function) and len(function.regions[0].blocks)
        ]
        return [entry for entry in public if entry[0] == "main"] or public


def enclosing_function(op: ir.Operation) -> ir.Operation:
    """The function that an op stands in."""
    while op.name != FUNCTION:
        parent = op.parent
        assert parent is not None, "every token stands in a function"
        op = parent
    return op
