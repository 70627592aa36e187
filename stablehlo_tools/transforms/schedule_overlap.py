"""Orders collectives and compute so that one hides the other, and holds XLA:GPU to the order.

The overlap scheduler plans on the program's own task graph, with one collective in flight at a
time. The pass writes the ops of each block in the planned order. A fence holds each collective at
its beginning: an optimization_barrier on the operand of the compute that hides it, on its own
operand, and on the results that must be complete by then.

    %g = "stablehlo.all_gather"(%w)              // needed by %z only
    %y = stablehlo.dot_general %x, %v            // long
    %z = stablehlo.dot_general %y, %g
  ==>
    %x1, %w1 = stablehlo.optimization_barrier %x, %w
    %g = "stablehlo.all_gather"(%w1)             // begins here, not earlier
    %y = stablehlo.dot_general %x1, %v           // hides it
    %z = stablehlo.dot_general %y, %g

Preconditions:
  P1  The collectives are explicit: a plain sharded jit export is partitioned first.
  P2  Every communicating op is of a dialect that is understood.
  P3  No op has a token yet: thread-tokens comes after this pass.
  P4  `memory-limit` is positive, and some order of the program needs no more; `streams` is not
      negative, `compute-overlap-multiplier` positive.

Guarantees: the signature stays. Values are bitwise the same, because ops only move and barriers
compute nothing. The program stays within `memory-limit`, if one is given. If the pass writes
anything, calls are inlined, and several manual computations become one (by `partition`). Each loop
body is scheduled separately; a collective that only the iteration before could hide stays exposed.

A block stays unchanged, with a note of the reason under `explain`,

- if the plan hides less than three fifths of the time that could be hidden;
- if the block with its fences is not expected to be 2 % faster than XLA's own schedule of it,
  combiners included;
- for TPUs: XLA:TPU runs all_reduce, reduce_scatter and all_to_all synchronously in every form.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import ClassVar

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.partitioner_work import refuse_unpartitioned
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import (
    GIB,
    Diagnostic,
    Diagnostics,
    Severity,
    ToolError,
    duration,
    size,
    to_place,
)
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.overlap.collective_times import (
    CollectiveRow,
    collective_numbers,
    collective_rows,
)
from stablehlo_tools.overlap.compilers.expected import predict_run
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.partition import PartitionPass
from stablehlo_tools.transforms.parts.schedule_overlap.scheduled_block import (
    PlanLimits,
    ScheduledBlock,
    schedule_block,
    write_block,
)

_HEADROOM = GIB  # additional bytes that a plan may need, beyond the program's own order
_HIDES = 0.6  # of the time that could be hidden: a plan that hides less is not written
_WORTH = 0.98  # of XLA's own time for a block: fences prevent fusions that the model does not know
_HIDDEN = 0.02  # of a transfer's time: if less is exposed, it counts as hidden
_SMALL = 4096  # bytes: a smaller collective takes its latency, whatever its size
_FEW = 3  # up to so many equal collectives have a note each
_IN_ORDER = "the compute that could hide it hides others, or memory does not allow it"
_TRIES = 3  # plans, each with less memory than the one before


@dataclass(frozen=True)
class ScheduleOverlapPass(Pass):
    """Orders collectives and compute so that one hides the other, within memory.

    `hardware`: the name or the file of the profile to plan for. `memory-limit`: the GiB that the
    plan may need on a device (default: 1 GiB more than the program's own order needs). `streams`:
    how many collectives may be in flight at a time, 0 for any number; XLA:GPU allows one unless an
    option changes it. `no-compute-reorder`: compute keeps its order. `compute-overlap-multiplier`:
    the share of the time of compute that hides transfers in the plan (default: 1). `explain`: a
    note for each collective, with the compute that hides it or the reason why none does (one note
    for many of the same kind), and for each block that stays unchanged.
    """

    name: ClassVar[str] = "schedule-overlap"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.ORDER, ("", "no-compute-reorder"))
    hardware: str = "h100"
    memory_limit: float | None = None
    streams: int = 1
    no_compute_reorder: bool = False
    compute_overlap_multiplier: float = 1.0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Schedules a copy of the module, and replaces the module by it if any block was
        written."""
        hardware = load_hardware(self.hardware)
        location = module.operation.location
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ToolError(
                "schedule-overlap: memory-limit is a positive number of GiB (P4)", location
            )
        if self.streams < 0:
            raise ToolError("schedule-overlap: streams is 0 (no limit) or more (P4)", location)
        if not 0 < self.compute_overlap_multiplier < inf:
            raise ToolError(
                "schedule-overlap: compute-overlap-multiplier is a positive number (P4)", location
            )
        refuse_unpartitioned(module, "schedule-overlap", "P1")
        refuse_tokens(module, "schedule-overlap", "P3")
        draft = self._draft(module, hardware)
        # None: a block without a reason to stay, so it is written.
        if None in draft.left:
            take_over(module, draft.module)
        if self.explain:
            diagnostics.collected += _block_notes(draft)
            diagnostics.collected += explain(_OverlapWork.from_module(module, hardware).traced)

    def _draft(self, module: ir.Module, hardware: Hardware) -> _OverlapDraft:
        """Schedules the blocks of a module that get faster, within the memory limit."""
        whole = self._within_limit(module, hardware, None)
        if None not in whole.left:
            return whole
        written = _OverlapWork.from_module(whole.module, hardware)
        # The expected ns of each block as XLA schedules it, inner ones first.
        passages = [
            predict_run(work.traced.graph, hardware, work.devices, streams=self.streams).blocks
            for work in (written, whole.work)
        ]
        faster = {
            number
            for number, (ns, own) in enumerate(zip(*(p.values() for p in passages), strict=True))
            if ns <= _WORTH * own
        }
        written_blocks = zip(whole.blocks, whole.left, strict=True)
        if all(number in faster for number, left in written_blocks if left is None):
            return whole
        # Only the blocks that get faster are written, in a new copy.
        return self._within_limit(module, hardware, faster)

    def _within_limit(
        self, module: ir.Module, hardware: Hardware, chosen: Container[int] | None
    ) -> _OverlapDraft:
        """Schedules the chosen blocks so that the written module is within the memory limit.

        Fences keep some tensors live for longer than the plan does. If so, plans again with less
        memory.
        """
        draft, less = self._write_draft(module, hardware, 0.0, chosen), 0.0
        for _ in range(_TRIES):
            over = 0.0 if self.memory_limit is None else draft.peak - self.memory_limit * GIB
            if over <= 0 or None not in draft.left:
                return draft
            less += over
            try:
                draft = self._write_draft(module, hardware, less, chosen)
            except ToolError:
                break  # no order meets this limit
        reason = "the values that the fences keep would exceed the memory limit"
        return replace(draft, left=[known or reason for known in draft.left])

    def _write_draft(
        self, module: ir.Module, hardware: Hardware, less: float, chosen: Container[int] | None
    ) -> _OverlapDraft:
        """Returns a copy with scheduled blocks; the plan gets `less` bytes fewer than the limit."""
        copy = copy_module(module)
        # Schedules need one body: calls are inlined, manual computations joined.
        inline_all_calls(copy)
        fold_equal_branches(copy)
        block = Function(entry_function(copy)).body
        if sum(op.operation.name == MANUAL_COMPUTATION for op in block.operations) > 1:
            PartitionPass().run(copy, Diagnostics())
        work = _OverlapWork.from_module(copy, hardware)
        headroom = _HEADROOM
        if self.memory_limit is not None:
            headroom = self.memory_limit * GIB - work.peak
        # Fences may keep values for longer than the plan does; `less` makes room for them.
        headroom -= less
        blocks = dict(self._blocks(work, work.traced, headroom, count()))
        left = [_why_left(*numbered, hardware, chosen) for numbered in blocks.items()]
        for block, reason in zip(blocks.values(), left, strict=True):
            if reason is None:
                write_block(block)
        limited = self.memory_limit is not None and None in left
        peak = _OverlapWork.from_module(copy, hardware).peak if limited else work.peak
        return _OverlapDraft(copy, work, blocks, left, peak)

    def _blocks(
        self,
        work: _OverlapWork,
        traced: TracedGraph,
        headroom: float,
        numbers: Iterator[int],
        *,
        depth: int = 0,
    ) -> Iterator[tuple[int, ScheduledBlock]]:
        """Yields the blocks with collectives and their schedules, by number, inner ones first."""
        for body in traced.bodies.values():
            yield from self._blocks(work, body, max(0.0, headroom), numbers, depth=depth + 1)
        number, in_loop = next(numbers), depth > 0
        limits = PlanLimits(
            headroom,
            self.streams,
            not self.no_compute_reorder,
            work.copy_rate,
            self.compute_overlap_multiplier,
        )
        own = memory_profile(traced.graph, in_loop=in_loop).peak_bytes
        block = schedule_block(traced, work.effects, limits, own, in_loop=in_loop)
        if block is not None:
            yield number, block


@dataclass(frozen=True)
class _OverlapDraft:
    """A rewritten copy of a module, why each of its blocks is left, and the bytes it needs."""

    module: ir.Module
    work: _OverlapWork  # before the rewrite
    blocks: Mapping[int, ScheduledBlock]  # by number, inner ones first
    left: Sequence[str | None]
    peak: float


@dataclass(frozen=True)
class _OverlapWork:
    """A module with its task graph."""

    traced: TracedGraph
    effects: Effects
    copy_rate: float  # bytes per ns
    peak: float  # bytes, of the program's own order
    devices: int

    @staticmethod
    def from_module(module: ir.Module, hardware: Hardware) -> _OverlapWork:
        """Analyzes a module. Raises ToolError if the program cannot be timed."""
        devices = ModuleFacts.from_module(module).grid.size
        traced = traced_task_graph(module, Clock(hardware, devices), "")
        return _OverlapWork(
            traced,
            Effects(functions_by_name(module)),
            hardware.memory_rate,
            memory_profile(traced.graph).peak_bytes,
            devices,
        )


def _why_left(
    number: int, block: ScheduledBlock, hardware: Hardware, chosen: Container[int] | None
) -> str | None:
    """Says why a block is left unchanged; None if it is written."""
    if hardware.is_torus:
        return "no form is known that makes XLA:TPU hide the collectives that it leaves exposed"
    if not block.holds:
        return "no collective could begin at another place than it does"
    if block.closed < _HIDES:
        return (
            f"the plan hides {block.closed:.0%} of the time that could be hidden: below "
            f"{_HIDES:.0%}, the compiler's own schedule is better"
        )
    if chosen is not None and number not in chosen:
        return "XLA is expected to be as fast by itself"
    return None


def _block_notes(draft: _OverlapDraft) -> Iterator[Diagnostic]:
    """Yields a note for each block: its times, and why it is left unchanged."""
    for block, reason in zip(draft.blocks.values(), draft.left, strict=True):
        schedule = block.schedule
        times = (
            f"{duration(schedule.before_ns)} as written, {duration(schedule.total_ns)} planned, "
            f"no order below {duration(schedule.floor_ns)}"
        )
        said = "scheduled" if reason is None else f"left as it is: {reason}"
        yield Diagnostic(Severity.NOTE, f"{times}: {said}", to_place(block.location))


@dataclass(frozen=True)
class _Explained:
    """A collective, its times, and the block that it runs in."""

    path: tuple[int, ...]
    location: ir.Location | None
    row: CollectiveRow

    @property
    def is_hidden(self) -> bool:
        return self.row.exposed_ns <= _HIDDEN * self.row.ns

    @property
    def alike(self) -> object:
        """A key that is equal for collectives that may share a note: small ones, or those of one
        source line."""
        if self.row.bytes <= _SMALL:
            return self.path, self.row.kind, None
        return self.path, self.row.kind, to_place(self.location), self.row.bytes


def explain(traced: TracedGraph) -> Iterator[Diagnostic]:
    """Yields a note for each collective of a program: what hides it, or why nothing does.

    There can be hundreds of equal collectives, like sums of scalars, or those of each layer of an
    unrolled program. They share one note, with their number and total times.
    """
    rows = collective_rows(traced.graph, simulate(traced.graph))
    explained: list[_Explained] = []
    groups: dict[object, list[_Explained]] = {}
    for ((path, start), _), row in zip(collective_numbers(traced.graph).items(), rows, strict=True):
        around = traced
        for task in path:
            around = around.bodies[task]
        ops = around.ops[start]
        explained.append(_Explained(path, ops[-1].location if ops else None, row))
        groups.setdefault(explained[-1].alike, []).append(explained[-1])
    for one in explained:
        group = groups[one.alike]
        if len(group) <= _FEW:
            yield Diagnostic(Severity.NOTE, _sentence(one), to_place(one.location))
        elif one is group[0]:
            yield Diagnostic(Severity.NOTE, _sentence_of_all(group), to_place(one.location))


def _sentence(one: _Explained) -> str:
    row = one.row
    what = f"{row.kind} of {duration(row.ns / max(1, row.times))}"
    if row.times != 1:
        what = f"{row.times} times {what}"
    if one.is_hidden:
        hiders = [hider.name for hider in row.hidden_by]
        more = f" and {len(hiders) - 1} more" if len(hiders) > 1 else ""
        return f"{what}: hidden under {hiders[0]}{more}" if hiders else f"{what}: takes no time"
    return f"{what}: {duration(row.exposed_ns)} exposed: {row.why or _IN_ORDER}"


def _sentence_of_all(group: Sequence[_Explained]) -> str:
    """Returns the text of the note on equal collectives, which is at the first of them."""
    rows = [one.row for one in group]
    what = (
        f"{len(group)} {rows[0].kind}s of {size(max(row.bytes for row in rows))}"
        f"{' or less' if len({row.bytes for row in rows}) > 1 else ''}, "
        f"{duration(sum(row.ns for row in rows))} together, the first of them here"
    )
    exposed = sum(row.exposed_ns for row in rows)
    hidden = sum(one.is_hidden for one in group)
    if hidden == len(group):
        return f"{what}: all of them hidden"
    most = max(rows, key=lambda row: row.exposed_ns)
    return (
        f"{what}: {hidden or 'none'} of them hidden, {duration(exposed)} exposed; the most "
        f"exposed one: {most.why or _IN_ORDER}"
    )
