"""Finds the collectives of a loop that can run once, after it, and writes the loop without them.

Five ways are tried, in this order. The first two need least memory and the last most:

  - on the total of an accumulator (`sums`)
  - on a sum that continues from one device's carry (`sums`)
  - on the last iteration's operand (`last_values`)
  - on sums that are accumulated in the rows of a buffer (`rows`)
  - on the stacked operands of all iterations (`rows`)

A collective that left the loop is then merged with others of its kind into one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stablehlo_tools.analysis.collectives import Collective, classify_communication, tensor_bytes
from stablehlo_tools.analysis.loop_carries import Trees, tree_reducer
from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import in_block_order, key_of, producer
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import OpenedLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    why_unsinkable,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.last_values import (
    LastValue,
    LastWriter,
    last_value,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.rows import (
    RowSum,
    RowSumWriter,
    RowsWriter,
    StackedOps,
    plan_stacking,
    row_sum,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sums import (
    Accumulated,
    MaskedSum,
    MaskedSumWriter,
    SumWriter,
    masked_sum,
    plan_accumulation,
)

SUNK = "stablehlo_tools.sunk"  # on the collectives that came out of a loop
_LARGEST = 32 << 20  # bytes of a bucket's operands: beyond, a larger message gains nothing

Plan = Accumulated | MaskedSum | LastValue | RowSum | StackedOps


@dataclass(frozen=True)
class Sinking:
    """How a collective runs after the loop.

    Collectives of one `group`, a number, share their plan and move together: one of them represents
    all. `extra_bytes`: the bytes that the loop carries more for the whole group, negative if less.
    Examples are a full gradient instead of a shard, and stacked rows of all operands.
    """

    collective: Collective
    way: Literal["sum", "last", "row sum", "batch"]
    group: int
    plan: Plan
    extra_bytes: int | None


def sinkings(surveyed: LoopSurvey) -> dict[Key, Sinking | str]:
    """Plans how each collective of a loop can run after it, or says why it cannot; by `key_of`."""
    outcomes = _SinkingPlanner(surveyed).outcomes
    return {key_of(c.op): outcomes[key_of(c.op)] for c in surveyed.collectives}


class _SinkingPlanner:
    """Tries the five ways for all collectives of one loop."""

    def __init__(self, surveyed: LoopSurvey) -> None:
        body, trips, alike = surveyed.body, surveyed.trips, surveyed.alike
        self._body = body
        self._number = {key_of(c.op): i for i, c in enumerate(body.collectives)}
        self.outcomes: dict[Key, Sinking | str] = {}
        for c in body.collectives:
            if reason := why_unsinkable(c):
                self.outcomes[key_of(c.op)] = reason
        trees = Trees(body)
        self._sums = {key_of(c.op): plan_accumulation(body, c, trees, alike) for c in self._left()}
        self._keep_factors()
        self._note_chains(self._sums)
        for collective in self._left():
            masked = masked_sum(body, collective, trips, alike)
            if masked is not None:
                self._note([key_of(collective.op)], masked)
        dependents = {key_of(c.op): body.depending_on([c.op], later=False) for c in self._left()}
        lasts = {
            key_of(c.op): last_value(body, dependents[key_of(c.op)], trips) for c in self._left()
        }
        for group, ops in self._groups(lasts, dependents):
            self._note(group, last_value(body, ops, trips))
        row_sums = {key_of(c.op): row_sum(body, c, alike) for c in self._left()}
        self._note_chains(row_sums)
        rows = {
            key_of(c.op): plan_stacking(body, dependents[key_of(c.op)], surveyed.indices, trips)
            for c in self._left()
        }
        for group, ops in self._groups(rows, dependents):
            self._note(group, plan_stacking(body, ops, surveyed.indices, trips))
        for c in self._left():
            key = key_of(c.op)
            reasons = (self._sums[key], lasts[key], row_sums[key], rows[key])
            self.outcomes[key] = self._telling(dependents[key], *reasons)

    def _left(self) -> list[Collective]:
        """Returns the collectives without a plan so far."""
        return [c for c in self._body.collectives if key_of(c.op) not in self.outcomes]

    def _keep_factors(self) -> None:
        """Of two collectives that are factors of each other, only the first leaves the loop."""
        plans = dict[ir.Value, Accumulated]()
        for key, plan in self._sums.items():
            if not isinstance(plan, Accumulated):
                continue
            first = plans.setdefault(plan.leaf.value, plan)
            kept = [key_of(step.op) for step in first.steps]
            if (first.scaled or plan.scaled) and key not in kept:
                self._sums[key] = "its result is a factor of another sum, which leaves the loop"

    def _note_chains(
        self, found: Mapping[Key, Accumulated | str] | Mapping[Key, RowSum | str]
    ) -> None:
        """Records plans of chains, longest first, for all collectives in each chain."""
        plans = [plan for plan in found.values() if not isinstance(plan, str)]
        # The longest chain takes all its collectives along.
        for plan in sorted(plans, key=lambda plan: -len(plan.steps)):
            members = [key_of(step.op) for step in plan.steps]
            self._note([m for m in members if m in self._number and m not in self.outcomes], plan)

    def _groups(
        self,
        plans: dict[Key, LastValue | str] | dict[Key, StackedOps | str],
        dependents: Mapping[Key, Sequence[ir.Operation]],
    ) -> list[tuple[list[Key], list[ir.Operation]]]:
        """Groups collectives whose dependents overlap; returns each group's dependents in order."""
        groups: list[tuple[list[Key], set[int]]] = []
        for key, plan in plans.items():
            if isinstance(plan, str):
                continue
            members, places = [key], {self._body.position_of[key_of(o)] for o in dependents[key]}
            for group in [g for g in groups if g[1] & places]:
                groups.remove(group)
                members, places = group[0] + members, group[1] | places
            groups.append((members, places))
        return [(m, [self._body.ops[i] for i in sorted(places)]) for m, places in groups]

    def _note(self, members: Sequence[Key], plan: Plan | str) -> None:
        group = min((self._number[key] for key in members), default=0)
        for key in members:
            collective = self._body.collectives[self._number[key]]
            self.outcomes[key] = (
                plan
                if isinstance(plan, str)
                else Sinking(collective, _WAYS[type(plan)], group, plan, self._extra(plan))
            )

    def _telling(self, dependents: Sequence[ir.Operation], *plans: Plan | str) -> str:
        """Returns the reason against the way that fits the dependents best."""
        against = [plan if isinstance(plan, str) else "" for plan in plans]
        if any(op.name == DYNAMIC_UPDATE_SLICE for op in dependents):
            added = [value for op in dependents if op.name == ADD for value in op.operands]
            makers = [producer(value) for value in added]
            adds_to_a_slice = any(op is not None and op.name == DYNAMIC_SLICE for op in makers)
            return against[2] if adds_to_a_slice else against[3]
        reduced = (v for op in dependents if tree_reducer(op) is not None for v in op.operands)
        accumulates = any(
            self._body.argument_number(value) is not None and not self._body.is_indexed(value)
            for value in reduced
        )
        return against[0] if accumulates else against[1]

    def _extra(self, plan: Plan) -> int | None:
        if isinstance(plan, Accumulated):
            # Leaves of a tree with equal chains share an accumulator: the first accounts for it.
            accumulator = self._body.arguments[plan.tree.carry]
            alike = [p for p in self._sums.values() if isinstance(p, Accumulated)]
            alike = [p for p in alike if p.signature == plan.signature]
            if plan.leaf.value != alike[0].leaf.value:
                return 0
            type_ = ir.RankedTensorType.get(
                shape_of(plan.local), element_of(accumulator), loc=plan.steps[0].op.location
            )
            leaves = {p.leaf.value for p in alike}
            replaces = len(leaves) == len(plan.tree.leaves)
            return _difference(tensor_bytes(type_), _bytes([accumulator]) if replaces else 0)
        if isinstance(plan, MaskedSum):
            return 0
        if isinstance(plan, LastValue):
            more = _bytes(value for value in plan.read if not self._body.carries_of(value))
            return _difference(more, _bytes(self._body.arguments[n] for n in set(plan.carries)))
        if isinstance(plan, RowSum):
            local = tensor_bytes(ir.ShapedType(plan.local_rows))
            return _difference(local, _bytes([plan.buffer]))
        rows = _bytes(plan.read)
        buffers = [self._body.arguments[store.carry] for store in plan.stores]
        less = _bytes(value for value in buffers if shape_of(value)[0] == plan.trips)
        return _difference(None if rows is None else rows * plan.trips, less)


_WAYS: dict[type, Literal["sum", "last", "row sum", "batch"]] = {
    Accumulated: "sum",
    MaskedSum: "sum",
    LastValue: "last",
    RowSum: "row sum",
    StackedOps: "batch",
}


def _bytes(values: Iterable[ir.Value]) -> int | None:
    """Returns the bytes of tensors; None if one has a dimension that is not known."""
    sizes = [tensor_bytes(ir.ShapedType(value.type)) for value in values]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


# The writers of plans. `dead`: the carries that no op reads any more. `removed`: the ops that
# leave the body. `take_carries` reserves the new carries. `write` writes the ops in the body and
# those after the loop; it returns replacements for results of the loop, by carry, and the
# collectives after it.
SinkWriter = SumWriter | MaskedSumWriter | LastWriter | RowSumWriter | RowsWriter


def write_sinkings(
    body: LoopBody, chosen: Sequence[Sinking]
) -> tuple[ir.Operation, list[ir.Operation]]:
    """Replaces a loop; returns the new one and the collectives now after it, in order, marked as
    sunk.

    One member of a group is enough. `body` and the plans made from it are invalid afterwards.
    """
    writers = list(_writers(body, chosen))
    opened = OpenedLoop(body, [number for writer in writers for number in writer.dead])
    for writer in writers:
        writer.take_carries(opened)
    opened.create_loop()
    results: dict[int, ir.Value] = {}
    collectives: list[ir.Operation] = []
    for writer in writers:
        changed, written = writer.write(opened)
        results.update(changed)
        collectives += written
    removed: set[Key] = {key_of(op) for writer in writers for op in writer.removed}
    opened.close(removed, results)
    for op in collectives:
        op.attributes[SUNK] = ir.UnitAttr.get(op.context)
    return opened.new, in_block_order(collectives)


def _writers(body: LoopBody, chosen: Sequence[Sinking]) -> Iterator[SinkWriter]:
    """Yields a writer for each group; all leaves of one accumulator's tree share a writer."""
    plans: dict[int, Plan] = {sinking.group: sinking.plan for sinking in chosen}
    sums: dict[int, list[Accumulated]] = {}
    for group in sorted(plans):
        plan = plans[group]
        if isinstance(plan, Accumulated):
            sums.setdefault(plan.tree.carry, []).append(plan)
    # The leaves of one tree are rewritten together: each alone would replace the same carry.
    for leaves in sums.values():
        yield SumWriter(body, leaves)
    for group in sorted(plans):
        plan = plans[group]
        if isinstance(plan, MaskedSum):
            yield MaskedSumWriter(body, plan)
        elif isinstance(plan, LastValue):
            yield LastWriter(body, plan)
        elif isinstance(plan, RowSum):
            yield RowSumWriter(body, plan)
        elif isinstance(plan, StackedOps):
            yield RowsWriter(body, plan)


def merge_sunk(module: ir.Module, ops: Sequence[ir.Operation]) -> list[ir.Operation]:
    """Merges collectives if that keeps their values; returns all that are left, in order.

    `ops` are collectives of one block. Handles to merged ones become invalid. Raises a located
    ToolError for groups that the module does not have.
    """
    if not ops:
        return []
    merger = Merger(module)
    classify = classify_communication(module.context)
    buckets: list[list[Collective]] = []
    for op in in_block_order(ops):
        collective = classify(op)
        assert collective is not None, "a collective that ran in a loop"
        traits = merger.traits(collective)
        for bucket in () if isinstance(traits, str) else buckets:
            sizes = [member.bytes_in for member in (*bucket, collective)]
            known = [size for size in sizes if size is not None]
            has_room = len(known) == len(sizes) and sum(known) <= _LARGEST
            if has_room and merger.traits(bucket[0]) == traits:
                bucket.append(collective)
                break
        else:
            buckets.append([collective])
    kept: list[ir.Operation] = []
    for bucket in buckets:
        for members in _mergeable(bucket, merger):
            kept.append(merger.merge(members) if len(members) > 1 else members[0].op)
    return in_block_order(kept)


def _mergeable(bucket: Sequence[Collective], merger: Merger) -> list[list[Collective]]:
    """Splits a bucket into parts in which no member depends on another; mostly into one."""
    if len(bucket) == 1 or merger.why_not(bucket) is None:
        return [list(bucket)]
    parts: list[list[Collective]] = []
    for collective in bucket:
        part = next((p for p in parts if merger.why_not([*p, collective]) is None), None)
        if part is None:
            parts.append([collective])
        else:
            part.append(collective)
    return parts
