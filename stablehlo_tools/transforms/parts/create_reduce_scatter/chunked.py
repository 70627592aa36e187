"""Plans smaller collectives for all_reduces and all_gathers that devices slice, and writes them.

An all_reduce is replaced only if every use of a result ends in such a slice; otherwise it would be
computed as well. If its result is padded with a neutral element, the operands are padded instead.
So a dimension that does not divide evenly can be scattered. An all_gather is erased if its slices
only read what each device holds already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.replica_groups import GroupMode, ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.communication_kinds import refusal
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.names import PAD
from stablehlo_tools.dialect.reducers import IDEMPOTENT, reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import describe_op, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import (
    Slice,
    Slices,
    Window,
    shape_of,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    GroupForms,
    Rewrite,
    collective_like,
    compute_from,
    with_shape,
)

_ByPart = Mapping[tuple[Window, tuple[ir.Operation, ...]], list[Slice]]
_GROUPS = "replica_groups"
# The neutral element of each reducer.
_NEUTRAL = {"add": 0, "multiply": 1, "xor": 0}


@dataclass(frozen=True)
class TakenChunks:
    """A dimension divided into `count` equal chunks; device d reads chunk `taken[d]`."""

    dimension: int
    count: int
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Scatter:
    """A reduce_scatter along one dimension; member k of each group gets chunk k."""

    dimension: int
    groups: ProcessGroups


@dataclass(frozen=True)
class ScatterPlan:
    """The reduce_scatters, in order, and the groups of the all_reduce that follows, or None."""

    scatters: tuple[Scatter, ...]
    rest: ProcessGroups | None

    def traffic(self) -> Fraction:
        """Returns the bytes that a device sends, in units of the operand, if collectives run as
        rings."""
        size, sent = Fraction(1), Fraction(0)
        for scatter in self.scatters:
            members = len(scatter.groups[0])
            size /= members
            sent += size * (members - 1)
        return sent + size * all_reduce_traffic(self.rest or ((0,),))


@dataclass(frozen=True)
class GatherPlan:
    """The replacement of an all_gather if each device reads one part of it.

    All None: the device's own operand. `groups`: an all_gather of smaller groups. `pairs`: a
    collective_permute from the device that holds the part.
    """

    groups: ProcessGroups | None = None
    pairs: ProcessGroups | None = None


def all_reduce_traffic(groups: ProcessGroups) -> Fraction:
    """Returns the bytes that a device sends in a ring all_reduce, in units of the operand."""
    return Fraction(2 * (len(groups[0]) - 1), len(groups[0]))


def plan_scatter(
    groups: ProcessGroups, chunks: Sequence[TakenChunks], devices: int
) -> ScatterPlan | None:
    """Returns the collectives that replace an all_reduce over `groups` if each device reads its
    chunks.

    Returns None unless every chunk is read by equally many members of each group. Every order sends
    the same number of bytes. Devices with close numbers come first, because they have the faster
    links; the slower links then carry smaller parts.
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
    groups: ProcessGroups, dimension: int, chunks: Sequence[TakenChunks], devices: int
) -> GatherPlan | None:
    """Returns the replacement of an all_gather along `dimension` if each device reads its chunk;
    else None."""
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


def _takers(group: Sequence[int], part: TakenChunks) -> list[tuple[int, ...]]:
    """Returns, for each chunk, the members of a group that read it."""
    return [tuple(d for d in group if part.taken[d] == chunk) for chunk in range(part.count)]


def _reach(groups: ProcessGroups, part: TakenChunks) -> int:
    """Returns the largest difference between the numbers of devices that read different chunks."""
    rows = (row for group in groups for row in zip(*_takers(group, part), strict=False))
    return max((max(row) - min(row) for row in rows), default=0)


def _divide_all(groups: ProcessGroups, devices: int) -> bool:
    """Returns True if the groups have equal sizes and contain every device."""
    return len({len(group) for group in groups}) == 1 and devices == sum(map(len, groups))


@dataclass(frozen=True)
class ChainStage:
    """One collective of a chain: its op name and the changes to the original's attributes.

    It divides a dimension of the operand by `factor` (`factor` < 1: multiplies it).
    """

    kind: str
    changed: dict[str, ir.Attribute]
    dropped: tuple[str, ...] = ()
    dimension: int = 0
    factor: Fraction = Fraction(1)
    members: int = 0  # of a group that reduces


@dataclass(frozen=True)
class ResultPart:
    """Slices that read the same part of a result, and the collectives that make the part.

    The operand of the collectives first passes through the ops of `before`.
    """

    stages: tuple[ChainStage, ...]
    slices: tuple[Slice, ...]
    before: tuple[ir.Operation, ...] = ()


def plan_chunked(
    collective: Collective,
    position: int,
    slices: Slices,
    by_result: Mapping[ir.Value, Collective],
    forms: GroupForms,
) -> Rewrite | str:
    """Returns the rewrite for one result of an all_reduce or all_gather, or the reason why there is
    none.

    `by_result` maps results to all collectives of the module.
    """
    op, sums = collective.op, collective.kind == "all_reduce"
    if not slices.found or (sums and slices.others):
        first = next(map(describe_op, slices.others), "")
        return (
            f"{first} does not read one equal chunk per device" if first else "its result is unused"
        )
    groups = forms.groups(collective)
    if not groups or is_of_unsure_order(collective, forms):
        return "the order of its members is not known"
    by_part: dict[tuple[Window, tuple[ir.Operation, ...]], list[Slice]] = {}
    for slice_ in slices.found:
        by_part.setdefault((slice_.window, slice_.before), []).append(slice_)
    if not sums:
        parts = _ChunkPlanner([collective], groups, forms).gather_parts(by_part, not slices.others)
        return _rewrite([collective], position, parts) if parts else "its whole result is needed"
    reducer = _reducer(op, position)
    if reducer is None:
        return "its reducer is not a single op"
    refused = refusal("reduce_scatter", str(element_of(op.results[position])))
    if refused is not None:
        return refused
    for pad in (each for s in slices.found for each in s.before if each.name == PAD):
        number = splat_of(pad.operands[-1])
        # An idempotent reducer reduces the element with itself to itself.
        if number is None or (number != _NEUTRAL.get(reducer) and reducer not in IDEMPOTENT):
            return f"{describe_op(pad)} adds elements that are not neutral for the reducer"
    chain = _chain(collective, position, by_result)
    while chain:
        joined = _join_groups([forms.groups(each) or () for each in chain], forms.facts.grid.size)
        parts = _ChunkPlanner(chain, joined, forms).scatter_parts(by_part) if joined else None
        if parts:
            return _rewrite(chain, position, parts)
        # The slices may be equal chunks for the groups of a shorter chain.
        chain.pop()
    return "its members do not read equal chunks, or smaller collectives would send more bytes"


def _rewrite(chain: Sequence[Collective], position: int, parts: Sequence[ResultPart]) -> Rewrite:
    """Returns the rewrite that replaces one result of a collective by parts.

    `chain` is the collective, and all_reduces that sum only for it, last first.
    """
    results = [chain[0].op.results[position], *(each.op.results[0] for each in chain[1:])]
    inside = [value for part in parts for s in part.slices for value in s.touched]
    made = [
        f"{stage.kind.partition('.')[2]} over {stage.members}"
        for part in parts
        for stage in part.stages
    ]
    summed = f"{len(chain)} all_reduces in a row" if chain[1:] else "all_reduce"
    return Rewrite(
        [*results, *inside],
        [collective.op for collective in chain],
        partial(_write, chain, position, parts),
        f"{summed} became {' and '.join(made)}",
    )


def _write(
    chain: Sequence[Collective], position: int, parts: Sequence[ResultPart]
) -> list[ir.Value]:
    """Writes the parts. The originals stay, with unused results if they were replaced.

    Returns the results of the new collectives.
    """
    op, made = chain[0].op, list[ir.Value]()
    for part in parts:
        value = _operand_of(chain, position)
        for moved in part.before:
            build = Builder(ir.InsertionPoint(op), moved.location)
            fillings = [(filling, splat_of(filling)) for filling in list(moved.operands)[1:]]
            # The filling may be defined after the collective, so a constant is written again.
            known = {v: build.splat(n, [], element_of(v)) for v, n in fillings if n is not None}
            value = copy_with(moved, {**known, moved.operands[0]: value}, build.point).results[0]
        place, taken = op.location, part.slices[0].op.location
        if taken != place:
            place = ir.Location.fused([place, taken], context=op.context)
        for stage in part.stages:
            shape = list(shape_of(value) or ())
            if shape:
                shape[stage.dimension] = int(shape[stage.dimension] / stage.factor)
            type_ = with_shape(value.type, shape)
            value = collective_like(
                op, stage.kind, value, type_, stage.changed, dropped=stage.dropped, location=place
            )
            made.append(value)
        for slice_ in part.slices:
            compute_from(value, slice_)
    return made


def _chain(
    collective: Collective, position: int, by_result: Mapping[ir.Value, Collective]
) -> list[Collective]:
    """Returns an all_reduce with those before it that have the same reducer, and no user but the
    next one. The last one comes first."""
    chain, reducer = [collective], _reducer(collective.op, position)
    while True:
        value = _operand_of(chain, position)
        before = by_result.get(value)
        if before is None or before.kind != "all_reduce" or before.is_async:
            return chain
        is_alone = len(before.op.results) == 1 and len(list(value.uses)) == 1
        place = (before.op.block, before.group_mode, _reducer(before.op, 0))
        if not is_alone or place != (collective.op.block, collective.group_mode, reducer):
            return chain
        chain.append(before)


def _operand_of(chain: Sequence[Collective], position: int) -> ir.Value:
    """Returns the operand of a chain's first all_reduce, which is the last in the list."""
    return chain[-1].op.operands[0 if chain[1:] else position]


def _join_groups(chained: Sequence[ProcessGroups], devices: int) -> ProcessGroups | None:
    """Returns the groups over which all_reduces in a row sum; they overlap if a device counts
    twice. Returns None if groups are unequal or leave a device out."""
    groups = chained[0]
    for other in chained[1:]:
        if not (_divide_all(groups, devices) and _divide_all(other, devices)):
            return None
        home = {device: group for group in other for device in group}
        groups = tuple(sorted({tuple(sorted(e for d in g for e in home[d])) for g in groups}))
    return groups


class _ChunkPlanner:
    def __init__(
        self, chain: Sequence[Collective], groups: ProcessGroups, forms: GroupForms
    ) -> None:
        self.chain = chain
        self.groups = groups
        self.forms = forms
        self.devices = forms.facts.grid.size

    def scatter_parts(self, by_part: _ByPart) -> list[ResultPart] | None:
        """Returns reduce_scatters for every part; None if they send more than one all_reduce."""
        parts: list[ResultPart] = []
        sent = Fraction(0)
        for (window, before), slices in by_part.items():
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
            ends = (before[0].operands[0], before[-1].results[0]) if before else ()
            summed, whole = (math.prod(shape_of(value) or ()) for value in ends) if ends else (1, 1)
            sent += plan.traffic() * Fraction(whole, max(1, summed))
            parts.append(ResultPart(tuple(made), tuple(slices), before))
        return parts if sent <= all_reduce_traffic(self.groups) else None

    def gather_parts(self, by_part: _ByPart, complete: bool) -> list[ResultPart]:
        """Returns smaller collectives for the parts. If other uses stay, returns only the parts
        that need no collective."""
        dimension = integer(self.chain[0].op, "all_gather_dim")
        parts: list[ResultPart] = []
        for (window, before), slices in by_part.items():
            plan = plan_gather(self.groups, dimension, chunks_of(window), self.devices)
            stages = None if plan is None else self._gathering(plan, dimension)
            if stages is None or before:
                complete = False
            else:
                parts.append(ResultPart(tuple(stages), tuple(slices)))
        return parts if complete and len(parts) < 2 else [p for p in parts if not p.stages]

    def _reduction(
        self, kind: str, groups: ProcessGroups, dimension: int | None
    ) -> ChainStage | None:
        forms = [self.forms.express(groups, collective) for collective in self.chain]
        by_axes = bindings.ReplicaGroupMeshAxesAttr.isinstance
        attribute = max(filter(None, forms), key=by_axes, default=None)
        if attribute is None:
            return None
        changed, members = {_GROUPS: attribute}, len(groups[0])
        if dimension is None:
            return ChainStage(f"stablehlo.{kind}", changed, members=members)
        changed["scatter_dimension"] = ir.IntegerAttr.get(
            ir.IntegerType.get_signless(64), dimension
        )
        return ChainStage(f"stablehlo.{kind}", changed, (), dimension, Fraction(members), members)

    def _gathering(self, plan: GatherPlan, dimension: int) -> list[ChainStage] | None:
        if plan.groups is not None:
            attribute = self.forms.express(plan.groups, self.chain[0])
            if attribute is None:
                return None
            factor = Fraction(1, len(plan.groups[0]))
            return [ChainStage("stablehlo.all_gather", {_GROUPS: attribute}, (), dimension, factor)]
        if plan.pairs is None:
            return []
        pairs = self.forms.express_pairs(plan.pairs, self.chain[0])
        if pairs is None:
            return None
        dropped = (_GROUPS, "all_gather_dim", "use_global_device_ids")
        changed = {"source_target_pairs": pairs}
        return [ChainStage("stablehlo.collective_permute", changed, dropped)]


def is_of_unsure_order(collective: Collective, forms: GroupForms) -> bool:
    """Returns True if the specification and XLA number a group's members differently.

    In a group of several replicas and partitions, the replicas vary first in one, the partitions in
    the other.
    """
    grid = forms.facts.grid
    mixed = collective.group_mode is GroupMode.CROSS_REPLICA_AND_PARTITION
    return mixed and grid.num_replicas > 1 and grid.num_partitions > 1


def chunks_of(window: Window) -> list[TakenChunks]:
    """Returns the dimensions that are cut."""
    return [TakenChunks(d, cut.count, cut.taken) for d, cut in enumerate(window) if cut is not None]


def _reducer(op: ir.Operation, position: int) -> str | None:
    """Returns the associative, commutative op that an all_reduce applies to elements of its type;
    None if it has another reducer."""
    block, values = Combining(op).combiner, (op.operands[position], op.results[position])
    elements = {element_of(value) for value in (*block.arguments, *values)}
    return reducer_kind(block) if len(elements) == 1 else None
