"""The one mesh of a program that is partitioned, under all names that it goes by."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.symbols import symbol_name
from stablehlo_tools.ir.walk import walk

MESH = "sdy.mesh"
_WITH_SHARDINGS = (
    "sdy.sharding",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)


@dataclass(frozen=True)
class NamedMesh:
    """A mesh and the symbol that it goes by."""

    name: str
    mesh: DeviceMesh


def one_mesh(module: ir.Module) -> NamedMesh | None:
    """The mesh of the program's shardings; None where it runs on one device or shards nothing.

    Raises a ToolError where there are several that differ (P3).
    """
    meshes = {n: m for n, m in ModuleFacts.of(module).meshes.items() if m.size > 1}
    if not meshes:
        return None
    first = next(iter(meshes))
    for name, mesh in meshes.items():
        if mesh != meshes[first]:
            raise ToolError(
                f"the meshes @{first} and @{name} differ: partition needs one mesh, with the same "
                "axes over the same devices (P3)",
                _mesh_op(module, name).location,
            )
    return NamedMesh(first, meshes[first])


def has_inlined_meshes(module: ir.Module) -> bool:
    """Whether a sharding holds its mesh itself instead of naming one of the module."""
    found: dict[ir.Attribute, bool] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in _WITH_SHARDINGS:
            attribute = op.attributes.get(name)
            if attribute is not None and attribute not in found:
                found[attribute] = "sharding<mesh<" in str(attribute)
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
    known = ModuleFacts.of(module).meshes

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in _WITH_SHARDINGS:
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
