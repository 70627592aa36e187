"""Finds ops by walking a module, and functions and meshes by their symbols.

A walk visits nested regions and does not follow calls; look up the callee by its name for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import SIDES, set_side_entries, side_entries
from stablehlo_tools.dialect.names import CALL

ENTRY = "main"  # jax's name of the exported function
FUNCTION = "func.func"
MESH = "sdy.mesh"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_REFERENCE = re.compile(rf"@({_QUOTED}|[\w$.-]+)|{_QUOTED}")  # skips an @ within a string
# Without symbols, and slow to print if large.
_WITHOUT_SYMBOLS = (ir.DenseElementsAttr, ir.DenseIntElementsAttr, ir.StringAttr, ir.TypeAttr)


def walk(root: ir.Operation, visit: Callable[[ir.Operation], ir.WalkResult]) -> None:
    """Calls `visit` on an op and all ops in it, pre-order.

    MLIR converts an exception of a callback to a RuntimeError with its text. This function ends the
    walk and raises the exception itself, also a KeyboardInterrupt.
    """
    raised: list[BaseException] = []

    def visit_or_interrupt(op: ir.Operation) -> ir.WalkResult:
        try:
            return visit(op)
        except BaseException as error:
            raised.append(error)
            return ir.WalkResult.INTERRUPT

    try:
        root.walk(visit_or_interrupt, ir.WalkOrder.PRE_ORDER)
    except RuntimeError as error:  # a signal outside of the guarded callback
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise
    if raised:
        raise raised[0]


def ops_where(root: ir.Operation, wanted: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    """Returns the ops in an op, including itself, that satisfy `wanted`, pre-order."""
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if wanted(op):
            ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return ops


def drop_attributes(root: ir.Operation, names: Collection[str]) -> None:
    """Removes the attributes of these names from an op and all ops in it."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in names:
            if name in op.attributes:
                del op.attributes[name]
        return ir.WalkResult.ADVANCE

    walk(root, visit)


def drop_attributes_everywhere(module: ir.Module, names: Collection[str]) -> None:
    """Removes the attributes of these names from all ops, arguments and results of a module."""
    drop_attributes(module.operation, names)
    for function in functions_by_name(module).values():
        for side in SIDES:
            if entries := side_entries(function, side):
                kept = [{n: a for n, a in each.items() if n not in names} for each in entries]
                set_side_entries(function, side, kept)


def ops_named(root: ir.Operation, names: Collection[str]) -> list[ir.Operation]:
    """Returns the ops of these names in an op, including itself, pre-order."""
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:  # twice as fast as `ops_where`
        if op.name in names:
            ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return ops


def values_used(op: ir.Operation) -> list[ir.Value]:
    """Returns the operands of an op and of all ops in its regions, in order."""
    if not len(op.regions):
        return list(op.operands)
    values: list[ir.Value] = []

    def visit(inner: ir.Operation) -> ir.WalkResult:
        values.extend(inner.operands)
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    return values


def values_used_outside(op: ir.Operation) -> list[ir.Value]:
    """Returns the values that an op and its regions read from outside, in order."""
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
    """Returns the last op of a block."""
    last = ir.InsertionPoint.at_block_terminator(block).ref_operation
    assert last is not None, "a block of these dialects ends in a terminator"
    return last.operation


def is_inside(op: ir.Operation, outer: ir.Operation) -> bool:
    """Returns True if an op is in a region of `outer`, at any depth."""
    parent = op.parent
    while parent is not None:
        if parent.operation == outer:
            return True
        parent = parent.operation.parent
    return False


def enclosing(op: ir.Operation, name: str) -> ir.Operation | None:
    """Returns the innermost op of a name that contains an op; None without one."""
    parent = op.parent
    while parent is not None and parent.operation.name != name:
        parent = parent.operation.parent
    return None if parent is None else parent.operation


def ops_around(op: ir.Operation, name: str) -> list[ir.Operation]:
    """Returns the ops of a name that contain an op, innermost first."""
    around: list[ir.Operation] = []
    while (outer := enclosing(op, name)) is not None:
        around.append(outer)
        op = outer
    return around


def symbol_name(op: ir.Operation | ir.OpView) -> str:
    """Returns the symbol name that an op defines."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def callee_name(call: ir.Operation) -> str:
    """Returns the symbol that a `func.call` or a `stablehlo.composite` refers to."""
    attribute = call.attributes["callee" if call.name == CALL else "decomposition"]
    return ir.FlatSymbolRefAttr(attribute).value


def functions_by_name(module: ir.Module) -> dict[str, ir.Operation]:
    """Returns the module's functions, in the order of the text."""
    return _functions_in(module.body)


def functions_around(op: ir.Operation) -> dict[str, ir.Operation]:
    """Returns the functions of the module that contains an op, in the order of the text."""
    while (parent := op.parent) is not None:
        op = parent.operation
    return _functions_in(op.regions[0].blocks[0])


def main_function(module: ir.Module) -> ir.Operation | None:
    """Returns the function `main`, or None."""
    return functions_by_name(module).get(ENTRY)


def entry_function(module: ir.Module) -> ir.Operation:
    """Returns `main`, else the only public function. Raises ToolError if there is neither."""
    named = functions_by_name(module)
    functions = list(named.values())
    if ENTRY in named:
        return named[ENTRY]
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
    """Returns the symbols that the attributes of an op and of all ops in it refer to."""
    symbols: set[str] = set()
    known: set[ir.Attribute] = set()  # equal attributes are printed and searched once

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for name in inner.attributes:
            try:
                attribute = inner.attributes[name]
            except TypeError:  # complex elements, without a Python class: no symbols
                continue
            if attribute in known or isinstance(attribute, _WITHOUT_SYMBOLS):
                continue
            known.add(attribute)
            # Python cannot traverse dialect attributes, but can search their text.
            found = _REFERENCE.finditer(str(attribute))
            symbols.update(match[1].strip('"') for match in found if match[1])
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    return symbols


def copy_referenced_symbols(source: ir.Operation, target: ir.Module) -> None:
    """Copies the symbols that `target` refers to and lacks from the module `source`.

    Follows their own references. The copies go to the beginning of `target`.
    """
    there = {symbol_name(op): op.operation for op in source.regions[0].blocks[0].operations}
    here = {symbol_name(op) for op in target.body.operations}
    wanted = referenced_symbols(target.operation)
    while missing := [name for name in there if name in wanted and name not in here]:
        for name in missing:
            there[name].clone(ip=ir.InsertionPoint.at_block_begin(target.body))
            wanted |= referenced_symbols(there[name])
        here.update(missing)


def erase_unused_meshes(module: ir.Module) -> None:
    """Erases the meshes that no attribute refers to."""
    used = referenced_symbols(module.operation)
    for view in list(module.body.operations):
        if view.operation.name == MESH and symbol_name(view) not in used:
            view.operation.erase()
