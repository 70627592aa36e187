"""All_reduces and all_gathers of which each device takes a part: which smaller collectives give it
just that, and the rewrite.

An all_reduce is replaced only where every use of a result ends in such a slice, else it would be
computed as well; one that is padded first, with what sums to itself, is the sum of padded operands:
so a dimension that does not divide is scattered. An all_gather goes where its slices take what each
device holds already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.replica_groups import GroupMode, ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import PAD
from stablehlo_tools.dialect.reducers import REDUCERS, reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.values import splat_of
from stablehlo_tools.transforms.parts.create_reduce_scatter.rewriting import (
    GroupForms,
    collective_like,
    compute_from,
    with_shape,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import (
    Slice,
    Window,
    find_slices,
    shape_of,
)

_REDUCTIONS = frozenset(f"stablehlo.{kind}" for kind in REDUCERS)
_CONSTRAINT = "sdy.sharding_constraint"  # jax puts one into reductions under free axes
_GROUPS = "replica_groups"
# What any number of the same element reduce to that element, of any element and of one.
_IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})
_NEUTRAL = {"add": 0, "multiply": 1, "xor": 0}


@dataclass(frozen=True)
class Chunks:
    """A dimension divided into `count` equal chunks; device d takes chunk `taken[d]`."""

    dimension: int
    count: int
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Scatter:
    """A reduce_scatter of one dimension; member k of each group takes chunk k."""

    dimension: int
    groups: ProcessGroups


@dataclass(frozen=True)
class ScatterPlan:
    """The reduce_scatters, in order, and the all_reduce of what is left to sum over, if any."""

    scatters: tuple[Scatter, ...]
    rest: ProcessGroups | None

    def traffic(self) -> Fraction:
        """Bytes a device sends, in units of the operand, where collectives run as rings."""
        size, sent = Fraction(1), Fraction(0)
        for scatter in self.scatters:
            members = len(scatter.groups[0])
            size /= members
            sent += size * (members - 1)
        return sent + size * all_reduce_traffic(self.rest or ((0,),))


@dataclass(frozen=True)
class GatherPlan:
    """What stands for an all_gather of which each device takes one part.

    All None: the device's own operand. `groups`: an all_gather of smaller groups. `pairs`: a
    collective_permute from the device that holds the part.
    """

    groups: ProcessGroups | None = None
    pairs: ProcessGroups | None = None


def all_reduce_traffic(groups: ProcessGroups) -> Fraction:
    """Bytes a device sends in a ring all_reduce, in units of the operand."""
    return Fraction(2 * (len(groups[0]) - 1), len(groups[0]))


def plan_scatter(
    groups: ProcessGroups, chunks: Sequence[Chunks], devices: int
) -> ScatterPlan | None:
    """The collectives for an all_reduce over `groups` of which each device takes its chunks.

    None unless every chunk is taken by equally many members of each group. In any order as many
    bytes are sent: first among devices with close numbers, which have the faster links, so that
    the slower ones carry what is left.
    """
    if not chunks or not _divide_all(groups, devices):
        return None
    scatters: list[Scatter] = []
    for part in sorted(chunks, key=lambda part: (_reach(groups, part), part.dimension)):
        takers = [_takers(group, part) for group in groups]
        if any(len({len(members) for members in table}) != 1 for table in takers):
            return None
        scattered = tuple(row for table in takers for row in zip(*table, strict=True))
        groups = tuple(members for table in takers for members in table)
        if not groups[0]:
            return None
        scatters.append(Scatter(part.dimension, scattered))
    return ScatterPlan(tuple(scatters), groups if len(groups[0]) > 1 else None)


def plan_gather(
    groups: ProcessGroups, dimension: int, chunks: Sequence[Chunks], devices: int
) -> GatherPlan | None:
    """What stands for an all_gather along `dimension` of which each device takes its chunk."""
    if len(chunks) != 1 or chunks[0].dimension != dimension or not _divide_all(groups, devices):
        return None
    (part,) = chunks
    members = len(groups[0])
    if members % part.count:
        return None
    held = members // part.count  # operands that make up a chunk
    if all(part.taken[d] == i // held for group in groups for i, d in enumerate(group)):
        if held == 1:
            return GatherPlan()
        starts = range(0, members, held)
        return GatherPlan(groups=tuple(g[start : start + held] for g in groups for start in starts))
    if held > 1 or any(len({part.taken[d] for d in group}) < members for group in groups):
        return None
    return GatherPlan(pairs=tuple((g[part.taken[d]], d) for g in groups for d in g))


def _takers(group: Sequence[int], part: Chunks) -> list[tuple[int, ...]]:
    """The members of a group that take each chunk."""
    return [tuple(d for d in group if part.taken[d] == chunk) for chunk in range(part.count)]


def _reach(groups: ProcessGroups, part: Chunks) -> int:
    """How far apart in number devices are that take different chunks."""
    rows = (row for group in groups for row in zip(*_takers(group, part), strict=False))
    return max((max(row) - min(row) for row in rows), default=0)


def _divide_all(groups: ProcessGroups, devices: int) -> bool:
    """Whether equally large groups take in every device."""
    return len({len(group) for group in groups}) == 1 and devices == sum(map(len, groups))


@dataclass(frozen=True)
class Stage:
    """One collective of a chain: its op name, what changes of the original's attributes, and by
    how much it divides (`factor` < 1: multiplies) a dimension of the operand.
    """

    kind: str
    changed: dict[str, ir.Attribute]
    dropped: tuple[str, ...] = ()
    dimension: int = 0
    factor: Fraction = Fraction(1)


@dataclass(frozen=True)
class Part:
    """Slices that take one and the same part of a result, and the collectives that make it."""

    stages: tuple[Stage, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Chunked:
    """The parts that stand for one result of a collective, of which `pad` makes a larger one
    first, if given."""

    collective: Collective
    position: int
    parts: tuple[Part, ...]
    pad: ir.Operation | None = None

    @property
    def touched(self) -> list[ir.Value]:
        """Values of ops that the rewrite removes or moves."""
        inside = [value for part in self.parts for s in part.slices for value in s.touched]
        padded = [] if self.pad is None else [self.pad.results[0]]
        return [self.collective.op.results[self.position], *padded, *inside]

    @property
    def replaced(self) -> list[ir.Operation]:
        """The collective that may go."""
        return [self.collective.op]

    def apply(self) -> None:
        """Makes the parts; the original stays, unused as far as it was replaced."""
        op = self.collective.op
        whole = op.operands[self.position]
        if self.pad is not None:
            whole = _padded(self.pad, whole, op)
        for part in self.parts:
            value = whole
            location = _fused(op, part.slices[0].op)
            for stage in part.stages:
                value = _made(stage, op, value, location)
            for slice_ in part.slices:
                compute_from(value, slice_)


def plan_chunked(
    collective: Collective, position: int, forms: GroupForms, values: DeviceValues
) -> Chunked | None:
    """What stands for one result of an all_reduce or all_gather, if anything does."""
    op = collective.op
    result = op.results[position]
    if shape_of(result) is None:
        return None
    pad = _neutral_pad(op, result) if collective.kind == "all_reduce" else None
    slices = find_slices(result if pad is None else pad.results[0], values)
    groups = forms.groups(collective) if slices.found else None
    if not groups or is_of_unsure_order(collective, forms):
        return None
    by_window: dict[Window, list[Slice]] = {}
    for slice_ in slices.found:
        by_window.setdefault(slice_.window, []).append(slice_)
    planner = _Planner(collective, position, groups, forms)
    if collective.kind == "all_reduce":
        parts = planner.scattered(by_window, pad) if slices.complete else None
    else:
        parts = planner.gathered(by_window, slices.complete)
    return Chunked(collective, position, tuple(parts), pad) if parts else None


def _neutral_pad(op: ir.Operation, result: ir.Value) -> ir.Operation | None:
    """The pad that alone uses a result of an all_reduce, with an element that devices which all
    have it reduce to itself."""
    users = [use.owner.operation for use in result.uses]
    if len(users) != 1 or users[0].name != PAD or users[0].block != op.block:
        return None
    (pad,) = users
    number, kind = splat_of(pad.operands[1]), reducer_kind(op.regions[0].blocks[0])
    if pad.operands[0] != result or number is None:
        return None
    return pad if kind in _IDEMPOTENT or number == _NEUTRAL.get(kind or "") else None


def _padded(pad: ir.Operation, value: ir.Value, op: ir.Operation) -> ir.Value:
    """What a pad makes of another value, before an op."""
    build = Builder(ir.InsertionPoint(op), pad.location)
    number = splat_of(pad.operands[1])
    assert isinstance(number, float | int), "asked before"
    filling = build.splat(number, [], element_of(value))
    low, high, interior = (
        integers(pad, f"{name}_padding{edge}")
        for name, edge in (("edge", "_low"), ("edge", "_high"), ("interior", ""))
    )
    return build.pad(value, filling, low, high, interior)


class _Planner:
    def __init__(
        self, collective: Collective, position: int, groups: ProcessGroups, forms: GroupForms
    ) -> None:
        self.collective = collective
        self.position = position
        self.groups = groups
        self.forms = forms
        self.devices = forms.facts.grid.size

    def scattered(
        self, by_window: dict[Window, list[Slice]], pad: ir.Operation | None
    ) -> list[Part] | None:
        """Reduce_scatters for every window, unless they send more than the one all_reduce."""
        op = self.collective.op
        if not _reduces(op, self.position) or _is_complex(op.results[self.position]):
            return None
        parts: list[Part] = []
        sent = Fraction(0)
        for window, slices in by_window.items():
            plan = plan_scatter(self.groups, chunks_of(window), self.devices)
            if plan is None:
                return None
            stages = [
                self._reduction("reduce_scatter", scatter.groups, scatter.dimension)
                for scatter in plan.scatters
            ]
            if plan.rest is not None:
                stages.append(self._reduction("all_reduce", plan.rest, None))
            made = [stage for stage in stages if stage is not None]
            if len(made) < len(stages):
                return None
            sent += plan.traffic()
            parts.append(Part(tuple(made), tuple(slices)))
        if pad is not None:
            whole, summed = shape_of(pad.results[0]) or (), shape_of(pad.operands[0]) or ()
            sent *= Fraction(math.prod(whole), max(1, math.prod(summed)))
        return parts if sent <= all_reduce_traffic(self.groups) else None

    def gathered(self, by_window: dict[Window, list[Slice]], complete: bool) -> list[Part]:
        """Smaller collectives for the windows; only what needs none where other uses stay."""
        dimension = ir.IntegerAttr(self.collective.op.attributes["all_gather_dim"]).value
        parts: list[Part] = []
        for window, slices in by_window.items():
            plan = plan_gather(self.groups, dimension, chunks_of(window), self.devices)
            stages = None if plan is None else self._gathering(plan, dimension)
            if stages is None:
                complete = False
            else:
                parts.append(Part(tuple(stages), tuple(slices)))
        if not complete or len(parts) > 1:
            return [part for part in parts if not part.stages]
        return parts

    def _reduction(self, kind: str, groups: ProcessGroups, dimension: int | None) -> Stage | None:
        attribute = self.forms.express(groups, self.collective)
        if attribute is None:
            return None
        if dimension is None:
            return Stage(f"stablehlo.{kind}", {_GROUPS: attribute})
        changed = {_GROUPS: attribute, "scatter_dimension": _integer(dimension)}
        return Stage(f"stablehlo.{kind}", changed, (), dimension, Fraction(len(groups[0])))

    def _gathering(self, plan: GatherPlan, dimension: int) -> list[Stage] | None:
        if plan.groups is not None:
            attribute = self.forms.express(plan.groups, self.collective)
            if attribute is None:
                return None
            factor = Fraction(1, len(plan.groups[0]))
            return [Stage("stablehlo.all_gather", {_GROUPS: attribute}, (), dimension, factor)]
        if plan.pairs is None:
            return []
        pairs = self.forms.express_pairs(plan.pairs, self.collective)
        if pairs is None:
            return None
        dropped = (_GROUPS, "all_gather_dim", "use_global_device_ids")
        changed = {"source_target_pairs": pairs}
        return [Stage("stablehlo.collective_permute", changed, dropped)]


def is_of_unsure_order(collective: Collective, forms: GroupForms) -> bool:
    """Whether the specification and XLA number a group's members differently.

    Of several replicas and partitions in one group, the replicas vary first in the one, and the
    partitions in the other.
    """
    grid = forms.facts.grid
    mixed = collective.group_mode is GroupMode.CROSS_REPLICA_AND_PARTITION
    return mixed and grid.num_replicas > 1 and grid.num_partitions > 1


def chunks_of(window: Window) -> list[Chunks]:
    """The dimensions that are cut."""
    return [Chunks(d, cut.count, cut.taken) for d, cut in enumerate(window) if cut is not None]


def _is_complex(value: ir.Value) -> bool:
    """Whether it has complex elements, which XLA:TPU takes in an all_reduce, and in no
    reduce_scatter ("this rewriting is not implemented")."""
    return isinstance(ir.ShapedType(value.type).element_type, ir.ComplexType)


def _reduces(op: ir.Operation, position: int) -> bool:
    """Whether an all_reduce applies one associative, commutative op to elements of its type."""
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    kept = [inner for inner in body if inner.name != _CONSTRAINT]
    if len(kept) != 2 or kept[0].name not in _REDUCTIONS:
        return False
    (result,) = kept[1].operands
    for constraint in reversed(body[1:-1]):
        if constraint.name != _CONSTRAINT or result != constraint.results[0]:
            return False
        result = constraint.operands[0]
    taken, arguments = list(kept[0].operands), list(block.arguments)
    element = ir.RankedTensorType(op.results[position].type).element_type
    types = {ir.RankedTensorType(argument.type).element_type for argument in arguments}
    return (
        result == kept[0].results[0]
        and (taken in (arguments, arguments[::-1]))
        and types == {element}
        and ir.RankedTensorType(op.operands[position].type).element_type == element
    )


def _made(stage: Stage, op: ir.Operation, value: ir.Value, location: ir.Location) -> ir.Value:
    type_ = ir.RankedTensorType(value.type)
    shape = list(type_.shape)
    if shape:
        shape[stage.dimension] = int(shape[stage.dimension] / stage.factor)
    result = with_shape(type_, shape)
    return collective_like(
        op,
        stage.kind,
        value,
        result,
        stage.changed,
        dropped=stage.dropped,
        location=location,
    )


def _fused(op: ir.Operation, taken: ir.Operation) -> ir.Location:
    if op.location == taken.location:
        return op.location
    return ir.Location.fused([op.location, taken.location], context=op.context)


def _integer(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
