"""The one mesh of a program that is partitioned, under all names that it goes by."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import meshes_of
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note, to_place
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.symbols import callee_name, functions_by_name, symbol_name
from stablehlo_tools.ir.walk import walk

MESH = "sdy.mesh"
WITH_SHARDINGS = (
    "sdy.sharding",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)


_INLINED = re.compile(r"<\s*mesh<")
_SYMBOL = re.compile(r'@("[^"]*"|[\w$.-]+)')


@dataclass(frozen=True)
class NamedMesh:
    """A mesh and the symbol that it goes by."""

    name: str
    mesh: DeviceMesh


def one_mesh(module: ir.Module, main: ir.Operation) -> NamedMesh | None:
    """The mesh of the program's shardings, or of its module where it shards nothing; None where it
    runs on one device.

    Raises a ToolError where `main`, and what it calls, use several that differ (P3).
    """
    all_meshes = meshes_of(module)
    used = _named_meshes(module, main)
    meshes = {n: m for n, m in all_meshes.items() if m.size > 1 and n in used}
    if not meshes:
        meshes = {n: m for n, m in all_meshes.items() if m.size > 1}
    if not meshes:
        return None
    first = next(iter(meshes))
    for name, mesh in meshes.items():
        if mesh != meshes[first]:
            place = to_place(_mesh_op(module, name).location)
            raise ToolError(
                f"the meshes @{first} and @{name} differ: partition needs one mesh, with the same "
                "axes over the same devices (P3)",
                place if place.line else main.location,
                notes=tuple(
                    note(f"@{each} is {_mesh_op(module, each).attributes['mesh']}")
                    for each in (first, name)
                ),
            )
    return NamedMesh(first, meshes[first])


def _named_meshes(module: ir.Module, main: ir.Operation) -> set[str]:
    """The symbols that the shardings and replica groups name, of a function and all it calls."""
    functions = functions_by_name(module)
    texts: dict[ir.Attribute, None] = {}
    pending, seen = [main], {symbol_name(main)}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in (*WITH_SHARDINGS, "out_sharding", "replica_groups"):
            attribute = op.attributes.get(name)
            if attribute is not None:
                texts[attribute] = None
        if op.name in CALLS and callee_name(op) not in seen:
            seen.add(callee_name(op))
            pending.extend(filter(None, [functions.get(callee_name(op))]))
        return ir.WalkResult.ADVANCE

    while pending:
        walk(pending.pop(), visit)
    return {name.strip('"') for text in texts for name in _SYMBOL.findall(str(text))}


def has_inlined_meshes(module: ir.Module) -> bool:
    """Whether a sharding holds its mesh itself instead of naming one of the module."""
    found: dict[ir.Attribute, bool] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in WITH_SHARDINGS:
            attribute = op.attributes.get(name)
            if attribute is not None and attribute not in found:
                found[attribute] = _INLINED.search(str(attribute)) is not None
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return any(found.values())


def unify_meshes(module: ir.Module, mesh: NamedMesh) -> None:
    """Lets every sharding name the one mesh; those over a mesh of no axes divide nothing."""
    others = [
        symbol_name(op)
        for op in module.body.operations
        if op.operation.name == MESH and symbol_name(op) != mesh.name
    ]
    if not others:
        return
    symbol = re.compile(r"@(" + "|".join(map(re.escape, others)) + r")\b")
    known = meshes_of(module)

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in WITH_SHARDINGS:
            if name not in op.attributes:
                continue
            text = str(op.attributes[name])
            for other in dict.fromkeys(symbol.findall(text)):
                if known[other].device_ids != mesh.mesh.device_ids and known[other].device_ids:
                    raise ToolError(
                        f"a value is on a single device, by @{other}: partition divides values "
                        f"over all of @{mesh.name} (P3)",
                        op.location,
                    )
            if symbol.search(text):
                renamed = symbol.sub(f"@{mesh.name}", text)
                op.attributes[name] = ir.Attribute.parse(renamed, op.context)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def rename_meshes(module: ir.Module, other: ir.Module) -> None:
    """Gives the meshes of a module names that neither it nor another one uses."""
    meshes = [op.operation for op in module.body.operations if op.operation.name == MESH]
    taken = {symbol_name(op) for m in (module, other) for op in m.body.operations}
    for mesh in meshes:
        old = symbol_name(mesh)
        new = next(n for n in (f"xla_{old}_{i}" for i in itertools.count()) if n not in taken)
        taken.add(new)
        ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
        ir.SymbolTable.set_symbol_name(mesh, new)


def _mesh_op(module: ir.Module, name: str) -> ir.Operation:
    return next(
        op.operation
        for op in module.body.operations
        if op.operation.name == MESH and symbol_name(op) == name
    )
