"""What communication a program leaves to a compiler: by whose shardings, and where they begin.

sdy.sharding, sdy.sharding_constraint, a manual computation with free axes      Shardy's
mhlo.sharding, @Sharding, @SPMDFullToShardShape, mhlo.spmd_output_sharding      GSPMD's
xla.sdy.sharding among the frontend attributes, @xla.sdy.GlobalToLocalShape     Shardy's, as XLA
                                                                                passes them on
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import ModuleFacts, meshes_of
from stablehlo_tools.analysis.entry import entry_function, is_per_device
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.analysis.tensor_shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.gspmd import is_gspmd, is_round_trip
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.ir.walk import walk

_NO_WORK = frozenset({"func.return", "stablehlo.constant", "stablehlo.optimization_barrier"})
_TILES = re.compile(r"devices=\[([\d,]+)\]")


class Annotation(enum.Enum):
    """Whose shardings say how a program is divided."""

    SHARDY = "Shardy's shardings (sdy.sharding)"
    GSPMD = "GSPMD's shardings (mhlo.sharding)"
    ROUND_TRIP = "Shardy's shardings as XLA's frontend attributes (xla.sdy.sharding)"

    @property
    def remedy(self) -> str:
        """How to export the program, for it to have shardings that can be read."""
        if self is Annotation.ROUND_TRIP:
            return "again, with a jax that writes sdy.sharding"
        return "with jax_use_shardy_partitioner, as jax does by default"


@dataclass(frozen=True)
class LeftToCompiler:
    """Work that is left to a compiler's partitioner, on `partitions` devices.

    `place` is where the first sharding stands.
    """

    annotation: Annotation
    partitions: int
    place: ir.Location

    @property
    def advice(self) -> str:
        """How to get the collectives into the program."""
        if self.annotation is Annotation.SHARDY:
            return "run partition,create-reduce-scatter first"
        return (
            f"they follow {self.annotation.value}, which partition does not read: export "
            f"{self.annotation.remedy}, and run partition,create-reduce-scatter first"
        )


def leaves_work_to_the_partitioner(module: ir.Module) -> bool:
    """Whether some of a program is written for all devices and sharded among them."""
    return left_to_the_partitioner(module) is not None


def left_to_the_partitioner(module: ir.Module) -> LeftToCompiler | None:
    """What of a program's communication is left to a compiler; None where all is in the program."""
    first = _first_annotation(module)
    if first is None:
        return None
    annotation, op = first
    partitions = _partitions(module, annotation)
    if partitions < 2:
        return None
    if is_per_device(module):
        return None  # XLA leaves on parameters how it has divided them
    if annotation is Annotation.SHARDY:
        block = entry_function(module).regions[0].blocks[0]
        if all(_is_manual(view.operation, module) for view in block.operations):
            return None
    return LeftToCompiler(annotation, partitions, op.location)


def _partitions(module: ir.Module, annotation: Annotation) -> int:
    """Into how many partitions the module says that it is divided; else its meshes, or tiles."""
    stated = module.operation.attributes.get("mhlo.num_partitions")
    if stated is not None:
        return ir.IntegerAttr(stated).value
    counts = [ModuleFacts.of(module).grid.num_partitions]
    counts += [mesh.size for mesh in meshes_of(module).values()]
    if annotation is Annotation.GSPMD:
        text = str(module.operation)
        counts += [math.prod(map(int, t.split(","))) for t in _TILES.findall(text)]
    return max(counts)


def _first_annotation(module: ir.Module) -> tuple[Annotation, ir.Operation] | None:
    """Whose shardings a module has, and the first op with one.

    Older jax writes Shardy's and, beside them, GSPMD's of arguments.
    """
    first: dict[Annotation, ir.Operation] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for annotation in _annotations(op):
            first.setdefault(annotation, op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    order = (Annotation.ROUND_TRIP, Annotation.GSPMD, Annotation.SHARDY)
    return next(((each, first[each]) for each in order if each in first), None)


def _annotations(op: ir.Operation) -> list[Annotation]:
    annotations: list[Annotation] = []
    if op.name in (MANUAL_COMPUTATION, "sdy.sharding_constraint") or SHARDING in op.attributes:
        annotations.append(Annotation.SHARDY)
    if is_gspmd(op):
        annotations.append(Annotation.GSPMD)
    if is_round_trip(op):
        annotations.append(Annotation.ROUND_TRIP)
    if op.name == FUNCTION:
        text = "".join(str(op.attributes.get(name, "")) for name in ("arg_attrs", "res_attrs"))
        annotations += [Annotation.SHARDY] if f"{SHARDING} =" in text else []
    return annotations


def _is_manual(op: ir.Operation, module: ir.Module) -> bool:
    """Whether an op of `main` is written for one device, or does nothing."""
    if op.name != MANUAL_COMPUTATION:
        return op.name in _NO_WORK
    free = {name for mesh in meshes_of(module).values() for name, size in mesh.axes if size > 1}
    return free <= manual_axes(op)
