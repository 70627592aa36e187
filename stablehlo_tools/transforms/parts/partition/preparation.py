"""What partitioning asks of a module, and the form that it brings it into first."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.partitioner_work import Annotation
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value
from stablehlo_tools.analysis.tensor_shardings import (
    ValueShardings,
    function_sharding,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.gspmd import is_gspmd, is_round_trip
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.partition.border import even_dims
from stablehlo_tools.transforms.parts.partition.meshes import NamedMesh, unify_meshes
from stablehlo_tools.transforms.parts.partition.named_computations import (
    dissolve_named_computations,
)

_PLATFORM_INDEX = '"_platform_index"'  # what jax marks the argument with
_ASKS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"})


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
    if taken != list(block.arguments) or list(end.operands) != given[: len(end.operands)]:
        return False
    if any(list(witness.uses) for witness in given[len(end.operands) :]):
        return False
    sides = (
        ("arg_attrs", "in_shardings", taken),
        ("res_attrs", "out_shardings", given[: len(end.operands)]),
    )
    for kind, border, values in sides:
        inside = sharding_per_value(manual.attributes[border])
        for number in range(len(values)):
            said = function_sharding(main, kind, number)
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
    stated = bindings.TensorShardingAttr(said).dimension_shardings
    wanted = even_dims(value, shardings.read(said), shardings)
    for dim, outer, inner in zip(stated, wanted, shardings.read(inside), strict=True):
        closed = bindings.SdyDimensionShardingAttr(dim).is_closed
        if inner != outer and (closed or inner[: len(outer)] != outer):
            return False
    return shardings.unreduced_axes(said) == shardings.unreduced_axes(inside)


def _handles_tokens_alone(op: ir.Operation) -> bool:
    """Whether an op makes or joins tokens, as thread-tokens puts them around a computation."""
    return not any(_is_tensor(value) for value in (*op.operands, *op.results))


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def check_shardy(module: ir.Module) -> None:
    """Raises a located ToolError for a sharding that is not Shardy's own (P1)."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op == module.operation:
            return ir.WalkResult.ADVANCE
        if is_round_trip(op):
            what, annotation = "XLA's frontend attributes (xla.sdy.sharding)", Annotation.ROUND_TRIP
        elif is_gspmd(op):
            what, annotation = "GSPMD's (mhlo.sharding)", Annotation.GSPMD
        else:
            return ir.WalkResult.ADVANCE
        raise ToolError(
            f"the shardings are {what}, and partition reads Shardy's (sdy.sharding): export "
            f"{annotation.remedy} (P1)",
            op.location,
        )

    walk(module.operation, visit)


def check(module: ir.Module, main: ir.Operation, shardings: ValueShardings) -> None:
    """Raises a located ToolError for what P2, P4, P5, P6 or P7 excludes."""
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
    """Dissolves named computations, and gives all shardings the one mesh."""
    dissolve_named_computations(module)
    _drop_scalar_constraints(module)
    unify_meshes(module, mesh)


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
