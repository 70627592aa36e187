"""Which collectives of a module to merge: what the scheduler puts together and can become one.

The scheduler merges where the simulated total falls; of each of its buckets, those are taken that
`Merger` can make one. Merging copies operands and results, which the simulator does not know of:
a collective whose copies take longer than its latency is left out.
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
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger

HEADROOM = 2.0**30  # bytes that a plan may need more than the program's own order


@dataclass(frozen=True)
class Bucket:
    """Collectives to merge, by their places among all of a module whose calls are inlined.

    `saved_ns` is the latency that is paid once instead of each time, `copied_ns` what copying
    operands and results takes of that.
    """

    members: tuple[int, ...]
    kind: str
    at: tuple[Place, ...]
    saved_ns: float
    copied_ns: float


@dataclass(frozen=True)
class _Member:
    """A collective that the scheduler puts in a bucket, its place and its latency."""

    place: int
    collective: Collective
    latency_ns: float

    @property
    def at(self) -> Place:
        return to_place(self.collective.op.location)


def plan_buckets(
    module: ir.Module, hardware: Hardware, memory_limit: float | None
) -> tuple[list[Bucket], list[Diagnostic]]:
    """Plans on a copy of a module; what to merge, in order, and notes on what is left out of it.

    `memory_limit` is in bytes; None: some more than it needs.

    Raises ToolError for a program that cannot be timed, or for a limit that no order meets.
    """
    scratch = copy_module(module)
    inline_all_calls(scratch)
    fold_equal_branches(scratch)
    collectives = find_collectives(scratch)
    places = {key_of(c.op): number for number, c in enumerate(collectives)}
    devices = ModuleFacts.of(scratch, collectives).grid.size
    traced = traced_task_graph(scratch, Clock(hardware, devices), "")
    merger = Merger(scratch, collectives)
    headroom = HEADROOM
    if memory_limit is not None:
        headroom = memory_limit - memory_profile(traced.graph).peak_bytes
    planned = list(_scheduled(traced, headroom))
    buckets: list[Bucket] = []
    left_out: list[Diagnostic] = []
    for tasks in planned:
        members = _members(tasks, places, collectives)
        divided, refused = _divide(members, merger, hardware)
        left_out += refused
        for bucket in divided:
            merger.merge([collectives[place] for place in bucket.members])
        buckets += divided
    return buckets, left_out


def apply_buckets(module: ir.Module, buckets: Sequence[Bucket]) -> None:
    """Merges what was planned; calls are inlined where something is."""
    if not buckets:
        return
    inline_all_calls(module)
    fold_equal_branches(module)
    collectives = find_collectives(module)
    merger = Merger(module, collectives)
    for bucket in buckets:
        merger.merge([collectives[place] for place in bucket.members])


_Tasks = Sequence[tuple[Sequence[ir.Operation], float]]  # the ops and the latency of each task


def _scheduled(traced: TracedGraph, headroom: float, *, in_loop: bool = False) -> Iterator[_Tasks]:
    """The scheduler's buckets for a graph and for the bodies of its loops."""
    tasks = traced.graph.tasks
    if any(task.communication is not None for task in tasks):
        peak = memory_profile(traced.graph, in_loop=in_loop).peak_bytes
        new_schedule = schedule(traced.graph, Limits(memory=peak + headroom), in_loop=in_loop)
        for bucket in new_schedule.buckets:
            sent = [(task, tasks[task].communication) for task in bucket]
            yield [(traced.ops[task], each.latency_ns if each else 0.0) for task, each in sent]
    for body in traced.bodies.values():
        yield from _scheduled(body, headroom, in_loop=True)


def _members(
    tasks: _Tasks,
    places: Mapping[ir.Value | ir.Operation, int],
    collectives: Sequence[Collective],
) -> list[_Member]:
    """The collectives of a bucket's tasks, in program order."""
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
    """A bucket as sets of two and more that can become one; and notes on what is in none."""
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
    lonely = "no other of its bucket is left to merge it with, or too little is gained"
    notes: list[Diagnostic] = []
    for member in members:
        if member.place not in taken:
            reason = reasons.get(member.place, lonely)
            text = f"{member.collective.kind} is not merged: {reason}"
            notes.append(Diagnostic(Severity.NOTE, text, member.at))
    return buckets, notes


def _why_not_alone(member: _Member, merger: Merger, hardware: Hardware) -> str | None:
    """Why a collective is not merged with any other; None where it may be."""
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
    """Microseconds, in words."""
    return f"{ns / 1e3:.3g} us"
