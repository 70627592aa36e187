"""Symbols of a module: the names of functions and meshes, and what refers to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CALL
from stablehlo_tools.ir.walk import walk

FUNCTION = "func.func"
MESH = "sdy.mesh"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_REFERENCE = re.compile(rf"@({_QUOTED}|[\w$.-]+)|{_QUOTED}")  # an @ within a string is no reference
_WITHOUT_SYMBOLS = (ir.DenseElementsAttr, ir.DenseIntElementsAttr, ir.StringAttr, ir.TypeAttr)


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
