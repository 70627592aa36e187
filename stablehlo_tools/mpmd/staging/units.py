"""The forward of a step as a row of units, between any two of which a pipeline may be cut.

An op is a unit, in the order of the text; a loop over layers is one for each iteration. All work
of a microbatch is counted at a unit: that of the backward where what it reads comes from, by the
rule that gives it a stage (see `assignment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from stablehlo_tools.analysis.layer_loops import LayerLoop
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.mpmd.staging.assignment import positions
from stablehlo_tools.mpmd.staging.dataflow import Node
from stablehlo_tools.mpmd.staging.step import Forward, Step


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
    step: Step, forward: Forward, loops: Mapping[int, LayerLoop], times: Mapping[int, float]
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
    step: Step,
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
    step: Step,
    node: Node,
    spans: Mapping[int, Span],
    where: Mapping[int, int],
    crossing: list[float],
) -> None:
    """Adds what the results of a node of the forward send over each cut, as changes from unit to
    unit: an activation goes there, and its gradient back."""
    for number in node.results:
        users = [user for user in step.flow.users.get(number, ()) if user.index in where]
        ends = [_reach(user, spans, where) for user in users]
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


def _reach(user: Node, spans: Mapping[int, Span], where: Mapping[int, int]) -> int:
    span = spans.get(user.index)
    return where[user.index] if span is None else span.first


def layer_loops_by_node(step: Step, loops: Sequence[LayerLoop]) -> dict[int, LayerLoop]:
    """The loops over layers that are nodes of the body, by index."""
    found = {key_of(loop.op): loop for loop in loops}
    return {
        node.index: found[key_of(node.op)] for node in step.flow.nodes if key_of(node.op) in found
    }
