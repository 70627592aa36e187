"""The devices of a rank: each rank is a mesh, that of the program.

What one device does is what is cut into stages. So the program is partitioned first, and the manual
computation that is all of `main` then is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import sharding_axes, sharding_per_value
from stablehlo_tools.analysis.tensor_shardings import SHARDING, Dims, MeshAxes, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.manual import dissolve, unwrap_body
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.create_reduce_scatter import CreateReduceScatterPass
from stablehlo_tools.transforms.partition import PartitionPass

_SAYING = frozenset({"sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier"})


@dataclass(frozen=True)
class Devices:
    """How many a rank has, and how they divide the arguments and the results of the program.

    One that is alone has no mesh.
    """

    count: int = 1
    mesh: DeviceMesh | None = None
    taken: tuple[Dims, ...] = ()
    given: tuple[Dims, ...] = ()

    @cached_property
    def axes(self) -> MeshAxes:
        """The axes of the mesh."""
        assert self.mesh is not None, "one device divides nothing"
        return MeshAxes(self.mesh)

    def whole(self, kind: ir.Type, dims: Dims, place: ir.Location) -> ir.Type:
        """The type of what all devices have together, where each has `kind`."""
        local = ir.RankedTensorType(kind)
        parts = [self.axes.size(axes) for axes in dims]
        shape = [size * count for size, count in zip(local.shape, parts, strict=True)]
        return ir.RankedTensorType.get(shape, local.element_type, loc=place)

    def whole_shape(self, kind: ir.Type, argument: int) -> tuple[int, ...]:
        """The shape of an argument of the program, of which each device has `kind`."""
        if self.mesh is not None:
            kind = self.whole(kind, self.taken[argument], ir.Location.unknown(kind.context))
        return tuple(ir.RankedTensorType(kind).shape)


def take_off_devices(module: ir.Module) -> Devices:
    """Makes `main` what one device does, and says how several share the work.

    Raises a located ToolError where the program cannot be partitioned.
    """
    count = _size(module)
    if count == 1:
        _forget_shardings(module)
        return Devices()
    PartitionPass().run(module, Diagnostics())
    CreateReduceScatterPass(share_gathers=False).run(module, Diagnostics())
    main = entry_function(module)
    ops = [view.operation for view in main.regions[0].blocks[0].operations]
    if len(ops) != 2 or ops[0].name != MANUAL_COMPUTATION:
        raise ToolError(
            "expand-mpmd: what a device does is not one manual computation over all axes (P8)",
            main.location,
        )
    manual = ops[0]
    taken, given = (
        sharding_per_value(manual.attributes[name]) for name in ("in_shardings", "out_shardings")
    )
    name = sharding_axes(next(iter([*taken, *given])))[0]
    mesh = ModuleFacts.of(module, []).meshes[name]
    shardings = ValueShardings(MeshAxes(mesh), name)
    found = Devices(
        count, mesh, tuple(map(shardings.read, taken)), tuple(map(shardings.read, given))
    )
    unwrap_body(main, manual)
    return found


def _size(module: ir.Module) -> int:
    grid = ModuleFacts.of(module, []).grid
    if grid.num_replicas > 1:
        raise ToolError(
            f"expand-mpmd: the program runs as {grid.num_replicas} replicas, and a rank is a mesh "
            "of partitions (P8)",
            entry_function(module).location,
        )
    return grid.num_partitions


def _forget_shardings(module: ir.Module) -> None:
    """Takes off what says how one device divides values: it has all of each."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if SHARDING in op.attributes:
            del op.attributes[SHARDING]
        if op.name == MANUAL_COMPUTATION:
            _check_shares_nothing(op)
        if op.name in _SAYING or op.name == MANUAL_COMPUTATION:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in found:
        if op.name == MANUAL_COMPUTATION:
            dissolve(op)
        else:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def _check_shares_nothing(computation: ir.Operation) -> None:
    """Raises ToolError for work that several devices share in a program that counts one."""
    inside = computation.regions[0].blocks[0]
    sides = (
        (computation.operands, inside.arguments),
        (computation.results, terminator(inside).operands),
    )
    for whole, own in (pair for side in sides for pair in zip(*side, strict=True)):
        if whole.type != own.type:
            raise ToolError(
                "expand-mpmd: the program says that it is for 1 device, and shares "
                f"{whole.type} over {_ratio(whole.type, own.type)}: export it with its arguments "
                "placed on the mesh (P8)",
                computation.location,
            )


def _ratio(whole: ir.Type, own: ir.Type) -> int:
    """Over how many devices."""
    elements, share = (prod(ir.RankedTensorType(kind).shape) for kind in (whole, own))
    return elements // max(share, 1)
