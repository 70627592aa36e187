"""What partitioning asks of a module, and the form that it brings it into first."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.communication import MANUAL_COMPUTATION
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value
from stablehlo_tools.analysis.tensor_shardings import (
    Dims,
    ValueShardings,
    function_sharding,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.manual import wrap_body
from stablehlo_tools.ir.symbols import symbol_name
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.partitioning.named_computations import dissolve_named_computations

_GSPMD_CALLS = re.compile(r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape")
_GSPMD = "mhlo.sharding"
_PLATFORM_INDEX = '"_platform_index"'  # what jax marks the argument with
_ASKS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"})
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


def is_partitioned(main: ir.Operation, shardings: ValueShardings) -> bool:
    """Whether all of `main` is one manual computation over every axis of the mesh, which takes and
    gives the values as the signature divides them."""
    block = main.regions[0].blocks[0]
    *ops, end = [op.operation for op in block.operations]
    manual = next((op for op in ops if op.name == MANUAL_COMPUTATION), None)
    if manual is None or not all(op == manual or _handles_tokens_alone(op) for op in ops):
        return False
    axes = {name for name, size in shardings.axes.mesh.axes if size > 1}
    if not axes <= manual_axes(manual):
        return False
    taken, given = (list(filter(_is_tensor, side)) for side in (manual.operands, manual.results))
    if taken != list(block.arguments) or list(end.operands) != given:
        return False
    sides = (("arg_attrs", "in_shardings", taken), ("res_attrs", "out_shardings", given))
    for kind, border, values in sides:
        inside = sharding_per_value(manual.attributes[border])
        for number in range(len(values)):
            said = function_sharding(main, kind, number)
            if said is not None and shardings.read(said) != shardings.read(inside[number]):
                return False
    return True


def _handles_tokens_alone(op: ir.Operation) -> bool:
    """Whether an op makes or joins tokens, as thread-tokens puts them around a computation."""
    return not any(_is_tensor(value) for value in (*op.operands, *op.results))


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def check_shardy(module: ir.Module) -> None:
    """Raises a located ToolError for a sharding of GSPMD's (P1)."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        said = _GSPMD in op.attributes or any(
            _GSPMD in str(op.attributes.get(name, "")) for name in ("arg_attrs", "res_attrs")
        )
        if said or _GSPMD_CALLS.fullmatch(_call_target(op)):
            raise ToolError(
                "the shardings are GSPMD's (mhlo.sharding), and partition reads Shardy's "
                "(sdy.sharding): export with jax_use_shardy_partitioner, as jax does by default "
                "(P1)",
                op.location,
            )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def check(module: ir.Module, main: ir.Operation, shardings: ValueShardings) -> None:
    """Raises a located ToolError for what P2, P4, P5, P6, P7 or P8 excludes."""
    attributes = module.operation.attributes
    replicas = attributes.get("mhlo.num_replicas")
    if replicas is not None and ir.IntegerAttr(replicas).value > 1:
        raise ToolError(
            "partition needs a program of one replica, of several partitions (P4)", main.location
        )
    communicating = {collective.op for collective in find_collectives(module)}
    several = _PLATFORM_INDEX in str(main.attributes.get("arg_attrs", ""))
    for argument in main.regions[0].blocks[0].arguments:
        _check_static(argument, main)
        if bindings.TokenType.isinstance(argument.type):
            raise ToolError(
                "an argument is a token, which orders side effects: partition divides programs "
                "without any (P5)",
                main.location,
            )
    Border.of(main, shardings)

    def visit(op: ir.Operation) -> ir.WalkResult:
        for result in op.results:
            _check_static(result, op)
            shardings.of(result)
        if several and _call_target(op):
            raise ToolError(
                f"the program is for several platforms, and the custom call {_call_target(op)!r} "
                "for one of them may be unknown to the others: export for one platform (P8)",
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
    kind = value.type
    if isinstance(kind, ir.RankedTensorType) and not kind.has_static_shape:
        raise ToolError(
            f"{op.name} has a value of a symbolic shape, {kind}: partition needs static shapes; "
            "export for concrete ones (P2)",
            op.location,
        )


def _carries_token(op: ir.Operation) -> bool:
    values = [*op.operands, *op.results]
    return any(bindings.TokenType.isinstance(value.type) for value in values)


def prepare(module: ir.Module, mesh: NamedMesh) -> None:
    """Inlines every call and named computation, and gives all shardings the one mesh."""
    inline_all_calls(module)
    dissolve_named_computations(module)
    _drop_scalar_constraints(module)
    _unify_meshes(module, mesh)


def _drop_scalar_constraints(module: ir.Module) -> None:
    """Takes out constraints on scalars, which nothing divides; jax puts them into reducers."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "sdy.sharding_constraint" and not rank_of(op.operands[0]):
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in found:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _unify_meshes(module: ir.Module, mesh: NamedMesh) -> None:
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


@dataclass(frozen=True)
class Signature:
    """What `main` looks like from outside, to be given back after partitioning."""

    arguments: list[ir.Type]
    results: list[ir.Type]
    attributes: dict[str, ir.Attribute]

    @staticmethod
    def of(main: ir.Operation) -> Signature:
        """The signature of a function."""
        block = main.regions[0].blocks[0]
        return Signature(
            [argument.type for argument in block.arguments],
            [value.type for value in terminator(block).operands],
            dict(main.attributes.items()),
        )

    def wrap(self, main: ir.Operation, border: Border, axes: list[str]) -> None:
        """Puts the local body into one manual computation, and the signature back around it."""
        wrap_body(main, border.arguments, border.results, axes, (self.arguments, self.results))
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        for name, attribute in self.attributes.items():
            main.attributes[name] = attribute


@dataclass(frozen=True)
class Border:
    """The shardings of a function's arguments and results, as a manual computation lists them."""

    arguments: ir.Attribute
    results: ir.Attribute

    @staticmethod
    def of(main: ir.Operation, shardings: ValueShardings) -> Border:
        """How Shardy divided them. Raises a ToolError where one does not divide (P6)."""
        block = main.regions[0].blocks[0]
        sides: list[ir.Attribute] = []
        for kind, values in (
            ("arg_attrs", list(block.arguments)),
            ("res_attrs", list(terminator(block).operands)),
        ):
            found = [_at_border(main, kind, n, v, shardings) for n, v in enumerate(values)]
            sides.append(shardings.per_value(found, main.context))
        return Border(*sides)


def _at_border(
    main: ir.Operation, kind: str, number: int, value: ir.Value, shardings: ValueShardings
) -> Dims:
    attribute = function_sharding(main, kind, number)
    dims = ((),) * rank_of(value)
    if attribute is not None:
        dims = shardings.read(attribute)
        shardings.check_reduced(attribute, main.location)
    shape = ir.RankedTensorType(value.type).shape
    for size, axes in zip(shape, dims, strict=True):
        parts = shardings.axes.size(axes)
        if size % parts:
            what = "argument" if kind == "arg_attrs" else "result"
            raise ToolError(
                f"{what} {number} of @main has a dimension of {size} that is divided by {parts}: "
                "partition needs equal parts (P6)",
                main.location,
            )
    return dims
