"""Writes smaller collectives: process groups as attributes, collectives like others, and slices.

Process groups are in mesh axes if the original's are; otherwise they are dense lists.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import COMPUTED
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    GroupMode,
    ProcessGroups,
    exchange_group_mode,
    mesh_axes_groups,
    permute_groups,
    process_groups,
)
from stablehlo_tools.analysis.shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BROADCAST, CALL
from stablehlo_tools.dialect.traits import COMPUTATIONS
from stablehlo_tools.ir.builder import Builder, device_table, element_of, shape_of
from stablehlo_tools.ir.cleanup import keep_results
from stablehlo_tools.ir.values import has_uses, maker_of, producer
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import callee_name
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import (
    ELEMENTWISE,
    Slice,
    Window,
    narrowed_type,
    splat_of,
    spreads,
)

_MOST_AXES = 5  # all subsets of these are tried in every order, so keep it small
_IDS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id"})
_ENDS = frozenset({"func.return", "sdy.return"})
_PURE = COMPUTED | ELEMENTWISE | _IDS | _ENDS | {"stablehlo.pad"}


@dataclass(frozen=True)
class Rewrite:
    """The replacement of collectives: `apply` writes it, and returns the results of new
    collectives.

    `touched` are values of ops that it removes, moves or repeats. `replaced` are the collectives
    that it may erase. `text` tells users the outcome for all_reduces.
    """

    touched: Sequence[ir.Value]
    replaced: Sequence[ir.Operation]
    apply: Callable[[], Sequence[ir.Value]]
    text: str = ""


class GroupForms:
    """Reads and writes the groups of one module's collectives; each attribute is read once."""

    def __init__(self, facts: ModuleFacts) -> None:
        self.facts = facts
        self.known: dict[tuple[ir.Attribute | None, GroupMode | None], ProcessGroups | None] = {}

    def groups(self, collective: Collective) -> ProcessGroups | None:
        """Returns the process groups; None if it has no such attribute. Raises a located ToolError
        if the module has no such processes."""
        key = (collective.group_attribute("replica_groups"), collective.group_mode)
        if key[0] is None:
            return None
        if key not in self.known:
            self.known[key] = self.facts.groups(collective)
        return self.known[key]

    def express(self, groups: ProcessGroups, like: Collective) -> ir.Attribute | None:
        """Returns the groups as an attribute for an op with the channel of `like`; None if that is
        impossible.

        The order of the groups does not matter; the order of their members does.
        """
        original = like.group_attribute("replica_groups")
        mode = like.group_mode
        if original is None or mode is None:
            return None
        wanted = frozenset(groups)
        if frozenset(self.groups(like) or ()) == wanted:
            return original
        for attribute, formed in self._by_axes(original, mode, len(groups[0])):
            if frozenset(formed) == wanted:
                return attribute
        rows, width = list[Sequence[int]](), self.facts.grid.num_partitions
        if mode is GroupMode.FLATTENED_IDS:
            rows = list(groups)
        elif mode is GroupMode.CROSS_REPLICA:
            rows = [tuple(d // width for d in group) for group in groups if group[0] % width == 0]
        if not rows or frozenset(process_groups(rows, mode, self.facts.grid)) != wanted:
            return None
        return device_table(rows, original.context)

    def express_pairs(self, pairs: ProcessGroups, like: Collective) -> ir.Attribute | None:
        """Returns (source, target) pairs for a collective_permute with the channel of `like`; None
        if that is impossible."""
        mode = exchange_group_mode(like.channel_id)
        width = self.facts.grid.num_partitions
        if mode is GroupMode.CROSS_PARTITION:
            rows = [pair for pair in pairs if pair[0] < width]
        else:
            rows = [tuple(d // width for d in pair) for pair in pairs if pair[0] % width == 0]
        try:
            formed = permute_groups(rows, mode, self.facts.grid)
        except ValueError:  # a pair crosses replicas or partitions that the mode separates
            return None
        if frozenset(formed) != frozenset(pairs):
            return None
        return device_table(rows, like.op.context)

    def _by_axes(
        self, original: ir.Attribute, mode: GroupMode, size: int
    ) -> Iterator[tuple[ir.Attribute, ProcessGroups]]:
        """Yields groups of this size over some of the original's axes, in any order."""
        if not bindings.ReplicaGroupMeshAxesAttr.isinstance(original):
            return
        by_axes = bindings.ReplicaGroupMeshAxesAttr(original)
        if not isinstance(by_axes.mesh, ir.FlatSymbolRefAttr):
            return
        axes = list(ir.ArrayAttr(by_axes.axes))
        mesh = self.facts.meshes[by_axes.mesh.value]
        if len(axes) > _MOST_AXES:
            return
        for count in range(1, len(axes) + 1):
            for chosen in itertools.permutations(axes, count):
                formed = mesh_axes_groups(mesh, [_axis_ref(axis) for axis in chosen])
                if len(formed[0]) != size:
                    continue
                text = ", ".join(str(axis) for axis in chosen)
                attribute = ir.Attribute.parse(
                    f"#stablehlo.replica_group_mesh_axes<mesh = {by_axes.mesh}, axes = [{text}]>",
                    original.context,
                )
                yield attribute, process_groups(formed, mode, self.facts.grid)


def _axis_ref(attribute: ir.Attribute) -> AxisRef:
    axis = bindings.StablehloAxisRefAttr(attribute)
    split = re.search(r"\((\d+)\)(\d+)", str(axis.sub_axis_info or ""))
    return AxisRef(axis.name, *(int(part) for part in split.groups()) if split else ())


def with_shape(type_: ir.Type, shape: Sequence[int]) -> ir.RankedTensorType:
    """Returns a tensor type with another shape."""
    return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(type_).element_type)


def compute_from(part: ir.Value, slice_: Slice) -> None:
    """Replaces a slice by the ops on its way, applied to the chunk of the device."""
    build = Builder(ir.InsertionPoint(slice_.op), slice_.op.location)
    for op, position, window in ((step.op, step.operand, step.window) for step in slice_.steps):
        operands = [
            part if number == position else _narrow_operand(value, window, build)
            for number, value in enumerate(op.operands)
        ]
        part = copy_op(op, operands, narrowed_type(op.results[0], window), build.point)
    if slice_.steps and SHARDING in slice_.op.attributes:
        maker_of(part).attributes[SHARDING] = slice_.op.attributes[SHARDING]
    slice_.op.results[0].replace_all_uses_with(part)


def collective_like(
    op: ir.Operation,
    kind: str,
    operand: ir.Value,
    result: ir.Type,
    changed: Mapping[str, ir.Attribute],
    *,
    dropped: Sequence[str] = (),
    location: ir.Location | None = None,
    point: ir.InsertionPoint | None = None,
) -> ir.Value:
    """Writes a collective with one operand, with the region and most attributes of `op`, and
    returns its result.

    It omits the sharding of `op`, because that does not hold for a part. It is written before `op`
    unless `point` is given.
    """
    attributes = {
        name: attribute
        for name, attribute in op.attributes.items()
        if name not in (*dropped, SHARDING)
    }
    with_region = kind in ("stablehlo.all_reduce", "stablehlo.reduce_scatter")
    build = Builder(point or ir.InsertionPoint(op), location or op.location)
    new = build.create(kind, [operand], [result], {**attributes, **changed}, int(with_region))
    if with_region:
        # The bindings move blocks but copy them only with their op; the original op stays.
        copy = op.clone(ip=ir.InsertionPoint(op))
        Combining(copy).combiner.append_to(new.regions[0])
        copy.erase()
    return new.results[0]


def drop_unused_results(op: ir.Operation) -> None:
    """Removes the operands of a collective whose results are unused, unless all are."""
    used = [i for i, result in enumerate(op.results) if has_uses(result)]
    if 0 < len(used) < len(op.results):
        keep_results(op, used, {n: a for n, a in op.attributes.items() if n != SHARDING})


def erase_unused(
    values: Sequence[ir.Value], functions: Mapping[str, ir.Operation], replaced: Set[ir.Value]
) -> set[ir.Value]:
    """Erases the ops that make these values if they are unused, then the same for their operands.

    Ops that may have effects stay, unless their first result is in `replaced`. Returns the results
    of the erased ops.
    """
    is_pure = purity(functions)
    pending = list(values)
    erased: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in erased:
            continue
        op = producer(value)
        if op is None or not (op.results[0] in replaced or is_pure(op)):
            continue
        if any(has_uses(result) for result in op.results):
            continue
        operands = list(dict.fromkeys(op.operands))
        erased.update(op.results)
        op.erase()
        pending += operands
    return erased


def _narrow_operand(value: ir.Value, window: Window, build: Builder) -> ir.Value:
    """Returns a device's part of another operand of an op on the way; see `can_narrow`."""
    if not shape_of(value) or not any(window):
        return value
    part, maker, splat = narrowed_type(value, window), producer(value), splat_of(value)
    if maker is not None and splat is not None:
        element = ir.DenseElementsAttr.get_splat(part, splat)
        return copy_op(maker, [], part, build.point, value=element)
    if maker is not None and maker.name == BROADCAST and spreads(maker, window):
        return copy_op(maker, list(maker.operands), part, build.point)
    index = next(element_of(cut.start) for cut in window if cut is not None)
    starts = [build.splat(0, [], index) if cut is None else cut.start for cut in window]
    place = build.location if maker is None else maker.location
    return Builder(build.point, place).dynamic_slice(value, starts, part.shape)


def copy_op(
    op: ir.Operation,
    operands: Sequence[ir.Value],
    type_: ir.Type,
    point: ir.InsertionPoint,
    **changed: ir.Attribute,
) -> ir.Value:
    """Writes a copy of an op with other operands and another result type, without its sharding."""
    attributes = {n: a for n, a in op.attributes.items() if n != SHARDING}
    build = Builder(point, op.location)
    return build.create(op.name, operands, [type_], {**attributes, **changed}).results[0]


def purity(functions: Mapping[str, ir.Operation]) -> Callable[[ir.Operation], bool]:
    """Returns a predicate for ops without effects. A call or computation has none if its ops have
    none."""
    known: dict[str, bool] = {}

    def is_pure(op: ir.Operation) -> bool:
        if op.name in COMPUTATIONS:
            return is_pure_inside(op)
        if op.name != CALL:
            return op.name in _PURE
        name = callee_name(op)
        if name not in known:
            known[name] = False  # a recursive function may not terminate
            callee = functions.get(name)
            known[name] = callee is not None and is_pure_inside(callee)
        return known[name]

    def is_pure_inside(op: ir.Operation) -> bool:
        blocks = op.regions[0].blocks
        return all(is_pure(inner.operation) for block in blocks for inner in block.operations)

    return is_pure
