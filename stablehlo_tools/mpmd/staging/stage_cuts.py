"""Cuts a training step into stages: loops over layers by ranges, other ops by their dependences.

The forward of a step is a sequence of units. An op is one unit, in program order; a loop over
layers is one unit for each iteration. All work of a microbatch is counted at a unit. Work of the
backward counts at the origin of its operands, by the rule that gives it a stage (see `assignment`).

The heaviest stage of a cut is within 5 % of the lightest possible. Of such cuts the one with the
lowest cost is chosen. Times are divided by the mean time of a stage:

    cost = sum over stages of time ** 2 + sum over cuts of the message time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.backward_division import backward_loops, layer_chains
from stablehlo_tools.analysis.layer_loops.cut_loops import uncut_loops
from stablehlo_tools.analysis.layer_loops.linked_loops import range_of
from stablehlo_tools.analysis.loop_carries import LayerLoop
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError, note
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name, ops_where
from stablehlo_tools.mpmd.staging.assignment import Assignment, assign, positions
from stablehlo_tools.mpmd.staging.forward_ops import (
    Forward,
    find_forward,
    mark,
    marked_forward,
    named_by_user,
    stages_by_mark,
)
from stablehlo_tools.mpmd.staging.op_times import Weigher, kernel_times
from stablehlo_tools.mpmd.staging.split_stage_sums import own_spreads, take_apart
from stablehlo_tools.mpmd.staging.step import MicrobatchLoop, TrainingStep, find_microbatch_loop
from stablehlo_tools.transforms.split_layers import SplitLayersPass
from stablehlo_tools.transforms.split_weight_gradients import SplitWeightGradientsPass

_MUCH = 1e9  # bytes
_NAME = "stablehlo_tools.cut"  # marks a loop that is to be cut
_MILLI = 1e3
_SLACK = 1.05  # relative to the least possible maximum of the stages, for evenness and fewer bytes
_ROUNDING = 1 + 1e-9


def stage_step(module: ir.Module, stages: int, clock: Clock, *, splits: bool) -> Staged:
    """Rewrites a module so that its stages are separate, and assigns its ops to them.

    With `splits`, weight gradients of a range of layers become a separate loop, which a schedule
    can defer (zero bubble, arXiv 2401.10241). The values between the two loops are written and read
    again. Raises a located ToolError if it cannot be cut into so many stages.
    """
    step = read_step(module)
    forward = find_forward(step, Weigher(clock.hardware))
    by_user = named_by_user(step, forward, stages)
    if by_user is not None:
        mark(step, {index: [stage] for index, stage in by_user.items()})
    else:
        _cut(module, step, forward, stages, clock)
    if splits:
        block, effects = _block(module), Effects(functions_by_name(module))
        if backward_loops(layer_chains(block, effects), block, effects):
            SplitWeightGradientsPass().run(module, Diagnostics())
    own_spreads(_block(module))
    # A rewrite adds ops without a stage, so the step is read and assigned again each time.
    staged = _assign_stages(module, stages)
    while take_apart(staged.step, staged.assignment):
        staged = _assign_stages(module, stages)
    return staged


@dataclass(frozen=True)
class Staged:
    """A step whose ops all have a stage and a phase. It lives as long as its module."""

    module: ir.Module
    step: TrainingStep
    forward: Forward
    assignment: Assignment


def read_step(module: ir.Module) -> TrainingStep:
    """Returns the training step of a module without calls. Raises a located ToolError."""
    block = _block(module)
    effects = Effects(functions_by_name(module))
    loop = find_microbatch_loop(block, effects)
    return TrainingStep(loop, Dataflow.from_block(block, opened=()), effects)


def own_loop(module: ir.Module, weigher: Weigher) -> MicrobatchLoop | None:
    """Returns the existing loop over microbatches of a module without calls; None without one."""
    try:
        step = read_step(module)
        find_forward(step, weigher)
    except ToolError:
        return None
    return step.loop


def _assign_stages(module: ir.Module, stages: int) -> Staged:
    step = read_step(module)
    forward = marked_forward(step)
    return Staged(
        module, step, forward, assign(step, forward, stages_by_mark(step, forward), stages)
    )


def _cut(
    module: ir.Module, step: TrainingStep, forward: Forward, stages: int, clock: Clock
) -> None:
    """Marks the ops of the forward with balanced stages, and cuts the loops over layers."""
    effects = Effects(functions_by_name(module))
    by_op = {key_of(loop.op): loop for loop in uncut_loops(entry_function(module), effects)}
    keys = {node.index: key_of(node.op) for node in step.flow.nodes}
    loops = {index: by_op[key] for index, key in keys.items() if key in by_op}
    units = units_of(step, forward, loops, kernel_times(module, step, clock))
    # the time of one more byte between two ranks
    some, more = (
        transfer_time(
            DeviceTransfer("collective_permute", size, ((0, clock.devices),)),
            clock.hardware,
            2 * clock.devices,
        ).ns
        for size in (_MUCH, 2 * _MUCH)
    )
    cuts = cut_units(units, stages, (more - some) / _MUCH, step.loop.op.location)
    marks: dict[int, Sequence[int]] = {}
    wanted: list[tuple[int, ...]] = []
    for index, span in units.spans.items():
        backwards = index in loops and loops[index].reverse
        way = -1 if backwards else 1
        marks[index] = cuts.stages_of(span)[::way]
        if len(marks[index]) > 1:
            loop = step.flow.nodes[index].op
            i64 = ir.IntegerType.get_signless(64, loop.context)
            loop.attributes[_NAME] = ir.IntegerAttr.get(i64, len(wanted))
            wanted.append(cuts.counts(span)[::way])
    mark(step, marks)
    for name, counts in enumerate(wanted):
        # Each cut renumbers the loops that are left, so find the loop by its mark.
        number = _number_of(module, name, counts)
        if number is not None:
            SplitLayersPass(counts=counts, loop=number).run(module, Diagnostics())


def _number_of(module: ir.Module, name: int, counts: tuple[int, ...]) -> int | None:
    """Returns the number of a named loop among those that are not yet cut.

    Returns None if it was cut the same way together with another loop. Raises a located ToolError
    if it was cut in another way.
    """
    main = entry_function(module)
    marked_ops = ops_where(main, lambda op: _NAME in op.attributes)
    named = [op for op in marked_ops if ir.IntegerAttr(op.attributes[_NAME]).value == name]
    uncut = [key_of(loop.op) for loop in uncut_loops(main, Effects(functions_by_name(module)))]
    numbers = [uncut.index(key_of(op)) for op in named if key_of(op) in uncut]
    if numbers:
        return numbers[0]
    if len(named) != len(counts):
        raise ToolError(
            "expand-mpmd: two loops go over these layers, and balancing would cut them at "
            "different layers; name the stages with jax.named_scope (P5)",
            named[0].location,
        )
    return None


def _block(module: ir.Module) -> ir.Block:
    return Function(entry_function(module)).body


def useless_cut(
    staged: Staged, makespan: float, alone: float, ranks: int, hardware: Hardware
) -> Diagnostic | None:
    """Returns a warning if a set of several ranks is no faster than one; else None.

    Times are in seconds: `makespan` of a step of the set, `alone` of the uncut step on one rank.
    """
    if ranks == 1 or makespan < alone:
        return None
    loop = _uncut_loop(staged, hardware)
    notes: list[Diagnostic] = []
    if loop is not None:
        said = (
            f"this loop is {loop[1]:.0%} of the work of a microbatch, and one stage has all of "
            "it, because no layers were found in it. Write the layers as a lax.scan over stacked "
            "weights in which each layer reads the result of the one before, or without a loop"
        )
        notes.append(note(said, loop[0].location))
    return Diagnostic(
        Severity.WARNING,
        f"expand-mpmd: this set is slower than one rank: predicted are {makespan * _MILLI:.3f} ms "
        f"a step on {ranks} ranks, and {alone * _MILLI:.3f} ms for the step on one; --compare "
        "times other schedules, fewer microbatches give each more work",
        notes=tuple(notes),  # no location, because it is about the whole step
    )


def _uncut_loop(staged: Staged, hardware: Hardware) -> tuple[ir.Operation, float] | None:
    """Returns the heaviest loop of a microbatch that is in one stage, and its share of all work.

    Returns None if the share is at most that of a balanced stage.
    """
    weigher = Weigher(hardware)
    ops = [node.op for node in staged.step.staged]
    total = sum(map(weigher.ns, ops))
    whole = [op for op in ops if op.name == WHILE and range_of(op) is None]
    heaviest = max(whole, key=weigher.ns, default=None)
    if heaviest is None or not total:
        return None
    share = weigher.ns(heaviest) / total
    return (heaviest, share) if share * staged.assignment.stages > 1 else None


class UnitSpan(NamedTuple):
    """The units of a node of the forward: from `first` up to `limit`."""

    first: int
    limit: int


@dataclass(frozen=True)
class CutUnits:
    """The work and the messages of the units, and the units of each node.

    `ns[u]` is the work counted at unit u. `crossing[u]` has the bytes that a microbatch sends
    forward and back if there is a cut before unit u. `spans` has the units of each node of the
    forward, by index.
    """

    ns: Sequence[float]
    crossing: Sequence[float]
    spans: Mapping[int, UnitSpan]


def units_of(
    step: TrainingStep, forward: Forward, loops: Mapping[int, LayerLoop], times: Mapping[int, float]
) -> CutUnits:
    """Returns the units of a step. `loops` are the loops over layers among its nodes. `times` has
    the nanoseconds of nodes, by index."""
    spans: dict[int, UnitSpan] = {}
    count = 0
    for index in sorted(forward):
        size = loops[index].trips if index in loops else 1
        spans[index] = UnitSpan(count, count + size)
        count += size
    ns, crossing = [0.0] * count, [0.0] * (count + 1)
    where = positions(step, forward, {index: span.first for index, span in spans.items()}, spans)
    for index in sorted(step.needed):
        node = step.flow.nodes[index]
        span = spans.get(index) or _backward_span(step, node, loops, spans, where[index])
        each = times.get(index, 0.0) / (span.limit - span.first)
        for unit in range(span.first, span.limit):
            ns[unit] += each
    for index in sorted(forward):
        _note_crossing(step, step.flow.nodes[index], spans, where, crossing)
    return CutUnits(ns, list(accumulate(crossing))[:count], spans)


def _backward_span(
    step: TrainingStep,
    node: Node,
    loops: Mapping[int, LayerLoop],
    spans: Mapping[int, UnitSpan],
    position: int,
) -> UnitSpan:
    """Returns the units at which the work of a node of the backward is counted.

    A loop counts at the last loop of the forward whose rows it reads, maybe reshaped or converted.
    Other nodes count at `position`.
    """
    pending = list(node.inputs) if node.index in loops else []
    seen: set[int] = set()
    forward: list[UnitSpan] = []
    while pending:
        maker = step.flow.maker.get(pending.pop())
        if maker is None or maker.index in seen:
            continue
        seen.add(maker.index)
        span = spans.get(maker.index)
        if maker.index in loops:
            if span is not None and span.limit - span.first == loops[node.index].trips:
                forward.append(span)
        elif maker.name in FORMATTING:
            pending += maker.inputs
    return max(forward, default=UnitSpan(position, position + 1))


def _note_crossing(
    step: TrainingStep,
    node: Node,
    spans: Mapping[int, UnitSpan],
    where: Mapping[int, int],
    crossing: list[float],
) -> None:
    """Adds the bytes that the results of a node of the forward send over each cut.

    They are changes from unit to unit. Each value counts twice: the activation forward, its
    gradient back.
    """
    for number in node.results:
        users = [user for user in step.flow.users.get(number, ()) if user.index in where]
        ends = [spans[u.index].first if u.index in spans else where[u.index] for u in users]
        start, last = spans[node.index].limit - 1, max(ends, default=0)
        if last > start:
            size = 2.0 * bytes_of(step.flow.values[number])
            crossing[start + 1] += size
            crossing[last + 1] -= size
    span = spans[node.index]
    if span.limit - span.first > 1:  # its initial carries are sent on between iterations
        for operand in node.op.operands:
            size = 2.0 * bytes_of(operand)
            if step.is_staged(step.flow.numbers[operand]):
                crossing[span.first + 1] += size
                crossing[span.limit] -= size


@dataclass(frozen=True)
class Cuts:
    """The units at which stages begin, without the first, and the work of each stage."""

    begins: tuple[int, ...]
    ns: tuple[float, ...]

    def stage_of(self, unit: int) -> int:
        """Returns the stage of a unit."""
        return bisect_left(self.begins, unit + 1)

    def stages_of(self, span: UnitSpan) -> range:
        """Returns the stages that have units of a span."""
        return range(self.stage_of(span.first), self.stage_of(span.limit - 1) + 1)

    def counts(self, span: UnitSpan) -> tuple[int, ...]:
        """Returns the number of units of a span on each stage that has any."""
        inside = [unit for unit in self.begins if span.first < unit < span.limit]
        return tuple(b - a for a, b in pairwise([span.first, *inside, span.limit]))


def cut_units(units: CutUnits, stages: int, ns_per_byte: float, place: ir.Location) -> Cuts:
    """Returns the cuts into so many nonempty stages. Raises ToolError if there are fewer units."""
    count = len(units.ns)
    if count < stages:
        raise ToolError(
            f"expand-mpmd: the forward has only {count} ops and iterations over layers for "
            f"{stages} stages (P5)",
            place,
        )
    upto = [0.0, *accumulate(units.ns)]
    # Bisect for the least limit at which so many stages hold all units.
    low, high = upto[-1] / stages, upto[-1]
    for _ in range(60):  # more halvings than a float has bits
        middle = (low + high) / 2
        if _fits(upto, stages, middle):
            high = middle
        else:
            low = middle
    limit = high * _SLACK
    sent = [size * ns_per_byte for size in units.crossing]
    begins = _cheapest(upto, sent, stages, limit)
    edges = [0, *begins, count]
    return Cuts(tuple(begins), tuple(upto[b] - upto[a] for a, b in pairwise(edges)))


def _fits(upto: Sequence[float], stages: int, limit: float) -> bool:
    # Greedy: each stage is filled up to the limit.
    first, count = 0, len(upto) - 1
    for _ in range(stages):
        # the last unit at which a stage from `first` can end
        first = bisect_left(upto, (upto[first] + limit) * _ROUNDING, first + 1) - 1
        if first >= count:
            return True
    return False


def _cheapest(
    upto: Sequence[float], crossing: Sequence[float], stages: int, limit: float
) -> list[int]:
    """Returns the units at which stages begin, with no stage above the limit.

    `crossing[u]` is the time in nanoseconds of the messages over a cut before unit u.
    """
    count = len(upto) - 1
    mean = max(upto[-1], 1.0) / stages
    edges = np.asarray(upto) / mean
    most = limit * _ROUNDING / mean
    # best[u]: the least cost of the stages so far, if they end before unit u.
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    for stage in range(stages):
        following = np.full(count + 1, np.inf)
        origin = np.full(count + 1, -1)
        for first in range(stage, count):
            if np.isinf(best[first]):
                continue
            so_far = best[first] + (crossing[first] / mean if first else 0.0)
            end = int(np.searchsorted(edges, edges[first] + most, side="right"))
            ends = slice(first + 1, end)
            costs = so_far + (edges[ends] - edges[first]) ** 2
            better = costs < following[ends]
            following[ends][better] = costs[better]
            origin[ends][better] = first
        best = following
        chosen.append(origin)
    begins: list[int] = []
    end = count
    for origin in reversed(chosen):
        end = int(origin[end])
        begins.append(end)
    return begins[::-1][1:]
