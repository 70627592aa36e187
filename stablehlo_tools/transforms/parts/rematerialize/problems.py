"""Turns a passage into a choice: the cost to keep each value, and to run each op again.

Notes list the kept and the recomputed values, their places and costs, and the same policy in JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, duration, note, size, to_place
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with_any
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.rematerialize.passages import (
    BlockPassage,
    LoopPassage,
    ResidualPassage,
)
from stablehlo_tools.transforms.parts.rematerialize.recomputation_prices import RecomputationPrices
from stablehlo_tools.transforms.parts.rematerialize.residual_cut import (
    CutValue,
    KeepOrRepeat,
    RecomputationPlan,
    Repeatable,
)

_SMALL = 0.01  # share of the kept bytes, or of the repeated ns: smaller ones get no note
_WORK = ops_with_any(Trait.CONTRACTION | Trait.COLLECTIVE | Trait.REDUCTION | Trait.LOOP)


@dataclass(frozen=True)
class RecomputationProblem:
    """A passage and its choice.

    `numbers`: the numbers of the choice's values. `ops`: the ops that it can repeat.
    """

    passage: ResidualPassage
    choice: KeepOrRepeat
    numbers: Sequence[int]
    ops: Sequence[ir.Operation]

    def kept(self, plan: RecomputationPlan) -> list[int]:
        """Returns the numbers of the values that a plan keeps."""
        return [self.numbers[position] for position in sorted(plan.kept)]


def problem_of(
    passage: ResidualPassage, prices: RecomputationPrices, stride: int = 1
) -> RecomputationProblem:
    """Lists the values that can be kept for the backward and the ops that can be repeated, with
    costs.

    In a block, values that cross every `stride`-th waist of the forward are not recomputed.
    Otherwise all layers up to the border would be recomputed at once.
    """
    fixed: frozenset[int] = frozenset()
    if isinstance(passage, BlockPassage):
        fixed = fixed.union(*passage.waists[::-1][stride - 1 :: stride])
    choice, numbers, ops = KeepOrRepeat(), list[int](), list[ir.Operation]()
    positions: dict[int, int] = {}
    makers: dict[ir.Value, int] = {}

    def position_of(number: int) -> int:
        if number not in positions:
            positions[number] = len(numbers)
            numbers.append(number)
            pending.append(number)
            taken = prices.bytes(passage.values[number])
            if passage.same.root(number) == number and taken < inf:
                ns, maker = prices.traffic_ns(taken), passage.makers.get(number)
                if isinstance(passage, LoopPassage):
                    ns *= passage.trips  # a row in every iteration
                elif maker is not None and prices.is_fusible(maker):
                    ns /= 2
                else:  # results of separate kernels are in memory anyway, and so are arguments
                    ns = 0.0
                choice.values.append(CutValue(ns, taken * passage.trips, None))
            else:
                choice.values.append(CutValue(inf, 0.0, None))
        return positions[number]

    pending: list[int] = []
    choice.required = [position_of(number) for number in sorted(passage.required)]
    while pending:
        number = pending.pop()
        op = passage.makers.get(number)
        if op is None or number in fixed or not passage.can_repeat(op):
            continue
        if op.results[0] not in makers:
            makers[op.results[0]] = len(choice.ops)
            ops.append(op)
            read = [n for n in passage.numbers_read(op) if n in passage.values]
            reads = tuple(position_of(n) for n in read if n not in passage.given)
            choice.ops.append(Repeatable(prices.ns(op) * passage.trips, reads))
        value = choice.values[positions[number]]
        choice.values[positions[number]] = CutValue(
            value.keep_ns, value.keep_bytes, makers[op.results[0]]
        )
    return RecomputationProblem(passage, choice, numbers, ops)


def plan_notes(
    problem: RecomputationProblem, plan: RecomputationPlan, prices: RecomputationPrices
) -> list[Diagnostic]:
    """Returns notes on a plan that is about to be written.

    One summarizes it, and there is one for each kept value and each repeated op, except small ones.
    """
    passage, choice = problem.passage, problem.choice
    kept: list[int] = []
    for position in sorted(plan.kept):
        maker = producer(passage.values[problem.numbers[position]])
        if maker is None or maker.name != WHILE:  # a loop's own passage lists what it keeps
            kept.append(position)
    kept_bytes = sum(choice.values[position].keep_bytes for position in kept)
    repeated_ns = sum(choice.ops[number].ns for number in plan.repeated)
    each = f"of each of {passage.trips} layers" if isinstance(passage, LoopPassage) else ""
    if not kept and not plan.repeated:
        return []
    named = [problem.numbers[position] for position in kept]
    named = [n for n in named if passage.makers.get(n) is not None]
    place = passage.values[problem.numbers[choice.required[0]]].location
    if isinstance(passage, LoopPassage):
        place = passage.forward.loop.location
    notes = [
        note(
            f"rematerialize: keeps {size(kept_bytes)} for the backward and recomputes "
            f"{duration(repeated_ns)} of work; in jax: {_policy(passage.values[n] for n in named)}",
            place,
        )
    ]
    for position in sorted(kept, key=lambda n: (-choice.values[n].keep_bytes, n)):
        value = passage.values[problem.numbers[position]]
        if choice.values[position].keep_bytes > _SMALL * kept_bytes:
            what = f"{size(prices.bytes(value))} {each}".strip()
            notes.append(note(f"kept: {_name(value)}, {what}", value.location))
    for number in sorted(plan.repeated, key=lambda n: (-choice.ops[n].ns, n)):
        ns = choice.ops[number].ns
        op = problem.ops[number]
        if ns > _SMALL * repeated_ns and op.name in _WORK:
            what = f"{duration(ns / passage.trips)} {each}".strip()
            notes.append(note(f"recomputed: {_name(op.results[0])}, {what}", op.location))
    return notes


def _policy(values: Iterator[ir.Value]) -> str:
    """Returns the policy of jax.checkpoint that keeps the same values, besides a layer's
    arguments."""
    listed = list(values)
    if not listed:
        return "jax.checkpoint(layer), which keeps only the arguments of a layer"
    names: dict[str, None] = {}
    for value in listed:
        place = to_place(value.location)
        names[_name(value) + (f"_{place.line}" if place.file else "")] = None
    shown = ", ".join(f'"{name}"' for name in names)
    return (
        f"jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names({shown})), "
        "with jax.ad_checkpoint.checkpoint_name at each value whose note says kept"
    )


def _name(value: ir.Value) -> str:
    op = producer(value)
    return "an argument of a layer" if op is None else op.name.removeprefix("stablehlo.")
