"""What partitioning asks of a module, and the form that it brings it into first.

One mesh under one name, no named computations (their shardings stay as constraints on the values
that go in and come out), no constraints on scalars.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives, meshes_of
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import (
    ValueShardings,
    dimension_axes,
    function_sharding,
    manual_axes,
    rank_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note, to_place
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, NAMED_COMPUTATION, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import constrained
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.walk import (
    callee_name,
    functions_by_name,
    ops_named,
    symbol_name,
    terminator,
    walk,
)

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
    inlined: dict[ir.Attribute, bool] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in WITH_SHARDINGS:
            attribute = op.attributes.get(name)
            if attribute is not None and attribute not in inlined:
                inlined[attribute] = _INLINED.search(str(attribute)) is not None
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return any(inlined.values())


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


def dissolve_named_computations(module: ir.Module) -> None:
    """Dissolves every named computation of the module, inner ones first."""
    for op in reversed(ops_named(module.operation, {NAMED_COMPUTATION})):
        block = op.regions[0].blocks[0]
        point = ir.InsertionPoint(op)
        for number, argument in enumerate(block.arguments):
            outside = op.operands[number]
            argument.replace_all_uses_with(_constrained(op, "in_shardings", number, outside, point))
        end = terminator(block)
        for view in list(block.operations):
            if view.operation != end:
                point.insert(view.operation.detach_from_parent())
        for number, result in enumerate(op.results):
            returned = end.operands[number]
            result.replace_all_uses_with(_constrained(op, "out_shardings", number, returned, point))
        op.erase()


def _constrained(
    op: ir.Operation, name: str, number: int, value: ir.Value, point: ir.InsertionPoint
) -> ir.Value:
    if name not in op.attributes or not isinstance(value.type, ir.RankedTensorType):
        return value
    sharding = sharding_per_value(op.attributes[name])[number]
    return constrained(value, sharding, point, op.location)


_ASKS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"})


def is_partitioned(main: ir.Operation, shardings: ValueShardings) -> bool:
    """Whether all of `main` is one manual computation over every axis of the mesh, which takes and
    gives the values as the signature divides them."""
    block = main.regions[0].blocks[0]
    *ops, end = [op.operation for op in block.operations]
    manual = next((op for op in ops if op.name == MANUAL_COMPUTATION), None)
    if manual is None or not all(
        op == manual or not any(_is_tensor(value) for value in (*op.operands, *op.results))
        for op in ops
    ):
        return False
    axes = {name for name, size in shardings.axes.mesh.axes if size > 1}
    if not axes <= manual_axes(manual):
        return False
    taken, given = (list(filter(_is_tensor, side)) for side in (manual.operands, manual.results))
    if taken != list(block.arguments) or list(end.operands) != given[: len(end.operands)]:
        return False
    if any(list(witness.uses) for witness in given[len(end.operands) :]):
        return False
    sides = (
        ("arg_attrs", "in_shardings", taken),
        ("res_attrs", "out_shardings", given[: len(end.operands)]),
    )
    for side, border, values in sides:
        inside = sharding_per_value(manual.attributes[border])
        for number in range(len(values)):
            said = function_sharding(main, side, number)
            if said is not None and not _goes_on_as(
                said, inside[number], values[number], shardings
            ):
                return False
    return True


def _goes_on_as(
    said: ir.Attribute, inside: ir.Attribute, value: ir.Value, shardings: ValueShardings
) -> bool:
    """Whether what the signature says of a value agrees with how a computation takes or gives it:
    evenly, and divided further where the signature leaves that open."""
    wanted = shardings.even_dims(value, shardings.read(said))
    dims = zip(dimension_axes(said), wanted, shardings.read(inside), strict=True)
    for (_, is_open), outer, inner in dims:
        if inner != outer and (not is_open or inner[: len(outer)] != outer):
            return False
    return shardings.unreduced_axes(said) == shardings.unreduced_axes(inside)


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def check(module: ir.Module, main: ir.Operation, shardings: ValueShardings) -> None:
    """Raises a located ToolError for what P2, P4, P5, P6 or P7 excludes."""
    attributes = module.operation.attributes
    replicas = attributes.get("mhlo.num_replicas")
    if replicas is not None and ir.IntegerAttr(replicas).value > 1:
        raise ToolError(
            "partition needs a program of one replica, of several partitions (P4)", main.location
        )
    communicating = {collective.op for collective in find_collectives(module)}
    several = bool(platform_arguments(main))
    for argument in main.regions[0].blocks[0].arguments:
        _check_static(argument, main)
        if bindings.TokenType.isinstance(argument.type):
            raise ToolError(
                "an argument is a token, which orders side effects: partition divides programs "
                "without any (P5)",
                main.location,
            )

    def visit(op: ir.Operation) -> ir.WalkResult:
        for result in op.results:
            _check_static(result, op)
            shardings.of(result)
        if several and _call_target(op):
            raise ToolError(
                f"the program is for several platforms, and the custom call {_call_target(op)!r} "
                "for one of them may be unknown to the others: export for one platform (P7)",
                op.location,
            )
        if op.name == MANUAL_COMPUTATION:
            return ir.WalkResult.SKIP
        if op.name in _ASKS or op in communicating or _carries_token(op):
            raise ToolError(
                f"{op.name} stands outside of a manual computation, where it would run once on "
                "each device instead of once: partition cannot divide it (P5)",
                op.location,
            )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _call_target(op: ir.Operation) -> str:
    """What a custom call calls; empty for any other op."""
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _check_static(value: ir.Value, op: ir.Operation) -> None:
    type_ = value.type
    if isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape:
        is_argument = isinstance(value.owner, ir.Block)
        which = argument_name(value) if is_argument else op.name
        raise ToolError(
            f"{which} has a value of a symbolic shape, {type_}: partition needs static shapes; "
            "export for concrete ones (P2)",
            value.location if is_argument else op.location,
        )


def _carries_token(op: ir.Operation) -> bool:
    values = [*op.operands, *op.results]
    return any(bindings.TokenType.isinstance(value.type) for value in values)


def prepare(module: ir.Module, mesh: NamedMesh) -> None:
    """Dissolves named computations, and gives all shardings the one mesh."""
    dissolve_named_computations(module)
    # Takes out constraints on scalars, which nothing divides; jax puts them into reducers.
    for op in ops_named(module.operation, {SHARDING_CONSTRAINT}):
        if not rank_of(op.operands[0]):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    unify_meshes(module, mesh)
