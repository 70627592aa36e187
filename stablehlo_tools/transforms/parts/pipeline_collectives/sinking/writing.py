"""Writes a loop without the collectives that run after it, and these behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.bucket_collectives.placement import in_block_order
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.accumulation import Accumulated
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.last_values import LastValue
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import OpenedLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.plan import Plan, Sinking
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.stacking import Stacked
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.written_last import LastWriter
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.written_rows import RowsWriter
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.written_sums import SumWriter


class SinkWriter(Protocol):
    """Writes what was planned for one or several collectives."""

    @property
    def dead(self) -> Sequence[int]:
        """The carries that nothing reads any more."""
        ...

    @property
    def removed(self) -> Sequence[ir.Operation]:
        """The ops that leave the body."""
        ...

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves what the loop carries instead."""
        ...

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the body's share and what follows the loop.

        Returns what stands for results of the loop, and the collectives behind it.
        """
        ...


def write_sinkings(
    body: LoopBody, chosen: Sequence[Sinking]
) -> tuple[ir.Operation, list[ir.Operation]]:
    """Replaces a loop; returns the new one and the collectives that now stand after it, in order.

    One of a group stands for all of it. `body` and the plans made of it are not valid any more.
    """
    writers = list(_writers(body, chosen))
    opened = OpenedLoop(body, [number for writer in writers for number in writer.dead])
    for writer in writers:
        writer.take_carries(opened)
    opened.open()
    results: dict[int, ir.Value] = {}
    collectives: list[ir.Operation] = []
    for writer in writers:
        changed, written = writer.write(opened)
        results.update(changed)
        collectives += written
    removed: set[Key] = {key_of(op) for writer in writers for op in writer.removed}
    opened.close(removed, results)
    return opened.new, in_block_order(collectives)


def _writers(body: LoopBody, chosen: Sequence[Sinking]) -> Iterator[SinkWriter]:
    """One for each group, but one for all the groups that one tree of an accumulator has."""
    plans: dict[int, Plan] = {sinking.group: sinking.plan for sinking in chosen}
    sums: dict[int, list[Accumulated]] = {}
    for group in sorted(plans):
        plan = plans[group]
        if isinstance(plan, Accumulated):
            sums.setdefault(plan.tree.carry, []).append(plan)
    for leaves in sums.values():
        yield SumWriter(body, leaves)
    for group in sorted(plans):
        plan = plans[group]
        if isinstance(plan, LastValue):
            yield LastWriter(body, plan)
        elif isinstance(plan, Stacked):
            yield RowsWriter(body, plan)
