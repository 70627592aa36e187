"""Plans which collectives of a module to merge.

The scheduler forms buckets that lower the simulated total. From each bucket, the collectives that
`Merger` can merge are chosen. The simulator does not know the copies of operands and results, so a
collective whose copies take longer than its latency is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, Place, Severity, to_place
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits, schedule
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger

HEADROOM = 2.0**30  # additional bytes that a plan may need, beyond the program's own order


@dataclass(frozen=True)
class Bucket:
    """Collectives to merge, by their numbers among all of a module with inlined calls.

    `saved_ns`: the latencies that are saved. `copied_ns`: the time to copy operands and results.
    """

    members: tuple[int, ...]
    kind: str
    at: tuple[Place, ...]
    saved_ns: float
    copied_ns: float


@dataclass(frozen=True)
class _Member:
    """A collective of one of the scheduler's buckets, its number and its latency."""

    place: int
    collective: Collective
    latency_ns: float

    @property
    def at(self) -> Place:
        return to_place(self.collective.op.location)


def plan_buckets(
    module: ir.Module, hardware: Hardware, memory_limit: float | None
) -> tuple[list[Bucket], list[Diagnostic]]:
    """Plans on a copy of a module; returns the buckets in order, and notes on collectives left out.

    `memory_limit`: in bytes; None for `HEADROOM` more than the program needs. Raises ToolError if
    the program cannot be timed, or no order meets the limit.
    """
    scratch = copy_module(module)
    inline_all_calls(scratch)
    fold_equal_branches(scratch)
    collectives = find_collectives(scratch)
    places = {key_of(c.op): number for number, c in enumerate(collectives)}
    devices = ModuleFacts.from_module(scratch, collectives).grid.size
    traced = traced_task_graph(scratch, Clock(hardware, devices), "")
    merger = Merger(scratch, collectives)
    headroom = HEADROOM
    if memory_limit is not None:
        headroom = memory_limit - memory_profile(traced.graph).peak_bytes
    planned = list(_scheduled_buckets(traced, headroom))
    buckets: list[Bucket] = []
    left_out: list[Diagnostic] = []
    for tasks in planned:
        members = _members(tasks, places, collectives)
        divided, refused = _divide(members, merger, hardware)
        left_out += refused
        for bucket in divided:
            # On the copy, so that later buckets are judged by the merged collectives.
            merger.merge([collectives[place] for place in bucket.members])
        buckets += divided
    return buckets, left_out


def apply_buckets(module: ir.Module, buckets: Sequence[Bucket]) -> None:
    """Merges planned buckets; inlines calls if there are any buckets."""
    if not buckets:
        return
    # The same steps as in the plan, because its numbers count the collectives after them.
    inline_all_calls(module)
    fold_equal_branches(module)
    collectives = find_collectives(module)
    merger = Merger(module, collectives)
    for bucket in buckets:
        merger.merge([collectives[place] for place in bucket.members])


_Tasks = Sequence[tuple[Sequence[ir.Operation], float]]  # the ops and the latency of each task


def _scheduled_buckets(
    traced: TracedGraph, headroom: float, *, in_loop: bool = False
) -> Iterator[_Tasks]:
    """Yields the scheduler's buckets for a graph and for the bodies of its loops."""
    tasks = traced.graph.tasks
    if any(task.communication is not None for task in tasks):
        peak = memory_profile(traced.graph, in_loop=in_loop).peak_bytes
        new_schedule = schedule(
            traced.graph, ScheduleLimits(memory=peak + headroom), in_loop=in_loop
        )
        for bucket in new_schedule.buckets:
            sent = [(task, tasks[task].communication) for task in bucket]
            yield [(traced.ops[task], each.latency_ns if each else 0.0) for task, each in sent]
    for body in traced.bodies.values():
        yield from _scheduled_buckets(body, headroom, in_loop=True)


def _members(
    tasks: _Tasks, places: Mapping[ir.Value | ir.Operation, int], collectives: Sequence[Collective]
) -> list[_Member]:
    """Returns the collectives of a bucket's tasks, in program order."""
    members: dict[int, _Member] = {}
    for ops, latency in tasks:
        for op in ops:
            place = places.get(key_of(op))
            if place is not None:
                members[place] = _Member(place, collectives[place], latency)
    return [members[place] for place in sorted(members)]


def _divide(
    members: Sequence[_Member], merger: Merger, hardware: Hardware
) -> tuple[list[Bucket], list[Diagnostic]]:
    """Splits a bucket into sets of two or more that can be merged; returns notes on the others."""
    sets: list[list[_Member]] = []
    reasons: dict[int, str] = {}
    for member in members:
        alone = _why_not_alone(member, merger, hardware)
        if alone is not None:
            reasons[member.place] = alone
            continue
        for chosen in sets:
            reason = merger.why_not([m.collective for m in (*chosen, member)])
            if reason is None:
                chosen.append(member)
                break
            reasons.setdefault(member.place, reason)
        else:
            sets.append([member])
    buckets: list[Bucket] = []
    for chosen in sets:
        latencies = [member.latency_ns for member in chosen]
        copied = sum(_copied_ns(member, merger, hardware) for member in chosen)
        saved = sum(latencies) - max(latencies)
        if len(chosen) > 1 and copied <= saved:
            places = tuple(member.place for member in chosen)
            at = tuple(member.at for member in chosen)
            buckets.append(Bucket(places, chosen[0].collective.kind, at, saved, copied))
    taken = {place for bucket in buckets for place in bucket.members}
    lonely = "no other collective of its bucket can merge with it, or the gain is too small"
    notes: list[Diagnostic] = []
    for member in members:
        if member.place not in taken:
            reason = reasons.get(member.place, lonely)
            text = f"{member.collective.kind} is not merged: {reason}"
            notes.append(Diagnostic(Severity.NOTE, text, member.at))
    return buckets, notes


def _why_not_alone(member: _Member, merger: Merger, hardware: Hardware) -> str | None:
    """Says why a collective cannot be merged with any other; None if it can."""
    reason = merger.why_not([member.collective])
    copied = _copied_ns(member, merger, hardware)
    if reason is None and copied > member.latency_ns:
        reason = (
            f"copying its data takes {us(copied)}, more than its latency of {us(member.latency_ns)}"
        )
    return reason


def _copied_ns(member: _Member, merger: Merger, hardware: Hardware) -> float:
    return merger.copied_bytes(member.collective) / hardware.memory_rate


def us(ns: float) -> str:
    """Formats ns as microseconds, with the unit."""
    return f"{ns / 1e3:.3g} us"
