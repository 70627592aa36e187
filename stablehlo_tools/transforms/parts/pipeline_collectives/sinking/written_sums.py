"""Writes local accumulators in a loop, and the collectives of their totals behind it."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.reducers import identity_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.partition.collectives import write_reducer
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.accumulation import Accumulated
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.chains import (
    CONVERT,
    REDUCING,
    ChainOp,
    takes_number,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import (
    OpenedLoop,
    build_at,
    converted,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.trees import Leaf


class SumWriter:
    """Writes leaves of one tree; those that other ops make stay in it."""

    def __init__(self, body: LoopBody, leaves: Sequence[Accumulated]) -> None:
        self._body = body
        self._tree = leaves[0].tree
        self._start = body.loop.operands[self._tree.carry]
        self._element = element_of(self._start)
        self._alike: dict[tuple[object, ...], list[Accumulated]] = {}
        for leaf in leaves:
            self._alike.setdefault(leaf.signature, []).append(leaf)
        gone = {leaf.leaf.value for leaf in leaves}
        self._staying = [leaf for leaf in self._tree.leaves if leaf.value not in gone]
        self.dead = [] if self._staying else [self._tree.carry]
        self.removed = [*self._tree.nodes, *(step.op for leaf in leaves for step in leaf.steps)]
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """A local accumulator for each kind of chain."""
        identity = identity_of(self._tree.kind, self._element)
        assert identity is not None, "of an accumulation that was planned"
        for leaves in self._alike.values():
            kind = ir.RankedTensorType.get(
                shape_of(leaves[0].local), self._element, loc=self._body.loop.location
            )
            self._numbers.append(opened.carry(kind, identity))

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the body's share, and the totals."""
        carry, where = self._tree.carry, self._tree.nodes[0].location
        inside = Builder(opened.inside, where)
        if self._staying:
            opened.hand_on(carry, self._added(inside, opened.argument(carry), self._staying))
        total = opened.result(carry) if self._staying else self._start
        collectives: list[ir.Operation] = []
        for number, leaves in zip(self._numbers, self._alike.values(), strict=True):
            parts = [Leaf(converted(inside, p.local, self._element), False) for p in leaves]
            opened.hand_on(number, self._added(inside, opened.argument(number), parts))
            value = self._finished(opened, opened.result(number), leaves[0].steps, collectives)
            sign = leaves[0].leaf.negative
            total = self._added(build_at(opened, where), total, [Leaf(value, sign)])
        return {carry: total}, collectives

    def _added(self, builder: Builder, total: ir.Value, leaves: Sequence[Leaf]) -> ir.Value:
        for leaf in leaves:
            total = builder.same(
                "subtract" if leaf.negative else self._tree.kind, total, leaf.value
            )
        return total

    def _finished(
        self,
        opened: OpenedLoop,
        value: ir.Value,
        steps: Sequence[ChainOp],
        collectives: list[ir.Operation],
    ) -> ir.Value:
        """What a chain makes of a total, in the accumulator's element type."""
        for step in steps:
            if step.op.name == CONVERT:
                continue
            value = self._run(opened, step, value)
            if self._body.communicates(step.op):
                collectives.append(maker_of(value))
        return value

    def _run(self, opened: OpenedLoop, step: ChainOp, value: ir.Value) -> ir.Value:
        op = step.op
        builder = build_at(opened, op.location)
        operands = [opened.after.get(other, 0) for other in _others(step)]
        if takes_number(op):
            operands = [converted(builder, other, self._element) for other in operands]
        operands.insert(step.through, value)
        kind = builder.tensor(shape_of(op.results[0]), self._element)
        new = ir.Operation.create(
            op.name,
            results=[kind],
            operands=operands,
            attributes=dict(op.attributes.items()),
            regions=len(op.regions),
            loc=op.location,
            ip=opened.point,
        )
        if op.name in REDUCING:
            write_reducer(self._tree.kind, self._element, new.regions[0], op.location)
        return new.results[0]


def _others(step: ChainOp) -> list[ir.Value]:
    return [value for i, value in enumerate(step.op.operands) if i != step.through]
