"""The forward of a step as a row of units, and the cuts that make stages of them.

An op is a unit, in the order of the text; a loop over layers is one for each iteration. All work
of a microbatch is counted at a unit: that of the backward where what it reads comes from, by the
rule that gives it a stage (see `assignment`).

Cuts the units of a step into stages.

The heaviest is about as light as can be. Of such cuts those are taken that are most even, by the
squares of what stages take, and send least, by the time that it takes: a message as long as a stage
counts as much as a stage that is alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.layer_loops import LayerLoop
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.mpmd.staging.assignment import positions
from stablehlo_tools.mpmd.staging.forward import Forward
from stablehlo_tools.mpmd.staging.step import TrainingStep

_SLACK = 1.05  # of the least heaviest stage: what evenness and fewer bytes may cost
_ROUNDING = 1 + 1e-9


class Span(NamedTuple):
    """The units of a node of the forward: from `first` up to `limit`."""

    first: int
    limit: int


@dataclass(frozen=True)
class Units:
    """`ns[u]` is the work counted at unit u; `crossing[u]` the bytes that a microbatch sends, there
    and back, where the pipeline is cut in front of it. `spans` has the units of each node of the
    forward, by index."""

    ns: Sequence[float]
    crossing: Sequence[float]
    spans: Mapping[int, Span]


def units_of(
    step: TrainingStep, forward: Forward, loops: Mapping[int, LayerLoop], times: Mapping[int, float]
) -> Units:
    """The units of a step; `loops` are the loops over layers among its nodes, and `times` what
    nodes take, in nanoseconds, by index."""
    spans: dict[int, Span] = {}
    count = 0
    for index in sorted(forward.nodes):
        size = loops[index].trips if index in loops else 1
        spans[index] = Span(count, count + size)
        count += size
    ns, crossing = [0.0] * count, [0.0] * (count + 1)
    where = positions(step, forward, {index: span.first for index, span in spans.items()}, spans)
    for index in sorted(step.needed):
        node = step.flow.nodes[index]
        span = spans.get(index) or _backward_span(step, node, loops, spans, where[index])
        each = times.get(index, 0.0) / (span.limit - span.first)
        for unit in range(span.first, span.limit):
            ns[unit] += each
    for index in sorted(forward.nodes):
        _note_crossing(step, step.flow.nodes[index], spans, where, crossing)
    return Units(ns, list(accumulate(crossing))[:count], spans)


def _backward_span(
    step: TrainingStep,
    node: Node,
    loops: Mapping[int, LayerLoop],
    spans: Mapping[int, Span],
    position: int,
) -> Span:
    """Where the work of a node of the backward is counted: a loop, at the units of the last loop of
    the forward whose rows it reads, reshaped or converted maybe."""
    pending = list(node.inputs) if node.index in loops else []
    seen: set[int] = set()
    forward: list[Span] = []
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
    return max(forward, default=Span(position, position + 1))


def _note_crossing(
    step: TrainingStep,
    node: Node,
    spans: Mapping[int, Span],
    where: Mapping[int, int],
    crossing: list[float],
) -> None:
    """Adds what the results of a node of the forward send over each cut, as changes from unit to
    unit: an activation goes there, and its gradient back."""
    for number in node.results:
        users = [user for user in step.flow.users.get(number, ()) if user.index in where]
        ends = [_reading_unit(user, spans, where) for user in users]
        start, last = spans[node.index].limit - 1, max(ends, default=0)
        if last > start:
            size = 2.0 * bytes_of(step.flow.values[number])
            crossing[start + 1] += size
            crossing[last + 1] -= size
    span = spans[node.index]
    if span.limit - span.first > 1:  # between iterations, what the first of them takes goes on
        for operand in node.op.operands:
            size = 2.0 * bytes_of(operand)
            if step.is_staged(step.flow.numbers[operand]):
                crossing[span.first + 1] += size
                crossing[span.limit] -= size


def _reading_unit(user: Node, spans: Mapping[int, Span], where: Mapping[int, int]) -> int:
    span = spans.get(user.index)
    return where[user.index] if span is None else span.first


def layer_loops_by_node(step: TrainingStep, loops: Sequence[LayerLoop]) -> dict[int, LayerLoop]:
    """The loops over layers that are nodes of the body, by index."""
    by_op = {key_of(loop.op): loop for loop in loops}
    return {
        node.index: by_op[key_of(node.op)] for node in step.flow.nodes if key_of(node.op) in by_op
    }


@dataclass(frozen=True)
class Cuts:
    """The units at which stages begin, without the first; and what each stage weighs."""

    begins: tuple[int, ...]
    ns: tuple[float, ...]

    def stage_of(self, unit: int) -> int:
        """The stage of a unit."""
        return bisect_left(self.begins, unit + 1)

    def stages_of(self, span: Span) -> range:
        """The stages that have units of a span."""
        return range(self.stage_of(span.first), self.stage_of(span.limit - 1) + 1)

    def counts(self, span: Span) -> tuple[int, ...]:
        """How many units of a span are on each stage that has any."""
        inside = [unit for unit in self.begins if span.first < unit < span.limit]
        return tuple(b - a for a, b in pairwise([span.first, *inside, span.limit]))


def cut_units(units: Units, stages: int, ns_per_byte: float, place: ir.Location) -> Cuts:
    """The cuts into so many stages, none of them empty. Raises ToolError where units are fewer."""
    count = len(units.ns)
    if count < stages:
        raise ToolError(
            f"expand-mpmd: the forward has {count} ops and iterations over layers, too few for "
            f"{stages} stages (P5)",
            place,
        )
    upto = [0.0, *accumulate(units.ns)]
    limit = _least_heaviest(upto, stages) * _SLACK
    sent = [size * ns_per_byte for size in units.crossing]
    begins = _cheapest(upto, sent, stages, limit)
    edges = [0, *begins, count]
    return Cuts(tuple(begins), tuple(upto[b] - upto[a] for a, b in pairwise(edges)))


def _least_heaviest(upto: Sequence[float], stages: int) -> float:
    """The least weight such that so many stages, each of it at most, hold all units."""
    low, high = upto[-1] / stages, upto[-1]
    for _ in range(60):
        middle = (low + high) / 2
        if _fits(upto, stages, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(upto: Sequence[float], stages: int, limit: float) -> bool:
    first, count = 0, len(upto) - 1
    for _ in range(stages):
        first = _reach(upto, first, limit)
        if first >= count:
            return True
    return False


def _reach(upto: Sequence[float], first: int, limit: float) -> int:
    """The last unit at which a stage from `first` can end."""
    return bisect_left(upto, (upto[first] + limit) * _ROUNDING, first + 1) - 1


def _cheapest(
    upto: Sequence[float], crossing: Sequence[float], stages: int, limit: float
) -> list[int]:
    """Where stages begin, none heavier than the limit. `crossing[u]` is the time, in nanoseconds,
    that a cut in front of unit u costs."""
    count = len(upto) - 1
    mean = max(upto[-1], 1.0) / stages
    edges = np.asarray(upto) / mean
    most = limit * _ROUNDING / mean
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
    return _traced(chosen, count)


def _traced(chosen: Sequence[np.ndarray], count: int) -> list[int]:
    begins: list[int] = []
    end = count
    for origin in reversed(chosen):
        end = int(origin[end])
        begins.append(end)
    return begins[::-1][1:]
