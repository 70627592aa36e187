"""Reduces a program to one device of a rank before it is cut, and expands rank programs afterwards.

The program is partitioned first. Its `main` is then one manual computation, which is unwrapped.

The programs of a set run together: rank r on the devices from r * count on. So in each program,
groups and pairs of devices are written for all ranks. `main` becomes a manual computation over a
mesh whose slowest axis is the ranks. Permutes become gathers within the rank, because XLA requires
all devices of a program, including those of other ranks, to take part in a permute.

    sdy.mesh @mesh = <["rank"=4, "data"=2]>
    %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}]>] …
         manual_axes={"rank", "data"} (%local) { … }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives, set_groups
from stablehlo_tools.analysis.replica_groups import DeviceMesh, GroupMode
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Dims,
    MeshAxes,
    ValueShardings,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.communication_kinds import (
    EXCHANGE_GROUPED,
    REDUCTION_GROUPED,
    TRANSFERS,
)
from stablehlo_tools.dialect.custom_calls import label
from stablehlo_tools.dialect.names import (
    MANUAL_COMPUTATION,
    PARTITION_ID,
    RESHARD,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.inline import dissolve, unwrap_body, wrap_body
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import (
    MESH,
    entry_function,
    erase_unused_meshes,
    ops_named,
    symbol_name,
    walk,
)
from stablehlo_tools.mpmd.transfers import gather_local_permutes
from stablehlo_tools.mpmd.writing.fixed import BlockRows
from stablehlo_tools.transforms.create_reduce_scatter import CreateReduceScatterPass
from stablehlo_tools.transforms.partition import PartitionPass

_SAYING = frozenset({SHARDING_CONSTRAINT, RESHARD, "sdy.propagation_barrier"})
_PERMUTE = "collective_permute"
_GROUPED = REDUCTION_GROUPED | EXCHANGE_GROUPED | {_PERMUTE}
_MESH = "mesh"
_RANK = "rank"


@dataclass(frozen=True)
class RankDevices:
    """The devices of a rank, and how they divide the arguments and the results of the program.

    A single device has no mesh.
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

    def whole(self, type_: ir.Type, dims: Dims, place: ir.Location) -> ir.Type:
        """Returns the type of the whole value if each device has `type_`."""
        local = ir.RankedTensorType(type_)
        parts = [self.axes.size(axes) for axes in dims]
        shape = [size * count for size, count in zip(local.shape, parts, strict=True)]
        return ir.RankedTensorType.get(shape, local.element_type, loc=place)


def take_off_devices(module: ir.Module) -> RankDevices:
    """Makes `main` the program of one device. Returns how several devices share the work.

    Raises a located ToolError if the program cannot be partitioned.
    """
    grid = ModuleFacts.from_module(module, []).grid
    if grid.num_replicas > 1:
        raise ToolError(
            f"expand-mpmd: the program runs as {grid.num_replicas} replicas, but a rank is a mesh "
            "of partitions (P8)",
            entry_function(module).location,
        )
    count = grid.num_partitions
    if count == 1:
        _forget_shardings(module)
        return RankDevices()
    PartitionPass().run(module, Diagnostics())
    CreateReduceScatterPass(share_gathers=False).run(module, Diagnostics())
    main = entry_function(module)
    ops = [view.operation for view in Function(main).body.operations]
    if len(ops) != 2 or ops[0].name != MANUAL_COMPUTATION:
        raise ToolError(
            "expand-mpmd: the program of a device must be one manual computation over all axes "
            "(P8)",
            main.location,
        )
    manual = ops[0]
    taken, given = (
        sharding_per_value(manual.attributes[name]) for name in ("in_shardings", "out_shardings")
    )
    name = sharding_axes(next(iter([*taken, *given])))[0]
    mesh = ModuleFacts.from_module(module, []).meshes[name]
    shardings = ValueShardings(MeshAxes(mesh), name)
    devices = RankDevices(
        count, mesh, tuple(map(shardings.read, taken)), tuple(map(shardings.read, given))
    )
    unwrap_body(main, manual)
    return devices


def _forget_shardings(module: ir.Module) -> None:
    """Removes shardings and manual computations from a program for one device."""
    marked: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if SHARDING in op.attributes:
            del op.attributes[SHARDING]
        if op.name == MANUAL_COMPUTATION:
            _check_shares_nothing(op)
        if op.name in _SAYING or op.name == MANUAL_COMPUTATION:
            marked.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in marked:
        if op.name == MANUAL_COMPUTATION:
            dissolve(op)
        else:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def _check_shares_nothing(computation: ir.Operation) -> None:
    """Raises ToolError if a program for one device shares work over several."""
    inside = ManualComputation(computation).body
    sides = (
        (computation.operands, inside.arguments),
        (computation.results, ManualComputation(computation).yields),
    )
    for whole, own in (pair for side in sides for pair in zip(*side, strict=True)):
        if whole.type != own.type:
            elements, share = (
                prod(ir.RankedTensorType(type_).shape) for type_ in (whole.type, own.type)
            )
            raise ToolError(
                f"expand-mpmd: the program states 1 device, but divides {whole.type} over "
                f"{(elements // max(share, 1))}: export it with its arguments placed on the mesh "
                "(P8)",
                computation.location,
            )


class OnDevices:
    """Expands the rank programs of a set. Channels up to `channels` are those of its transfers."""

    def __init__(self, devices: RankDevices, ranks: int, channels: int) -> None:
        self._devices, self._ranks, self._channels = devices, ranks, channels

    def write(
        self, module: ir.Module, rank: int, taken: Sequence[BlockRows], given: Sequence[BlockRows]
    ) -> None:
        """Rewrites the program of a rank in place.

        `taken` and `given` have for each argument and result of the rank its rows of the
        original's. Raises a located ToolError for rows of a dimension that the devices divide.
        """
        self._extend_groups(module)
        # A device needs its number within its rank, whose first device is `first`.
        first = self._devices.count * rank
        for op in ops_named(module.operation, {PARTITION_ID}) if first else []:
            type_ = ir.RankedTensorType(op.results[0].type)
            build = Builder(ir.InsertionPoint(op), op.location)
            everywhere = build.op("partition_id", [], type_)
            here = build.same("subtract", everywhere, build.splat(first, [], type_.element_type))
            op.results[0].replace_all_uses_with(here)
            op.erase()
        gather_local_permutes(module, self._ranks, self._devices.count)
        erase_unused_meshes(module)  # groups that named axes of a mesh are now lists of devices
        inner = self._devices.mesh
        if inner is None:
            return
        names = {axis for axis, _ in inner.axes}
        candidates = (_RANK, *(f"{_RANK}_{number}" for number in range(len(names))))
        name = next(candidate for candidate in candidates if candidate not in names)
        ids = [n * inner.size + device for n in range(self._ranks) for device in inner.device_ids]
        mesh = DeviceMesh(((name, self._ranks), *inner.axes), tuple(ids))
        with module.context, ir.Location.unknown():
            self._wrap(module, mesh, _write_mesh(module, mesh), taken, given)

    def _wrap(
        self,
        module: ir.Module,
        mesh: DeviceMesh,
        name: str,
        taken: Sequence[BlockRows],
        given: Sequence[BlockRows],
    ) -> None:
        main = entry_function(module)
        block = Function(main).body
        returned = Function(main).yields
        sides = (
            ([self._dims(self._devices.taken, rows, main) for rows in taken], block.arguments),
            ([self._dims(self._devices.given, rows, main) for rows in given], returned),
        )
        inside, outside = (
            [
                self._devices.whole(value.type, dims, main.location)
                for dims, value in zip(listed, values, strict=True)
            ]
            for listed, values in sides
        )
        shardings = ValueShardings(MeshAxes(mesh), name)
        entering, leaving = (
            [shardings.attribute(dims, module.context) for dims in listed] for listed, _ in sides
        )
        axes = [axis for axis, _ in mesh.axes]
        wrap_body(main, (entering, leaving), axes, (inside, outside))
        main_type = ir.FunctionType.get(inside, outside, module.context)
        main.attributes["function_type"] = ir.TypeAttr.get(main_type, module.context)

    def _dims(self, known: Sequence[Dims], rows: BlockRows, main: ir.Operation) -> Dims:
        dims = known[rows.argument]
        if rows.dim is not None and dims[rows.dim]:
            raise ToolError(
                f"expand-mpmd: argument or result {rows.argument} of the program is cut by layers "
                f"along dimension {rows.dim}, which the devices of a rank divide, too (P8)",
                main.location,
            )
        return dims

    def _extend_groups(self, module: ir.Module) -> None:
        """Writes the groups of devices for all ranks, on channels that are free."""
        count = self._devices.count
        own = [each for each in find_collectives(module) if each.kind not in TRANSFERS]
        # Groups are read for the devices of one rank, then written for those of all ranks.
        _set_partitions(module, count)
        facts = ModuleFacts.from_module(module, own)
        for channel, collective in enumerate(own, self._channels + 1):
            if collective.kind not in _GROUPED or collective.is_async_call:
                raise ToolError(
                    f"expand-mpmd: the devices that {label(collective.op)} names cannot be "
                    "written for several ranks (P8)",
                    collective.op.location,
                )
            if collective.group_mode is GroupMode.CROSS_REPLICA:
                continue  # there is one replica, so each device is in a group of one
            groups = facts.groups(collective)
            assert groups is not None, "grouped collectives and permutes have groups"
            shifted = [
                [rank * count + device for device in group]
                for rank in range(self._ranks)
                for group in groups
            ]
            set_groups(collective, shifted, channel)
        _set_partitions(module, count * self._ranks)


def _write_mesh(module: ir.Module, mesh: DeviceMesh) -> str:
    """Writes the mesh of all ranks. Returns its name."""
    taken = {symbol_name(op) for op in module.body.operations}
    candidates = (_MESH, *(f"{_MESH}_{number}" for number in range(len(taken))))
    name = next(candidate for candidate in candidates if candidate not in taken)
    axes = ", ".join(f'"{axis}"={size}' for axis, size in mesh.axes)
    ids = f", device_ids={list(mesh.device_ids)}" if mesh.device_ids else ""
    ir.Operation.create(
        MESH,
        attributes={
            "sym_name": ir.StringAttr.get(name),
            "mesh": ir.Attribute.parse(f"#sdy.mesh<[{axes}]{ids}>"),
        },
        ip=ir.InsertionPoint.at_block_begin(module.body),
    )
    return name


def _set_partitions(module: ir.Module, count: int) -> None:
    i32 = ir.IntegerType.get_signless(32, module.context)
    module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(i32, count)
