"""Describes every communicating op of a module: its kind, its participants and its bytes.

A communicating op is a collective (`all_gather` … `collective_broadcast`) or a point-to-point or
host transfer (`send`, `recv`, `infeed`, `outfeed`). A `custom_call` with a side effect or a token
is one, too. An `async_start` represents the collective in its region. One of jax's explicit starts
(`custom_call @"all-gather-start"`) represents the collective that its configuration describes.

Channels: with a channel above 0, the ids of groups and pairs count partitions or processes. With 0,
as without a handle, they count replicas (`replica_groups`). So 0 must stay 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    GroupMode,
    ProcessGrid,
    ProcessGroups,
    exchange_group_mode,
    mesh_axes_groups,
    permute_groups,
    process_groups,
    reduction_group_mode,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.communication_kinds import (
    EXCHANGE_GROUPED,
    RAGGED_ALL_TO_ALL,
    REDUCTION_GROUPED,
    TRANSFERS,
)
from stablehlo_tools.dialect.custom_calls import (
    ASYNC_STARTS,
    MAY_COMMUNICATE,
    START_OF_DONE,
    is_annotation,
    label,
    target_of,
)
from stablehlo_tools.dialect.names import ASYNC_START, BARRIER, CUSTOM_CALL
from stablehlo_tools.dialect.reducers import combining_ops
from stablehlo_tools.dialect.traits import CARRIERS, Trait, ops_with_any
from stablehlo_tools.ir.async_calls import detached_collective
from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE, device_table
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Combining, WithBody
from stablehlo_tools.ir.walk import MESH, functions_around, symbol_name, walk
from stablehlo_tools.order.program import UNKNOWN_CALL

GRID = ("mhlo.num_replicas", "mhlo.num_partitions")  # attributes of a module
_KINDS = {name: name.partition(".")[2] for name in ops_with_any(Trait.COLLECTIVE | Trait.TRANSFER)}
_OF_PAIRS = TRANSFERS | {"collective_permute"}

# Ops between a start and its done that may pass values on unchanged.
_MAY_HAND_ON = CARRIERS | {BARRIER}

# Communication of dialects that this toolkit does not rewrite, and must refuse.
_FOREIGN_COMMUNICATION = re.compile(
    r"mhlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_\w+|cross-replica-sum|"
    r"send|recv|infeed|outfeed|async_start)"
    r"|sdy\.(all_gather|all_reduce|reduce_scatter|all_slice|all_to_all|collective_permute|"
    r"sharded_to_unreduced|replicated_to_unreduced)"
    r"|mpmd\.\w+"
)
_QUANTIZED = re.compile(r"!quant\.uniform<[iu](\d+)[:<]")
_INDEX_BITS = 64
_KNOWN_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy", "mhlo", "shape"})


@dataclass(frozen=True)
class Collective:
    """A communicating op. `op` is the op in the program; `inner` holds the attributes.

    They differ only for an async pair: `op` is the start, and `inner` the collective in its region.
    For an explicit start of jax's, `inner` is a detached op that is only read.
    """

    op: ir.Operation
    inner: ir.Operation
    kind: str
    holder: ir.Module | None = field(default=None, repr=False, compare=False)  # of a detached op

    @property
    def is_async(self) -> bool:
        """True if this is the start of an async pair."""
        return self.op.name == ASYNC_START or self.is_async_call

    @property
    def is_async_call(self) -> bool:
        """True if this is one of jax's explicit starts, a custom call."""
        return self.op.name == CUSTOM_CALL and self.kind in ASYNC_STARTS.values()

    @property
    def attributed(self) -> ir.Operation:
        """The op of the program that an attribute for a compiler is put on."""
        return self.op if self.is_async_call else self.inner

    @cached_property
    def channel_id(self) -> int:
        """The channel handle's id, 0 without a handle. Never an identity: handles repeat."""
        if self.kind == RAGGED_ALL_TO_ALL:
            return _integer(self.group_attribute("channel_id"), 0)
        return channel_number(self.inner)

    def group_attribute(self, name: str) -> ir.Attribute | None:
        """Returns an attribute of the participants; in a ragged_all_to_all, of a dictionary."""
        if self.kind != RAGGED_ALL_TO_ALL:
            return self.inner.attributes.get(name)
        config = self.inner.attributes.get("backend_config")
        return config[name] if isinstance(config, ir.DictAttr) and name in config else None

    @cached_property
    def group_mode(self) -> GroupMode | None:
        """The unit that the ids of the groups count; None for transfers and custom calls."""
        if self.kind in REDUCTION_GROUPED:
            try:
                return reduction_group_mode(
                    self.channel_id, "use_global_device_ids" in self.inner.attributes
                )
            except ValueError as error:
                raise ToolError(f"{self.inner.name}: {error}", self.op.location) from None
        if self.kind in EXCHANGE_GROUPED | {RAGGED_ALL_TO_ALL, "collective_permute"}:
            return exchange_group_mode(self.channel_id)
        return GroupMode.CROSS_REPLICA if self.kind == "cross-replica-sum" else None

    @property
    def element_types(self) -> tuple[str, ...]:
        """The element types of the operands, or of a receiving op's results, without repeats."""
        tensors = _tensors(self.inner.operands) or _tensors(self.inner.results)
        return tuple(dict.fromkeys(str(tensor.element_type) for tensor in tensors))

    @property
    def bytes_in(self) -> int | None:
        """Bytes of the tensor operands on one participant; None if a dimension is symbolic."""
        return _total_bytes(_tensors(self.inner.operands))

    @property
    def bytes_out(self) -> int | None:
        """Bytes of the tensor results on one participant; None if a dimension is symbolic."""
        return _total_bytes(_tensors(self.inner.results))

    @property
    def reduction(self) -> str | None:
        """`add`, `max` …, `custom` for a larger region, None if nothing is reduced."""
        if self.kind == "cross-replica-sum":
            return "add"
        if not len(self.inner.regions) or not len(self.inner.regions[0].blocks):
            return None
        body = combining_ops(Combining(self.inner).combiner)
        return body[0].name.removeprefix("stablehlo.") if len(body) == 2 else "custom"


@dataclass(frozen=True)
class ModuleFacts:
    """The process grid and the meshes that the groups of a module's collectives refer to."""

    grid: ProcessGrid
    meshes: dict[str, DeviceMesh]
    _read: dict[object, ProcessGroups | None] = field(
        default_factory=dict[object, ProcessGroups | None], compare=False, repr=False
    )

    @staticmethod
    def from_module(
        module: ir.Module, collectives: Sequence[Collective] | None = None
    ) -> ModuleFacts:
        """Reads `mhlo.num_replicas`, `mhlo.num_partitions` and the `sdy.mesh` symbols.

        A module that states neither number (torch-xla's do not) is assumed to run only on the
        processes that its collectives name. `collectives` are all of the module's, if known.
        """
        meshes = meshes_of(module)
        grid = stated_grid(module)
        if grid is None:
            listed = find_collectives(module) if collectives is None else collectives
            grid = _inferred_grid(listed, meshes)
        return ModuleFacts(grid, meshes)

    def groups(self, collective: Collective) -> ProcessGroups | None:
        """Returns process groups, in flattened ids; None for custom calls and unpaired transfers.

        Raises a located ToolError for ids outside the grid, groups that overlap, or a mesh or an
        axis that the module does not have.
        """
        mode, is_paired = collective.group_mode, collective.kind in _OF_PAIRS
        name = "source_target_pairs" if is_paired else "replica_groups"
        groups = collective.group_attribute(name)
        key = is_paired, groups, mode
        if key not in self._read:
            try:
                self._read[key] = self._read_groups(groups, mode, is_paired=is_paired)
            except ValueError as error:
                name = collective.inner.name
                raise ToolError(f"{name}: {error}", collective.op.location) from None
        return self._read[key]

    def _read_groups(
        self, groups: ir.Attribute | None, mode: GroupMode | None, *, is_paired: bool
    ) -> ProcessGroups | None:
        if is_paired:
            if groups is None or not isinstance(groups, ir.DenseIntElementsAttr):
                return None
            return permute_groups(_rows(groups), mode or GroupMode.CROSS_PARTITION, self.grid)
        if mode is None or groups is None:
            return None
        if not bindings.ReplicaGroupMeshAxesAttr.isinstance(groups):
            return process_groups(_rows(groups), mode, self.grid)
        by_axes = bindings.ReplicaGroupMeshAxesAttr(groups)
        axes = [_axis_ref(axis) for axis in ir.ArrayAttr(by_axes.axes)]
        # Positions in the mesh are device ids, in the mode's numbering as for dense groups.
        mesh = _resolved_mesh(by_axes.mesh, self.meshes)
        return process_groups(mesh_axes_groups(mesh, axes), mode, self.grid)

    def has_groups_of_one(self, collective: Collective) -> bool:
        """Returns True if each device is in a group of its own, or a permute has no pairs.

        jax writes these in the global view if the manual axes of a shard_map have one device.
        """
        groups = None if collective.kind in TRANSFERS else self.groups(collective)
        alone = groups is not None and all(len(set(group)) == 1 for group in groups)
        return alone and len(groups or ()) in (0, self.grid.size)


def meshes_of(module: ir.Module) -> dict[str, DeviceMesh]:
    """Returns the meshes of a module by their symbols, in the order of its text."""
    meshes: dict[str, DeviceMesh] = {}
    for op in module.body.operations:
        if op.operation.name == MESH:
            mesh = bindings.SdyMeshAttr(op.attributes["mesh"])
            axes = [bindings.SdyMeshAxisAttr(axis) for axis in mesh.axes]
            sizes = tuple((axis.name, axis.size) for axis in axes)
            meshes[symbol_name(op)] = DeviceMesh(sizes, tuple(mesh.device_ids))
    return meshes


def find_collectives(module: ir.Module) -> list[Collective]:
    """Returns every communicating op of the module, pre-order, function after function.

    Raises a located ToolError for an op of a dialect that is not understood.
    """
    return collectives_in(module.operation)


def collectives_in(root: ir.Operation) -> list[Collective]:
    """Returns every communicating op in an op, as `find_collectives` does."""
    collectives: list[Collective] = []
    classify = classify_communication(root.context)

    def visit(op: ir.Operation) -> ir.WalkResult:
        collective = classify(op)
        if collective is None:
            return ir.WalkResult.ADVANCE
        collectives.append(collective)
        return ir.WalkResult.SKIP  # regions hold a reduction, or the inner op of an async pair

    walk(root, visit)
    return collectives


def classify_communication(context: ir.Context) -> Callable[[ir.Operation], Collective | None]:
    """Returns a function for walk callbacks that returns the collective of an op, or None.

    It raises a located ToolError at the first op of a dialect that is not understood.
    """
    token = bindings.TokenType.get(context)
    understood: set[str] = set()
    functions: dict[str, ir.Operation] = {}  # read once, and only for explicit starts

    def classify(op: ir.Operation) -> Collective | None:
        name = op.name
        if name not in understood:
            _check_understood(op)
            understood.add(name)
        if name == ASYNC_START:
            inner = WithBody(op).body.operations[0].operation
            return Collective(op, inner, _KINDS.get(str(inner.name)) or str(inner.name))
        if name != CUSTOM_CALL:
            return Collective(op, op, _KINDS[name]) if name in _KINDS else None
        target = target_of(op)
        if target == RAGGED_ALL_TO_ALL:
            return Collective(op, op, RAGGED_ALL_TO_ALL)
        if target in ASYNC_STARTS:
            if not functions:
                functions.update(functions_around(op))
            inner, holder = detached_collective(op, functions)
            return Collective(op, inner, ASYNC_STARTS[target], holder)
        if (start := START_OF_DONE.get(target)) is not None:
            _check_done(op, start)
            return None
        if is_annotation(op):
            return None
        effect = op.attributes.get("has_side_effect")
        if (effect is not None and ir.BoolAttr(effect).value) or any(
            value.type == token for value in (*op.operands, *op.results)
        ):
            return Collective(op, op, "custom_call")
        return Collective(op, op, UNKNOWN_CALL) if MAY_COMMUNICATE in op.attributes else None

    return classify


def _resolved_mesh(mesh: ir.Attribute, meshes: dict[str, DeviceMesh]) -> DeviceMesh:
    if not isinstance(mesh, ir.FlatSymbolRefAttr):  # written in line
        inline = bindings.StablehloMeshAttr(mesh)
        axes = [bindings.StablehloMeshAxisAttr(axis) for axis in ir.ArrayAttr(inline.axes)]
        ids: tuple[int, ...] = ()
        if isinstance(inline.device_ids, ir.Attribute):
            ids = tuple(map(int, np.array(ir.DenseIntElementsAttr(inline.device_ids)).ravel()))
        return DeviceMesh(tuple((a.name, a.size) for a in axes), ids)
    if mesh.value not in meshes:
        raise ValueError(
            f"the module has no mesh @{mesh.value}: a symbol in replica_groups names an sdy.mesh"
        )
    return meshes[mesh.value]


def _inferred_grid(collectives: Sequence[Collective], meshes: dict[str, DeviceMesh]) -> ProcessGrid:
    replicas = partitions = processes = 1
    counts: dict[tuple[ir.Attribute | None, ...], int] = {}  # equal attributes are read once
    for collective in collectives:
        mode = collective.group_mode or GroupMode.CROSS_PARTITION
        groups = collective.group_attribute("replica_groups")
        named = (groups, collective.inner.attributes.get("source_target_pairs"))
        if named not in counts:
            # The number of processes that the groups or pairs must at least have.
            tables = [table for table in named if isinstance(table, ir.DenseIntElementsAttr)]
            counts[named] = 1 + max((int(i) for t in tables for i in np.ravel(t)), default=0)
            if groups is not None and bindings.ReplicaGroupMeshAxesAttr.isinstance(groups):
                mesh = bindings.ReplicaGroupMeshAxesAttr(groups).mesh
                try:
                    counts[named] = _resolved_mesh(mesh, meshes).size
                except ValueError as error:
                    name = collective.inner.name
                    raise ToolError(f"{name}: {error}", collective.op.location) from None
        count = counts[named]
        if mode is GroupMode.FLATTENED_IDS:
            processes = max(processes, count)
        elif mode is GroupMode.CROSS_PARTITION:
            partitions = max(partitions, count)
        else:
            replicas = max(replicas, count)
    # Rounded up, because flattened ids count the partitions of all replicas.
    return ProcessGrid(replicas, max(partitions, -(-processes // replicas)))


def unnumbered_replicas(collectives: Sequence[Collective]) -> int:
    """Returns the number of replicas, for collectives with empty groups, which mean all replicas.

    It follows from the sizes of gathers. Otherwise it is 2, the fewest that exchange anything, or 1
    without such collectives.
    """
    replicas = 1
    for collective in collectives:
        groups = collective.inner.attributes.get("replica_groups")
        if not isinstance(groups, ir.DenseIntElementsAttr) or len(groups):
            continue
        operand, result = (
            ir.RankedTensorType(values[0].type).shape
            for values in (collective.inner.operands, collective.inner.results)
        )
        ratios = [
            max(a, b) // max(min(a, b), 1) for a, b in zip(operand, result, strict=True) if a != b
        ]
        replicas = max([replicas, 2, *ratios])
    return replicas


def _check_done(done: ir.Operation, start: str) -> None:
    """Refuses a done of an op that is surely not a start.

    Loops, branches and calls may pass on a start, so they are accepted.
    """
    operand = done.operands[0] if len(done.operands) == 1 else None
    maker = None if operand is None else producer(operand)
    if operand is None or len(done.results) != 1 or operand.type != done.results[0].type:
        raise ToolError(
            f"{label(done)} must return one operand unchanged, as jax writes it", done.location
        )
    if maker is None or maker.name in _MAY_HAND_ON:
        return
    if maker.name != CUSTOM_CALL or target_of(maker) != start:
        raise ToolError(
            f'{label(done)} must wait for a @"{start}", but its operand is the result of '
            f"{label(maker)}",
            done.location,
            (note(f"the {maker.name} is here", maker.location),),
        )


def _check_understood(op: ir.Operation) -> None:
    name = op.name
    if _FOREIGN_COMMUNICATION.fullmatch(name):
        raise ToolError(
            f"{name} communicates in a dialect that cannot be rewritten here: lower it to "
            "StableHLO collectives first",
            op.location,
        )
    dialect = name.partition(".")[0]
    if dialect not in _KNOWN_DIALECTS:
        raise ToolError(
            f"{name}: unknown dialect {dialect!r}; known: {', '.join(sorted(_KNOWN_DIALECTS))}",
            op.location,
        )


def _tensors(values: ir.OpOperandList | ir.OpResultList) -> list[ir.ShapedType]:
    return [ir.ShapedType(v.type) for v in values if isinstance(v.type, ir.ShapedType)]


def _total_bytes(tensors: list[ir.ShapedType]) -> int | None:
    known = [size for tensor in tensors if (size := tensor_bytes(tensor)) is not None]
    return sum(known) if len(known) == len(tensors) else None


def tensor_bytes(tensor: ir.ShapedType) -> int | None:
    """Returns the bytes of a dense tensor, sub-byte elements packed; None for symbolic shapes."""
    if not tensor.has_static_shape:
        return None
    return (math.prod(tensor.shape) * element_bits(tensor.element_type) + 7) // 8


def element_bits(element: ir.Type) -> int:
    """Returns the width of an element type in memory, in bits; a boolean has 8."""
    if isinstance(element, ir.IntegerType) and element.width == 1:
        return 8
    if isinstance(element, ir.ComplexType):
        return 2 * element_bits(element.element_type)
    if isinstance(element, ir.IntegerType | ir.FloatType):
        return element.width
    if isinstance(element, ir.IndexType):
        return _INDEX_BITS
    stored = _QUANTIZED.match(str(element))  # the bindings have no class for these
    if stored is not None:
        return int(stored.group(1))
    raise ToolError(f"the element type {element} has no known size")


def _rows(attribute: ir.Attribute) -> list[list[int]]:
    table = np.array(ir.DenseIntElementsAttr(attribute))
    # reshape cannot infer the rows of an empty table.
    return [] if table.size == 0 else table.reshape(-1, table.shape[-1]).tolist()


def stated_grid(module: ir.Module) -> ProcessGrid | None:
    """Returns the replicas and partitions that a module states; None if it states neither."""
    attributes = module.operation.attributes
    if not any(name in attributes for name in GRID):
        return None
    return ProcessGrid(*(_integer(attributes.get(name), 1) for name in GRID))


def _integer(attribute: ir.Attribute | None, default: int) -> int:
    return default if attribute is None else ir.IntegerAttr(attribute).value


def _axis_ref(attribute: ir.Attribute) -> AxisRef:
    axis = bindings.StablehloAxisRefAttr(attribute)
    if axis.sub_axis_info is None:
        return AxisRef(axis.name)
    split = re.search(r"\((\d+)\)(\d+)", str(axis.sub_axis_info))
    if split is None:
        raise ValueError(f"unreadable sub-axis {attribute}")
    return AxisRef(axis.name, int(split.group(1)), int(split.group(2)))


_HANDLE = "channel_handle"
_PAIRED = frozenset({"stablehlo.send", "stablehlo.recv"})  # ops that are matched by their channels


def next_channel(module: ir.Module) -> int:
    """Returns a number above all channels that the module uses."""
    return max((collective.channel_id for collective in find_collectives(module)), default=0) + 1


def channel_number(op: ir.Operation) -> int:
    """Returns the number of an op's channel, 0 if it has none."""
    handle = op.attributes.get(_HANDLE)
    return 0 if handle is None else bindings.ChannelHandle(handle).handle


def set_groups(collective: Collective, groups: Iterable[Sequence[int]], channel: int) -> None:
    """Gives a collective or permute other groups, of flattened ids, on the channel `channel`."""
    name = "source_target_pairs" if collective.kind in _OF_PAIRS else "replica_groups"
    attributes, context = collective.inner.attributes, collective.inner.context
    attributes[name] = device_table(groups, context)
    attributes[_HANDLE] = bindings.ChannelHandle.get(channel, DEVICE_TO_DEVICE, context)
    if collective.kind in REDUCTION_GROUPED:
        attributes["use_global_device_ids"] = ir.UnitAttr.get(context)


class Channels:
    """Allocates channels that no op of the module has."""

    def __init__(self, module: ir.Module) -> None:
        self._next = next_channel(module)

    def renew(self, copy: ir.Operation) -> None:
        """Gives a copied op its own channel if it has one; the ids keep their meaning."""
        if channel_number(copy) <= 0 or copy.name in _PAIRED:
            return
        channel_type = bindings.ChannelHandle(copy.attributes[_HANDLE]).channel_type
        copy.attributes[_HANDLE] = bindings.ChannelHandle.get(
            self._next, channel_type, copy.context
        )
        self._next += 1
