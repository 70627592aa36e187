"""Which collectives of a loop can run once, after it, and how; nothing is changed here.

Three ways are tried, in this order: on the sum that an accumulator makes of what is sent
(`accumulation`), on what the last iteration sends (`last_values`), on what all iterations send,
stacked (`stacking`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stablehlo_tools.analysis.collectives import Collective, tensor_bytes
from stablehlo_tools.analysis.loop_indices import LoopIndices
from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.accumulation import (
    Accumulated,
    accumulated,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.last_values import (
    LastValue,
    last_of,
    last_value,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.refusals import why_never
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.stacking import (
    UPDATE,
    Stacked,
    stacked,
    stacked_from,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.trees import TREES, Trees

Plan = Accumulated | LastValue | Stacked


@dataclass(frozen=True)
class Sinking:
    """How a collective runs after the loop.

    Those of one `group`, a number, share their plan and go together: one of them stands for all.
    `extra_bytes` are what the loop carries more for the whole group, or less if negative: a full
    gradient instead of a shard, rows of both what is sent and what else is stacked.
    """

    collective: Collective
    way: Literal["sum", "last", "batch"]
    group: int
    plan: Plan
    extra_bytes: int | None


def sinkings(body: LoopBody, indices: LoopIndices, trips: int | None) -> dict[Key, Sinking | str]:
    """How each collective of a loop can run after it, by `key_of`, or why it cannot.

    `trips` is how often the loop runs on every device, None where that is not known or differs.
    """
    found = _Planner(body, indices, trips).found
    return {key_of(c.op): found[key_of(c.op)] for c in body.collectives}


class _Planner:
    """Tries the three ways for all collectives of one loop."""

    def __init__(self, body: LoopBody, indices: LoopIndices, trips: int | None) -> None:
        self._body = body
        self._number = {key_of(c.op): i for i, c in enumerate(body.collectives)}
        self.found: dict[Key, Sinking | str] = {}
        reasons = {key_of(c.op): why_never(c) for c in body.collectives}
        self.found.update({key: reason for key, reason in reasons.items() if reason})
        trees = Trees(body)
        self._sums = {key_of(c.op): accumulated(body, c, trees) for c in self._left()}
        self._note_sums()
        lasts = {key_of(c.op): last_value(body, c, trips) for c in self._left()}
        for group, ops in self._groups(lasts):
            self._note(group, last_of(body, ops, trips))
        rows = {key_of(c.op): stacked(body, c, indices, trips) for c in self._left()}
        for group, ops in self._groups(rows):
            self._note(group, stacked_from(body, ops, indices, trips))
        for c in self._left():
            key = key_of(c.op)
            self.found[key] = self._telling(c, self._sums[key], lasts[key], rows[key])

    def _left(self) -> list[Collective]:
        """The collectives that no way was found for yet."""
        return [c for c in self._body.collectives if key_of(c.op) not in self.found]

    def _note_sums(self) -> None:
        """A chain that begins at an earlier collective takes later ones of it along."""
        plans = [plan for plan in self._sums.values() if isinstance(plan, Accumulated)]
        for plan in sorted(plans, key=lambda plan: -len(plan.steps)):
            members = [key_of(step.op) for step in plan.steps]
            self._note([m for m in members if m in self._number and m not in self.found], plan)

    def _groups(
        self, plans: dict[Key, LastValue | str] | dict[Key, Stacked | str]
    ) -> list[tuple[list[Key], list[ir.Operation]]]:
        """Collectives whose followers overlap, with all these in order."""
        groups: list[tuple[list[Key], set[int]]] = []
        for key, plan in plans.items():
            if isinstance(plan, str):
                continue
            op = self._body.ops[self._body.position_of[key]]
            hanging = self._body.hanging_on([op], later=False)
            members, places = [key], {self._body.position_of[key_of(o)] for o in hanging}
            for group in [g for g in groups if g[1] & places]:
                groups.remove(group)
                members, places = group[0] + members, group[1] | places
            groups.append((members, places))
        return [(m, [self._body.ops[i] for i in sorted(places)]) for m, places in groups]

    def _note(self, members: Sequence[Key], plan: Plan | str) -> None:
        group = min((self._number[key] for key in members), default=0)
        for key in members:
            collective = self._body.collectives[self._number[key]]
            self.found[key] = (
                plan
                if isinstance(plan, str)
                else Sinking(collective, _WAYS[type(plan)], group, plan, self._extra(plan))
            )

    def _telling(self, collective: Collective, *plans: Plan | str) -> str:
        """Of the reasons against the three ways, that against the one which comes closest."""
        against = [plan if isinstance(plan, str) else "" for plan in plans]
        hanging = self._body.hanging_on([collective.op], later=False)
        if any(op.name == UPDATE for op in hanging):
            return against[2]
        adds = (op for op in hanging if op.name in TREES)
        return against[0] if any(self._is_accumulation(op) for op in adds) else against[1]

    def _is_accumulation(self, op: ir.Operation) -> bool:
        numbers = (self._body.argument_number(value) for value in op.operands)
        return any(
            n is not None and not self._body.is_indexed(self._body.arguments[n]) for n in numbers
        )

    def _extra(self, plan: Plan) -> int | None:
        if isinstance(plan, Accumulated):
            return self._extra_sum(plan)
        if isinstance(plan, LastValue):
            more = _bytes(value for value in plan.read if not self._body.carries_of(value))
            return _difference(more, _bytes(self._body.arguments[n] for n in set(plan.carries)))
        rows = _bytes(plan.read)
        buffers = [self._body.arguments[store.carry] for store in plan.stores]
        less = _bytes(value for value in buffers if shape_of(value)[0] == plan.trips)
        return _difference(None if rows is None else rows * plan.trips, less)

    def _extra_sum(self, plan: Accumulated) -> int | None:
        """The first of a tree's leaves with one chain pays for their common local accumulator."""
        accumulator = self._body.arguments[plan.tree.carry]
        alike = [p for p in self._sums.values() if isinstance(p, Accumulated)]
        alike = [p for p in alike if p.signature == plan.signature]
        if plan.leaf.value != alike[0].leaf.value:
            return 0
        kind = ir.RankedTensorType.get(
            shape_of(plan.local), element_of(accumulator), loc=plan.steps[0].op.location
        )
        leaves = {p.leaf.value for p in alike}
        replaces = len(leaves) == len(plan.tree.leaves)
        return _difference(tensor_bytes(kind), _bytes([accumulator]) if replaces else 0)


_WAYS: dict[type, Literal["sum", "last", "batch"]] = {
    Accumulated: "sum",
    LastValue: "last",
    Stacked: "batch",
}


def _bytes(values: Iterable[ir.Value]) -> int | None:
    """Bytes of tensors; None where one has a dimension that is not known."""
    sizes = [tensor_bytes(ir.ShapedType(value.type)) for value in values]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less
