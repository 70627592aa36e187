"""Builds the module that runs a program in the StableHLO reference interpreter.

Its `main` takes and gives bit patterns only (unsigned integers of 8 to 64 bits, one after the other
for each device; a complex tensor is two), so that NaNs cross unharmed and every element type can
be given from NumPy:

    %x = stablehlo.bitcast_convert %bits : (tensor<4xui32>) -> tensor<4xf32>   // for each input
    %y:2 = "interpreter.run_parallel"(%x, …) {programs = [[@verified], [@verified]]}
    %bits = stablehlo.bitcast_convert %y#0 : (tensor<4xf32>) -> tensor<4xui32>
"""

from __future__ import annotations

import os
import re

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify.device_grid import is_partitioned
from stablehlo_tools.verify.element_types import ElementType, Kind, element_type, real_part
from stablehlo_tools.verify.signatures import Signature, Value, entry_function

_UNSUPPORTED = frozenset({"stablehlo.create_token", "stablehlo.custom_call"})


def interpreter_grid(module: ir.Module, grid: ProcessGrid) -> ProcessGrid:
    """How the interpreter can run the module: on `grid`, or as one program where it only has
    shardings, which say nothing about values.

    Raises a located ToolError for what the interpreter lacks.
    """

    def visit(op: ir.Operation) -> ir.WalkResult:
        _check_supported(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    communicates = bool(find_collectives(module))
    if not communicates and is_partitioned(module):
        return ProcessGrid()
    most = max(2, len(os.sched_getaffinity(0)))
    if grid.size > most:
        raise ToolError(
            f"the reference interpreter runs a thread for each device and waits for nobody who "
            f"has none: {grid.size} devices are too many for the {most} it can have here; use "
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
        for op in list(program.body.operations):
            if op.operation.name == "sdy.mesh":
                op.operation.erase()
        entry = entry_function(program)
        name = _rename(program, entry)
        wrapper = bindings.parse_module(_wrapper_text(name, signature, grid), context)
        main = next(
            op.operation
            for op in wrapper.body.operations
            if ir.StringAttr(op.operation.attributes["sym_name"]).value == "main"
        )
        main.detach_from_parent()
        program.body.append(main)
    program.operation.verify()
    return bindings.write_bytecode(program)


def parts(element: ElementType) -> int:
    """How many bit patterns a tensor crosses as."""
    return 2 if element.kind is Kind.COMPLEX else 1


def pattern_bits(element: ElementType) -> int:
    """The width of the unsigned integers that carry an element type."""
    return max(8, real_part(element).bits)


def _check_supported(op: ir.Operation) -> None:
    dialect = op.name.partition(".")[0]
    if op.name == "sdy.mesh" or op.name == "builtin.module":
        return
    if op.name in _UNSUPPORTED:
        instead = " (stablehlo.after_all without operands makes a token too)"
        raise ToolError(
            f"the reference interpreter has no {op.name}"
            + (instead if op.name.endswith("create_token") else ""),
            op.location,
        )
    if dialect not in ("stablehlo", "func"):
        raise ToolError(
            f"the reference interpreter does not run {op.name}; use --backend cpu", op.location
        )
    groups = op.attributes.get("replica_groups") if op.name.startswith("stablehlo.") else None
    if groups is not None and bindings.ReplicaGroupMeshAxesAttr.isinstance(groups):
        raise ToolError(
            f"the reference interpreter does not know replica groups by mesh axes ({op.name}); "
            "use --backend cpu",
            op.location,
        )


def _rename(program: ir.Module, entry: ir.Operation) -> str:
    symbols = ir.SymbolTable(program.operation)
    name = "verified"
    while name in symbols:
        name += "_"
    old = ir.StringAttr(entry.attributes["sym_name"]).value
    symbols.replace_all_symbol_uses(old, name, program.operation)
    symbols.set_symbol_name(entry, name)
    entry.attributes["sym_visibility"] = ir.StringAttr.get("private")
    return name


def _wrapper_text(name: str, signature: Signature, grid: ProcessGrid) -> str:
    lines: list[str] = []
    parameters: list[str] = []
    operands: list[str] = []
    results: list[str] = []
    for device in range(grid.size):
        for i, value in enumerate(signature.inputs):
            text = f"%in_{device}_{i}"
            patterns = [f"{text}_{part}" for part in range(parts(_element(value)))]
            parameters += [f"{p}: {_pattern_type(value)}" for p in patterns]
            lines += _from_patterns(text, patterns, value)
            operands.append(text)
    count = len(signature.outputs)
    for device in range(grid.size):
        for i, value in enumerate(signature.outputs):
            text = f"%out_{device}_{i}"
            patterns = [f"{text}_{part}" for part in range(parts(_element(value)))]
            lines += _to_patterns(f"%ran#{device * count + i}", patterns, value)
            results += patterns
    call = lines.index(next((line for line in lines if "%ran#" in line), "")) if results else len(lines)
    inputs = [_type(value) for _ in range(grid.size) for value in signature.inputs]
    outputs = [_type(value) for _ in range(grid.size) for value in signature.outputs]
    row = f"[{', '.join([f'@{name}'] * grid.num_partitions)}]"
    programs = f"[{', '.join([row] * grid.num_replicas)}]"
    lines.insert(
        call,
        f"%ran:{len(outputs)} = "
        f'"interpreter.run_parallel"({", ".join(operands)}) {{programs = {programs}}} : '
        f"({', '.join(inputs)}) -> ({', '.join(outputs)})",
    )
    returned = [
        _pattern_type(value)
        for _ in range(grid.size)
        for value in signature.outputs
        for _ in range(parts(_element(value)))
    ]
    types = ", ".join(returned)
    body = "\n  ".join(lines)
    one = f"({', '.join(map(_type, signature.inputs))}) -> ({', '.join(map(_type, signature.outputs))})"
    return (
        f"func.func private @{name}{one}\n"
        f"func.func public @main({', '.join(parameters)}) -> ({types}) {{\n"
        f"  {body}\n  return {', '.join(results)} : {types}\n}}\n"
    )


def _from_patterns(name: str, patterns: list[str], value: Value) -> list[str]:
    """Lines that turn bit patterns into the tensor `name`."""
    element = _element(value)
    if element.kind is Kind.COMPLEX:
        part = Value(real_part(element).name, value.shape)
        lines = [
            line for p in patterns for line in _from_patterns(f"{p}_real", [p], part)
        ]
        names = ", ".join(f"{p}_real" for p in patterns)
        kinds = f"({_type(part)}, {_type(part)}) -> {_type(value)}"
        return [*lines, f"{name} = stablehlo.complex {names} : {kinds}"]
    narrow = re.sub(r"(x|<)[^x<]+>$", rf"\1ui{element.bits}>", _type(value))
    if element.kind is Kind.BOOLEAN or element.name == f"ui{element.bits}":
        return [f"{name} = stablehlo.convert {patterns[0]} : ({_pattern_type(value)}) -> {_type(value)}"]
    return [
        f"{name}_narrow = stablehlo.convert {patterns[0]} : ({_pattern_type(value)}) -> {narrow}",
        f"{name} = stablehlo.bitcast_convert {name}_narrow : ({narrow}) -> {_type(value)}",
    ]


def _to_patterns(name: str, patterns: list[str], value: Value) -> list[str]:
    """Lines that turn the tensor `name` into bit patterns."""
    element = _element(value)
    if element.kind is Kind.COMPLEX:
        part = Value(real_part(element).name, value.shape)
        lines: list[str] = []
        for pattern, op in zip(patterns, ("real", "imag"), strict=True):
            lines.append(
                f"{pattern}_{op} = stablehlo.{op} {name} : ({_type(value)}) -> {_type(part)}"
            )
            lines += _to_patterns(f"{pattern}_{op}", [pattern], part)
        return lines
    narrow = re.sub(r"(x|<)[^x<]+>$", rf"\1ui{element.bits}>", _type(value))
    if element.kind is Kind.BOOLEAN or element.name == f"ui{element.bits}":
        return [f"{patterns[0]} = stablehlo.convert {name} : ({_type(value)}) -> {_pattern_type(value)}"]
    return [
        f"{patterns[0]}_narrow = stablehlo.bitcast_convert {name} : ({_type(value)}) -> {narrow}",
        f"{patterns[0]} = stablehlo.convert {patterns[0]}_narrow : ({narrow}) -> {_pattern_type(value)}",
    ]


def _element(value: Value) -> ElementType:
    element = element_type(value.element)
    assert element is not None
    return element


def _type(value: Value) -> str:
    return f"tensor<{''.join(f'{size}x' for size in value.shape)}{value.element}>"


def _pattern_type(value: Value) -> str:
    bits = f"ui{pattern_bits(_element(value))}"
    return f"tensor<{''.join(f'{size}x' for size in value.shape)}{bits}>"
