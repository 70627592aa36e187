"""Finds the iterations of a loop in which each edge of a collective_permute is needed.

An edge is needed in an iteration if an output of the program on some device may depend on the value
that its target then receives. Multiplication by zero proves nothing, because zero times NaN is NaN.
Values that `select`, `if`, `case`, and reads and writes at known places leave out are not needed.
Their predicates and places must follow from constants, device ids and counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.demand.demand_program import Body, DemandProgram, Node, walked_loops
from stablehlo_tools.analysis.demand.knowledge import DemandTooLargeError, Knowledge, StepBudget
from stablehlo_tools.analysis.demand.needs import Record, StepRules, Walk
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.walk import entry_function

Ranges = tuple[tuple[int, int], ...]  # of iterations, first and last, sorted and disjoint

MOST_STEPS = 250_000  # ops evaluated, loops iteration by iteration
MOST_ITERATIONS = 10_000  # of all loops together
LONG = (
    f"following the loops would take more than {MOST_ITERATIONS:,} iterations, or {MOST_STEPS:,} "
    "steps"
)
COUNTERLESS = "its loop carries no integer that grows by the same amount in each iteration"
ELSEWHERE = "it is in a function that the loop calls, or in another computation"
PAIRLESS = "its pairs are not understood"
_PERMUTE = "stablehlo.collective_permute"


@dataclass(frozen=True)
class DemandCounter:
    """A counter: carry `position` is `start + step * n` in iteration n, on all devices."""

    position: int
    start: int
    step: int


@dataclass(frozen=True)
class PermuteDemand:
    """The demand on one collective_permute in a loop.

    `pairs` are the op's. `needed[e]` are the iterations, counted from 0, in which pair e is needed,
    and `executed` those in which the op runs. If the demand is unknown, `reason` says why, and
    `needed` is empty.
    """

    op: ir.Operation
    loop: ir.Operation
    pairs: tuple[tuple[int, int], ...]
    trips: int = 0
    needed: tuple[Ranges, ...] = ()
    executed: Ranges = ()
    counter: DemandCounter | None = None
    reason: str = ""


def permute_demand(module: ir.Module, facts: ModuleFacts) -> list[PermuteDemand]:
    """Returns the demand on every collective_permute in a loop of the entry function.

    They are in program order. An op in a function that is called several times is listed once for
    each call. Permutes in async pairs are left out.
    """
    program = DemandProgram(module, entry_function(module), facts)
    records = {
        node: Record(node, loop, [])
        for node, loop in _permutes(program.root, None)
        if loop is not None
    }
    if not records:
        return []
    budget = StepBudget(MOST_STEPS, MOST_ITERATIONS)
    walked = walked_loops(program, program.root)
    knowledge = Knowledge(program, walked, budget)
    rules = StepRules(program, knowledge)
    for record in records.values():
        collective = program.communication(record.node)
        groups = facts.groups(collective) if collective is not None else None
        around = record.node.op.parent
        while around is not None and around.name in BRANCHES:
            around = around.parent
        if groups is None:
            record.reason = PAIRLESS
        elif around != record.loop.op:
            record.reason = ELSEWHERE
        else:
            record.targets = [target for _, target in groups]
    walk = Walk(program, rules, knowledge, budget, records)
    try:
        walk.run()
    except DemandTooLargeError:
        for record in records.values():
            record.reason = LONG
    return [_demand(r, walk.countings.get(r.loop)) for r in records.values()]


def ranges(iterations: Iterable[int]) -> Ranges:
    """Returns sorted iterations as ranges."""
    spans: list[tuple[int, int]] = []
    for n in iterations:
        if spans and spans[-1][1] == n - 1:
            spans[-1] = (spans[-1][0], n)
        else:
            spans.append((n, n))
    return tuple(spans)


def _permutes(code: Body, loop: Node | None) -> list[tuple[Node, Node | None]]:
    """Returns the permutes, with the innermost loop around each."""
    permutes: list[tuple[Node, Node | None]] = []
    for node in code.nodes:
        if node.name == _PERMUTE:
            permutes.append((node, loop))
        for region in node.bodies:
            permutes += _permutes(region, node if node.name == WHILE else loop)
    return permutes


def _demand(record: Record, counting: Mapping[int, list[int]] | None) -> PermuteDemand:
    op, loop = record.node.op, record.loop.op
    ids = integers(op, "source_target_pairs")
    pairs = tuple(zip(ids[::2], ids[1::2], strict=True))
    if record.reason:
        return PermuteDemand(op, loop, pairs, reason=record.reason)
    if record.needed is None or counting is None:
        # A branch around the loop is not taken, so no device needs the permute.
        return PermuteDemand(op, loop, pairs, needed=((),) * len(pairs))
    trips = len(record.needed)
    copies = len(record.targets) // max(len(pairs), 1)  # of each pair, in other replicas
    by_pair = record.needed.reshape(trips, len(pairs), copies).any(axis=2)
    needed = tuple(ranges(np.flatnonzero(column).tolist()) for column in by_pair.T)
    executed = ranges(np.flatnonzero(record.executed).tolist())
    counters: list[DemandCounter] = []
    for position, series in sorted(counting.items()):
        steps = {after - before for before, after in pairwise(series)}
        if len(steps) == 1 and steps != {0}:
            counters.append(DemandCounter(position, series[0], steps.pop()))
    # The first carry that counts iterations; a step of one is preferred.
    counter = min(counters, key=lambda counter: abs(counter.step) != 1, default=None)
    reason = COUNTERLESS if counter is None and trips > 1 else ""
    return PermuteDemand(op, loop, pairs, trips, needed, executed, counter, reason)
