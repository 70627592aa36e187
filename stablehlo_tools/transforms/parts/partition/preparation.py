"""What partitioning asks of a module, and the form that it brings it into first.

One mesh under one name, no named computations (their shardings stay as constraints on the values
that go in and come out), no constraints on scalars.
"""

from __future__ import annotations

import itertools
import re

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives, meshes_of
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.analysis.shardings import (
    MeshAxes,
    ValueShardings,
    dimension_axes,
    function_sharding,
    manual_axes,
    rank_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note, to_place
from stablehlo_tools.dialect.names import (
    CUSTOM_CALL,
    MANUAL_COMPUTATION,
    NAMED_COMPUTATION,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import constrained
from stablehlo_tools.ir.inline import dissolve
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.views import Function, OneRegion
from stablehlo_tools.ir.walk import (
    MESH,
    callee_name,
    functions_by_name,
    ops_named,
    symbol_name,
    terminator,
    walk,
)

_WITH_SHARDINGS = (
    "sdy.sharding",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)
_INLINED = re.compile(r"<\s*mesh<")
_SYMBOL = re.compile(r'@("[^"]*"|[\w$.-]+)')


def one_mesh(module: ir.Module, main: ir.Operation) -> ValueShardings | None:
    """The shardings over the one mesh that the program's name, or its module where it shards
    nothing; None where it runs on one device.

    Raises a ToolError where `main`, and what it calls, use several that differ (P3).
    """
    all_meshes = {n: m for n, m in meshes_of(module).items() if m.size > 1}
    used = _named_meshes(module, main)
    meshes = {n: m for n, m in all_meshes.items() if n in used} or all_meshes
    if not meshes:
        return None
    ops = {symbol_name(op): op for op in module.body.operations if op.operation.name == MESH}
    first = next(iter(meshes))
    for name, mesh in meshes.items():
        if mesh != meshes[first]:
            place = to_place(ops[name].location)
            raise ToolError(
                f"the meshes @{first} and @{name} differ: partition needs one mesh, with the same "
                "axes over the same devices (P3)",
                place if place.line else main.location,
                notes=tuple(
                    note(f"@{each} is {ops[each].attributes['mesh']}") for each in (first, name)
                ),
            )
    return ValueShardings(MeshAxes(meshes[first]), first)


def _named_meshes(module: ir.Module, main: ir.Operation) -> set[str]:
    """The symbols that the shardings and replica groups name, of a function and all it calls."""
    functions = functions_by_name(module)
    texts: dict[ir.Attribute, None] = {}
    pending, seen = [main], {symbol_name(main)}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in (*_WITH_SHARDINGS, "out_sharding", "replica_groups"):
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


def stated_shardings(module: ir.Module) -> list[tuple[ir.Operation, str, ir.Attribute]]:
    """The attributes with shardings of all ops of a module, with the op and the name."""
    found: list[tuple[ir.Operation, str, ir.Attribute]] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in _WITH_SHARDINGS:
            attribute = op.attributes.get(name)
            if attribute is not None:
                found.append((op, name, attribute))
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found


def has_inlined_meshes(module: ir.Module) -> bool:
    """Whether a sharding holds its mesh itself instead of naming one of the module."""
    attributes = {attribute for _, _, attribute in stated_shardings(module)}
    return any(_INLINED.search(str(attribute)) for attribute in attributes)


def _unify_meshes(module: ir.Module, shardings: ValueShardings) -> None:
    """Lets every sharding name the one mesh; those over a mesh of no axes divide nothing."""
    others = [
        symbol_name(op)
        for op in module.body.operations
        if op.operation.name == MESH and symbol_name(op) != shardings.mesh_name
    ]
    if not others:
        return
    symbol = re.compile(r"@(" + "|".join(map(re.escape, others)) + r")\b")
    known = meshes_of(module)
    for op, name, attribute in stated_shardings(module):
        text = str(attribute)
        for other in dict.fromkeys(symbol.findall(text)):
            devices = known[other].device_ids
            if devices and devices != shardings.axes.mesh.device_ids:
                raise ToolError(
                    f"a value is on a single device, by @{other}: partition divides values "
                    f"over all of @{shardings.mesh_name} (P3)",
                    op.location,
                )
        if symbol.search(text):
            renamed = symbol.sub(f"@{shardings.mesh_name}", text)
            op.attributes[name] = ir.Attribute.parse(renamed, op.context)


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


_ASKS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"})


def is_partitioned(main: ir.Operation, shardings: ValueShardings) -> bool:
    """Whether all of `main` is one manual computation over every axis of the mesh, which takes and
    gives the values as the signature divides them."""
    block = Function(main).body
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
            if said is None:
                continue
            # Taken and given evenly, and divided further where the signature leaves that open.
            wanted = shardings.even_dims(values[number], shardings.read(said))
            dims = zip(dimension_axes(said), wanted, shardings.read(inside[number]), strict=True)
            for (_, is_open), outer, inner in dims:
                if inner != outer and (not is_open or inner[: len(outer)] != outer):
                    return False
            if shardings.unreduced_axes(said) != shardings.unreduced_axes(inside[number]):
                return False
    return True


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
    for argument in Function(main).body.arguments:
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
        if several and op.name == CUSTOM_CALL:
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            raise ToolError(
                f"the program is for several platforms, and the custom call {target!r} "
                "for one of them may be unknown to the others: export for one platform (P7)",
                op.location,
            )
        if op.name == MANUAL_COMPUTATION:
            return ir.WalkResult.SKIP
        has_token = any(bindings.TokenType.isinstance(v.type) for v in (*op.operands, *op.results))
        if op.name in _ASKS or op in communicating or has_token:
            raise ToolError(
                f"{op.name} stands outside of a manual computation, where it would run once on "
                "each device instead of once: partition cannot divide it (P5)",
                op.location,
            )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


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


def prepare(module: ir.Module, shardings: ValueShardings) -> None:
    """Dissolves named computations, and gives all shardings the one mesh."""
    for op in reversed(ops_named(module.operation, {NAMED_COMPUTATION})):  # inner ones first
        for name, user in (
            ("in_shardings", op),
            ("out_shardings", terminator(OneRegion(op).body)),
        ):
            stated = sharding_per_value(op.attributes[name]) if name in op.attributes else []
            for number, sharding in enumerate(stated):
                value = user.operands[number]
                if isinstance(value.type, ir.RankedTensorType):
                    point = ir.InsertionPoint(user)
                    user.operands[number] = constrained(value, sharding, point, op.location)
        dissolve(op)
    # Takes out constraints on scalars, which nothing divides; jax puts them into reducers.
    for op in ops_named(module.operation, {SHARDING_CONSTRAINT}):
        if not rank_of(op.operands[0]):
            replace(op, op.operands)
    _unify_meshes(module, shardings)
