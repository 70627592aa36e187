"""Builds the module that runs a program in the StableHLO reference interpreter.

Its `main` takes and gives bit patterns only (unsigned integers of 8 to 64 bits, those of one device
after those of another; a complex tensor is two), so that NaNs cross unharmed and every element type
can be given from NumPy:

    %in = stablehlo.bitcast_convert %bits : (tensor<4xui32>) -> tensor<4xf32>   // for each input
    %out:2 = "interpreter.run_parallel"(%in, …) {programs = [[@verified, @verified]]}
    %bits = stablehlo.bitcast_convert %out#0 : (tensor<4xf32>) -> tensor<4xui32>
"""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.symbols import symbol_name
from stablehlo_tools.verify.device_grid import is_partitioned
from stablehlo_tools.verify.element_types import ElementType, Kind, element_type, real_part
from stablehlo_tools.verify.interpreter_collectives import separate_rendezvous
from stablehlo_tools.verify.signatures import Signature, Value

MOST_DEVICES = 2
_CONSTRAINT = "sdy.sharding_constraint"
_CREATE_TOKEN = "stablehlo.create_token"


def interpreter_grid(module: ir.Module, grid: ProcessGrid) -> ProcessGrid:
    """How the interpreter can run the module: on `grid`, or as one program where it only has
    shardings, which say nothing about values.

    Raises a located ToolError for what the interpreter lacks.
    """

    problems: list[ToolError] = []

    def visit(op: ir.Operation) -> ir.WalkResult:  # an exception would not get out of a walk whole
        problem = _unsupported(op)
        if problem is None:
            return ir.WalkResult.ADVANCE
        problems.append(problem)
        return ir.WalkResult.INTERRUPT

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    if problems:
        raise problems[0]
    if is_partitioned(module) and not find_collectives(module):
        return ProcessGrid()
    if grid.size > MOST_DEVICES:
        raise ToolError(
            f"the reference interpreter is trusted with {MOST_DEVICES} devices, and this needs "
            f"{grid.size}: its collectives time out where devices outnumber processors; use "
            "--backend cpu",
            module.operation.location,
        )
    return grid


def interpreter_module(module: ir.Module, signature: Signature, grid: ProcessGrid) -> bytes:
    """The bytecode of `module` under a `main` that runs it on every process of the grid."""
    context = bindings.new_context()
    bindings.register_interpreter_dialect(context)
    program = bindings.parse_module(bindings.write_bytecode(module), context)
    with context, ir.Location.unknown():
        _drop_constraints(program)
        inline_all_calls(program)  # the interpreter hands no token to a function
        meeting = separate_rendezvous(program, grid, _free_name(program, "meet"))
        name = _rename(program, entry_function(program))
        text = _Wrapper(name, signature, grid.size).text()
        wrapper = bindings.parse_module(text + meeting, context)  # kept while its ops are copied
        for op in wrapper.body.operations:
            if symbol_name(op.operation) != name:
                op.operation.clone(ip=ir.InsertionPoint(program.body))
    program.operation.verify()
    return bindings.write_bytecode(program)


def parts(element: ElementType) -> int:
    """How many bit patterns a tensor crosses as."""
    return 2 if element.kind is Kind.COMPLEX else 1


def pattern_bits(element: ElementType) -> int:
    """The width of the unsigned integers that carry an element type."""
    return max(8, real_part(element).bits)


def _unsupported(op: ir.Operation) -> ToolError | None:
    if op.name in ("builtin.module", "sdy.mesh", _CONSTRAINT):
        return None
    if op.name == _CREATE_TOKEN:
        return ToolError(
            f"the reference interpreter has no {_CREATE_TOKEN}; stablehlo.after_all without "
            "operands makes a token too",
            op.location,
        )
    if op.name.partition(".")[0] not in ("stablehlo", "func") or op.name.endswith("custom_call"):
        return ToolError(
            f"the reference interpreter does not run {op.name}; use --backend cpu", op.location
        )
    groups = op.attributes.get("replica_groups")
    if groups is not None and bindings.ReplicaGroupMeshAxesAttr.isinstance(groups):
        return ToolError(
            f"{op.name}: the reference interpreter does not know replica groups by mesh axes; use "
            "--backend cpu",
            op.location,
        )
    return None


def _drop_constraints(program: ir.Module) -> None:
    """Replaces each sharding constraint by the tensor it constrains."""
    constraints: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _CONSTRAINT:
            constraints.append(op)
        return ir.WalkResult.ADVANCE

    program.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    for op in constraints:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _rename(program: ir.Module, entry: ir.Operation) -> str:
    name = _free_name(program, "verified")
    old = symbol_name(entry)
    ir.SymbolTable.replace_all_symbol_uses(old, name, program.operation)
    ir.SymbolTable.set_symbol_name(entry, name)
    entry.attributes["sym_visibility"] = ir.StringAttr.get("private")
    return name


def _free_name(program: ir.Module, name: str) -> str:
    symbols = ir.SymbolTable(program.operation)
    while name in symbols:
        name += "_"
    return name


class _Wrapper:
    """The text of `main`. Every value of every process has a name: `%in_DEVICE_INDEX`."""

    def __init__(self, callee: str, signature: Signature, processes: int) -> None:
        self.callee = callee
        self.processes = processes
        self.inputs = [
            _Tensor(value, f"%in_{device}_{i}")
            for device in range(processes)
            for i, value in enumerate(signature.inputs)
        ]
        self.outputs = [
            _Tensor(value, f"%out_{device}_{i}")
            for device in range(processes)
            for i, value in enumerate(signature.outputs)
        ]

    def text(self) -> str:
        """A module: the callee's declaration, and `main`."""
        parameters = ", ".join(f"{p}: {t.pattern}" for t in self.inputs for p in t.patterns)
        returned = ", ".join(p for t in self.outputs for p in t.patterns)
        types = ", ".join(t.pattern for t in self.outputs for _ in t.patterns)
        lines = (
            f"func.func private @{self.callee}{self._type(of=self.processes)}",
            f"func.func public @main({parameters}) -> ({types}) {{",
            *(line for tensor in self.inputs for line in tensor.from_patterns()),
            self._call(),
            *(line for tensor in self.outputs for line in tensor.to_patterns()),
            f"return {returned} : {types}",
            "}",
        )
        return "\n".join(lines)

    def _call(self) -> str:
        programs = f"[[{', '.join([f'@{self.callee}'] * self.processes)}]]"
        return (
            f"{', '.join(t.name for t in self.outputs)} = "
            f'"interpreter.run_parallel"({", ".join(t.name for t in self.inputs)}) '
            f"{{programs = {programs}}} : {self._type()}"
        )

    def _type(self, of: int = 1) -> str:
        """The function type of all processes, or of one `of` so many."""
        sides = (self.inputs[: len(self.inputs) // of], self.outputs[: len(self.outputs) // of])
        return " -> ".join(f"({', '.join(tensor.type for tensor in side)})" for side in sides)


class _Tensor:
    """A tensor of the wrapper, and the bit patterns that stand for it outside."""

    def __init__(self, value: Value, name: str) -> None:
        element = element_type(value.element)
        assert element is not None
        self.name = name
        self.element = element
        self.sizes = "".join(f"{size}x" for size in value.shape)
        self.type = f"tensor<{self.sizes}{element.name}>"
        self.pattern = f"tensor<{self.sizes}ui{pattern_bits(element)}>"
        self.patterns = [f"{name}_bits{part}" for part in range(parts(element))]

    def from_patterns(self) -> list[str]:
        """Lines that make the tensor."""
        if self.element.kind is not Kind.COMPLEX:
            return self._narrow(self.patterns[0], self.name, self.element)
        real = real_part(self.element)
        names = [f"{pattern}_part" for pattern in self.patterns]
        kind = f"tensor<{self.sizes}{real.name}>"
        return [
            *self._narrow(self.patterns[0], names[0], real),
            *self._narrow(self.patterns[1], names[1], real),
            f"{self.name} = stablehlo.complex {', '.join(names)} : ({kind}, {kind}) -> {self.type}",
        ]

    def to_patterns(self) -> list[str]:
        """Lines that make the bit patterns."""
        if self.element.kind is not Kind.COMPLEX:
            return self._widen(self.name, self.patterns[0], self.element)
        real = real_part(self.element)
        lines: list[str] = []
        for pattern, op in zip(self.patterns, ("real", "imag"), strict=True):
            kinds = f"({self.type}) -> tensor<{self.sizes}{real.name}>"
            lines.append(f"{pattern}_part = stablehlo.{op} {self.name} : {kinds}")
            lines += self._widen(f"{pattern}_part", pattern, real)
        return lines

    def _narrow(self, source: str, target: str, element: ElementType) -> list[str]:
        own, same_width = self._types(element)
        middle = f"{target}_narrow" if own != same_width else target
        lines = [f"{middle} = stablehlo.convert {source} : ({self.pattern}) -> {same_width}"]
        if own != same_width:
            kinds = f"({same_width}) -> {own}"
            lines.append(f"{target} = stablehlo.bitcast_convert {middle} : {kinds}")
        return lines

    def _widen(self, source: str, target: str, element: ElementType) -> list[str]:
        own, same_width = self._types(element)
        lines: list[str] = []
        if own != same_width:
            kinds = f"({own}) -> {same_width}"
            lines.append(f"{target}_narrow = stablehlo.bitcast_convert {source} : {kinds}")
            source = f"{target}_narrow"
        return [*lines, f"{target} = stablehlo.convert {source} : ({same_width}) -> {self.pattern}"]

    def _types(self, element: ElementType) -> tuple[str, str]:
        """The tensor's type, and that of unsigned integers as wide; a boolean stays one."""
        boolean = element.kind is Kind.BOOLEAN
        same_width = element.name if boolean else f"ui{element.bits}"
        return f"tensor<{self.sizes}{element.name}>", f"tensor<{self.sizes}{same_width}>"
