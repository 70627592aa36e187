"""Finding ops: by walking a module, and by the symbols that name functions and meshes.

A walk goes through regions and not through calls; who follows a call asks for the function by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CALL

ENTRY = "main"  # what jax calls the function that it exports
FUNCTION = "func.func"
MESH = "sdy.mesh"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_REFERENCE = re.compile(rf"@({_QUOTED}|[\w$.-]+)|{_QUOTED}")  # an @ within a string is no reference
_WITHOUT_SYMBOLS = (ir.DenseElementsAttr, ir.DenseIntElementsAttr, ir.StringAttr, ir.TypeAttr)


def walk(root: ir.Operation, visit: Callable[[ir.Operation], ir.WalkResult]) -> None:
    """Calls `visit` on an op and all ops in it, pre-order.

    MLIR turns whatever a callback raises into a RuntimeError that holds a text; here the exception
    itself ends the walk, a KeyboardInterrupt too.
    """
    raised: list[BaseException] = []

    def guarded(op: ir.Operation) -> ir.WalkResult:
        try:
            return visit(op)
        except BaseException as error:
            raised.append(error)
            return ir.WalkResult.INTERRUPT

    try:
        root.walk(guarded, ir.WalkOrder.PRE_ORDER)
    except RuntimeError as error:  # a signal that came between MLIR and the guard
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise
    if raised:
        raise raised[0]


def ops_where(root: ir.Operation, wanted: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    """The ops in an op, itself among them, of which a question is true, pre-order."""
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if wanted(op):
            ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return ops


def drop_attributes(root: ir.Operation, names: Collection[str]) -> None:
    """Removes attributes of these names from the ops in an op, itself among them."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in names:
            if name in op.attributes:
                del op.attributes[name]
        return ir.WalkResult.ADVANCE

    walk(root, visit)


def ops_named(root: ir.Operation, names: Collection[str]) -> list[ir.Operation]:
    """The ops of these names in an op, itself among them, pre-order."""
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:  # twice as fast as by `ops_where`
        if op.name in names:
            ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return ops


def values_used(op: ir.Operation) -> list[ir.Value]:
    """The operands of an op and of all ops in its regions, in order."""
    if not len(op.regions):
        return list(op.operands)
    values: list[ir.Value] = []

    def visit(inner: ir.Operation) -> ir.WalkResult:
        values.extend(inner.operands)
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    return values


def values_used_outside(op: ir.Operation) -> list[ir.Value]:
    """What an op and the ops in its regions read that is not made in them, in order."""
    if not len(op.regions):
        return list(op.operands)
    used: list[ir.Value] = []
    inside: set[ir.Value] = set()

    def read(inner: ir.Operation) -> None:
        used.extend(inner.operands)
        for region in inner.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for view in block.operations:
                    inside.update(view.operation.results)
                    read(view.operation)

    read(op)
    return [value for value in used if value not in inside]


def terminator(block: ir.Block) -> ir.Operation:
    """The last op of a block."""
    last = ir.InsertionPoint.at_block_terminator(block).ref_operation
    assert last is not None, "a block of these dialects ends in a terminator"
    return last.operation


def is_inside(op: ir.Operation, outer: ir.Operation) -> bool:
    """Whether an op stands in a region of another."""
    parent = op.parent
    while parent is not None:
        if parent.operation == outer:
            return True
        parent = parent.operation.parent
    return False


def enclosing(op: ir.Operation, name: str) -> ir.Operation | None:
    """The innermost op of a name that an op stands in, at whatever depth."""
    parent = op.parent
    while parent is not None and parent.operation.name != name:
        parent = parent.operation.parent
    return None if parent is None else parent.operation


def ops_around(op: ir.Operation, name: str) -> list[ir.Operation]:
    """The ops of a name that an op stands in, the innermost first."""
    around: list[ir.Operation] = []
    while (outer := enclosing(op, name)) is not None:
        around.append(outer)
        op = outer
    return around


def symbol_name(op: ir.Operation | ir.OpView) -> str:
    """The name of an op that defines a symbol."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def callee_name(call: ir.Operation) -> str:
    """The symbol that a `func.call` or a `stablehlo.composite` refers to."""
    attribute = call.attributes["callee" if call.name == CALL else "decomposition"]
    return ir.FlatSymbolRefAttr(attribute).value


def functions_by_name(module: ir.Module) -> dict[str, ir.Operation]:
    """The module's functions, in the order of its text."""
    return _functions_in(module.body)


def functions_around(op: ir.Operation) -> dict[str, ir.Operation]:
    """The functions of the module that an op stands in, in the order of its text."""
    while (parent := op.parent) is not None:
        op = parent.operation
    return _functions_in(op.regions[0].blocks[0])


def main_function(module: ir.Module) -> ir.Operation | None:
    """The entry function."""
    return functions_by_name(module).get(ENTRY)


def entry_function(module: ir.Module) -> ir.Operation:
    """`main`, or else the only public function. Raises ToolError where there is neither."""
    named = functions_by_name(module)
    functions = list(named.values())
    if "main" in named:
        return named["main"]
    public = [
        op
        for op in functions
        if "sym_visibility" not in op.attributes
        or ir.StringAttr(op.attributes["sym_visibility"]).value == "public"
    ]
    if len(public) == 1:
        return public[0]
    names = ", ".join(f"@{name}" for name, op in named.items() if op in public)
    raise ToolError(
        "there is no @main, and "
        + (f"several public functions: {names}" if public else "no public function"),
        (public or [module.operation])[0].location,
    )


def _functions_in(body: ir.Block) -> dict[str, ir.Operation]:
    return {
        symbol_name(op): op.operation for op in body.operations if op.operation.name == FUNCTION
    }


def referenced_symbols(op: ir.Operation) -> set[str]:
    """The symbols that the attributes of an op and of all ops in it refer to, however deep."""
    symbols: set[str] = set()
    known: set[ir.Attribute] = set()  # equal attributes are read once

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for name in inner.attributes:
            try:
                attribute = inner.attributes[name]
            except TypeError:  # complex elements, which Python has no class for: no symbols
                continue
            if attribute not in known:
                known.add(attribute)
                symbols.update(_references(attribute))
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    return symbols


def copy_referenced_symbols(source: ir.Operation, target: ir.Module) -> None:
    """Copies to the front of `target` the symbols of the module `source` that its ops refer to and
    it lacks, and what those refer to in turn."""
    there = {symbol_name(op): op.operation for op in source.regions[0].blocks[0].operations}
    here = {symbol_name(op) for op in target.body.operations}
    wanted = referenced_symbols(target.operation)
    while missing := [name for name in there if name in wanted and name not in here]:
        for name in missing:
            there[name].clone(ip=ir.InsertionPoint.at_block_begin(target.body))
            wanted |= referenced_symbols(there[name])
        here.update(missing)


def erase_unused_meshes(module: ir.Module) -> None:
    """Takes away the meshes that no attribute names."""
    used = referenced_symbols(module.operation)
    for view in list(module.body.operations):
        if view.operation.name == MESH and symbol_name(view) not in used:
            view.operation.erase()


def _references(attribute: ir.Attribute) -> Iterator[str]:
    """Of an attribute of a dialect, whose parts Python cannot see, by its text."""
    if isinstance(attribute, _WITHOUT_SYMBOLS):
        return
    for reference in _REFERENCE.finditer(str(attribute)):
        if reference[1]:
            yield reference[1].strip('"')
