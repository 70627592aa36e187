"""Finds the communication that a program leaves to a compiler, by the kind of its shardings.

sdy.sharding, sdy.sharding_constraint, a manual computation with free axes      Shardy's
mhlo.sharding, @Sharding, @SPMDFullToShardShape, mhlo.spmd_output_sharding      GSPMD's
xla.sdy.sharding among the frontend attributes, @xla.sdy.GlobalToLocalShape     Shardy's, as XLA
                                                                                passes them on

XLA's partitioner may add collectives of its own to a program for all devices (`op_that_may_add`).
It does so if a value outside of manual computations is made in one sharding and used in another.
Such collectives are not in the module, and their order is not determined.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import ModuleFacts, meshes_of
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    function_sharding,
    manual_axes,
    rank_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES
from stablehlo_tools.dialect.gspmd import is_gspmd, is_round_trip, may_be_sharded
from stablehlo_tools.dialect.names import (
    BARRIER,
    BROADCAST,
    CONSTANT,
    MANUAL_COMPUTATION,
    PARTITION_ID,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.traits import (
    ELEMENTWISE,
    STABLEHLO,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
)
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import FUNCTION, entry_function, terminator, walk

EXPLICIT = "partition,create-reduce-scatter"  # the passes that write collectives into a program
_NO_WORK = frozenset({"func.return", CONSTANT, BARRIER}) | ops_with(Trait.TOKEN)
_CARRIED_MESHES, _SIZES = re.compile(r"#sdy\.mesh<\[(.*?)\]"), re.compile(r"=(\d+)")
_TILES = re.compile(r"devices=\[([\d,]+)\]")


class Annotation(enum.Enum):
    """The kind of shardings by which a program is divided."""

    SHARDY = "Shardy's shardings (sdy.sharding)"
    GSPMD = "GSPMD's shardings (mhlo.sharding)"
    ROUND_TRIP = "Shardy's shardings as XLA's frontend attributes (xla.sdy.sharding)"


@dataclass(frozen=True)
class LeftToCompiler:
    """Work that is left to a compiler's partitioner, on `partitions` devices.

    `place` is the location of the first sharding.
    """

    annotation: Annotation
    partitions: int
    place: ir.Location

    @property
    def advice(self) -> str:
        """Advice for messages: the passes that write the collectives into the program."""
        return f"run {EXPLICIT} first"


def refuse_unpartitioned(module: ir.Module, name: str, precondition: str) -> None:
    """Raises ToolError if collectives are left to a compiler, because the pass `name` would miss
    them."""
    left = left_to_the_partitioner(module)
    if left is not None:
        raise ToolError(
            f"{name}: the program leaves its collectives to the compiler: {left.advice} "
            f"({precondition})",
            module.operation.location,
            instead=(name, f"{EXPLICIT},{name}"),
        )


def left_to_the_partitioner(module: ir.Module) -> LeftToCompiler | None:
    """Returns the communication that a program leaves to a compiler; None if it contains all
    of it."""
    first = first_annotation(module)
    if first is None:
        return None
    annotation, op = first
    partitions = _partitions(module, annotation)
    if partitions < 2:
        return None
    if is_per_device(module):
        return None  # XLA keeps shardings on the parameters after it has partitioned
    if annotation is Annotation.SHARDY:
        block = Function(entry_function(module)).body
        work = [each.operation for each in block.operations if each.operation.name not in _NO_WORK]
        if all(op.name == MANUAL_COMPUTATION and not _free_axes(op, module) for op in work):
            return None  # each op is written for one device
    return LeftToCompiler(annotation, partitions, op.location)


def _partitions(module: ir.Module, annotation: Annotation) -> int:
    """Returns the number of partitions that the module states. If it states none, returns the
    largest number of its groups, meshes or tiles."""
    stated = module.operation.attributes.get("mhlo.num_partitions")
    if stated is not None:
        return ir.IntegerAttr(stated).value
    counts = [ModuleFacts.from_module(module).grid.num_partitions]
    counts += [mesh.size for mesh in meshes_of(module).values()]
    if annotation is Annotation.ROUND_TRIP:
        carried = str(module.operation.attributes.get(FRONTEND_ATTRIBUTES, ""))
        meshes = _CARRIED_MESHES.findall(carried)
        counts += [math.prod(map(int, _SIZES.findall(mesh))) for mesh in meshes]
    if annotation is Annotation.GSPMD:
        text = str(module.operation)
        counts += [math.prod(map(int, t.split(","))) for t in _TILES.findall(text)]
    return max(counts)


def first_annotation(module: ir.Module) -> tuple[Annotation, ir.Operation] | None:
    """Returns the kind of a module's shardings, and the first op with one; None if it has none.

    Older jax writes Shardy's and, beside them, GSPMD's of arguments.
    """
    if not may_be_sharded(module):
        return None
    first: dict[Annotation, ir.Operation] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        annotations: list[Annotation] = []
        if op.name in (MANUAL_COMPUTATION, SHARDING_CONSTRAINT) or SHARDING in op.attributes:
            annotations.append(Annotation.SHARDY)
        if is_gspmd(op):
            annotations.append(Annotation.GSPMD)
        if is_round_trip(op):
            annotations.append(Annotation.ROUND_TRIP)
        if op.name == FUNCTION:
            text = "".join(str(op.attributes.get(name, "")) for name in ("arg_attrs", "res_attrs"))
            annotations += [Annotation.SHARDY] if f"{SHARDING} =" in text else []
        for annotation in annotations:
            first.setdefault(annotation, op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    order = (Annotation.ROUND_TRIP, Annotation.GSPMD, Annotation.SHARDY)
    return next(((each, first[each]) for each in order if each in first), None)


def _free_axes(computation: ir.Operation, module: ir.Module) -> set[str]:
    """Returns the axes over which XLA's partitioner divides a manual computation."""
    axes = {name for mesh in meshes_of(module).values() for name, size in mesh.axes if size > 1}
    return axes - manual_axes(computation)


def partly_manual_computation(module: ir.Module) -> ir.Operation | None:
    """Returns the first manual computation of `main` that leaves axes to XLA's partitioner, which
    may add collectives inside it."""
    block = Function(entry_function(module)).body
    computations = (v.operation for v in block.operations if v.operation.name == MANUAL_COMPUTATION)
    return next((op for op in computations if _free_axes(op, module)), None)


# Ops whose result is the same on all devices, or fits any sharding.
_FREE = ops_with(Trait.TOKEN) | {CONSTANT, PARTITION_ID}
# It is not known how the partitioner treats these elementwise ops. CHLO's ops are left out for the
# same reason.
_UNTRIED = ops_with_any(Trait.COMPLEX_PART | Trait.INTEGRAL | Trait.SHIFT) | full_names(
    "atan2 cbrt count_leading_zeros exponential_minus_one log_plus_one popcnt reduce_precision "
    "remainder tan"
)
_ELEMENTWISE = STABLEHLO & ELEMENTWISE - _UNTRIED


def op_that_may_add(main: ir.Operation) -> ir.Operation | None:
    """Returns the first op of a function without calls that may need added collectives; None if
    none does.

    No collectives are added for ops on scalars, and for elementwise ops on values with the same
    sharding. The same holds for manual computations whose operands have the stated shardings.
    """
    block = Function(main).body
    arguments, end = list(block.arguments), terminator(block)
    known = _stated_shardings(main, "arg_attrs", len(arguments))
    shardings: dict[ir.Value, str | None] = dict(zip(arguments, known, strict=True))
    for view in block.operations:
        op = view.operation
        if op == end:
            break
        made = _made(op, shardings)
        if made is None:
            return op
        shardings.update(zip(op.results, made, strict=True))
    wanted = _stated_shardings(main, "res_attrs", len(end.operands))
    for value, sharding in zip(end.operands, wanted, strict=True):
        if _differ(shardings.get(value), sharding):
            return end
    return None


def _made(op: ir.Operation, shardings: Mapping[ir.Value, str | None]) -> list[str | None] | None:
    """Returns the shardings of an op's results; None if the op may need communication."""
    taken = [shardings.get(value) for value in op.operands]
    if op.name == MANUAL_COMPUTATION:
        wanted = sharding_per_value(op.attributes["in_shardings"])
        if any(_differ(a, _normal(b)) for a, b in zip(taken, wanted, strict=True)):
            return None
        return [_normal(made) for made in sharding_per_value(op.attributes["out_shardings"])]
    if op.name == BARRIER:
        return taken
    if op.name in _FREE or not any(map(rank_of, (*op.operands, *op.results))):
        return [None for _ in op.results]
    if op.name == BROADCAST and not rank_of(op.operands[0]):
        return [None]
    if op.name not in _ELEMENTWISE:
        return None
    pairs = zip(op.operands, taken, strict=True)
    given = {sharding for value, sharding in pairs if sharding and rank_of(value)}
    if len(given) > 1:
        return None
    return [next(iter(given), None)]


def _differ(one: str | None, other: str | None) -> bool:
    """Returns True if two shardings are both known, and different."""
    return one is not None and other is not None and one != other


def _normal(sharding: ir.Attribute) -> str:
    """Returns the text of a sharding without the marks of open dimensions."""
    return re.sub(r",?\s*\?", "", str(sharding))


def _stated_shardings(main: ir.Operation, name: str, count: int) -> list[str | None]:
    stated = [function_sharding(main, name, number) for number in range(count)]
    return [None if sharding is None else _normal(sharding) for sharding in stated]
