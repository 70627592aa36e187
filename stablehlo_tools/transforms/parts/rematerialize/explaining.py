"""What is kept and what is computed again, where, at what price, and how jax says so."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, duration, note, size, to_place
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with_any
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.rematerialize.cheapest_cut import Plan
from stablehlo_tools.transforms.parts.rematerialize.passages import LoopPassage
from stablehlo_tools.transforms.parts.rematerialize.prices import Prices
from stablehlo_tools.transforms.parts.rematerialize.problems import Problem

_SMALL = 0.01  # of what is kept, or of the time that is repeated: too little to be named
_WORK = ops_with_any(Trait.CONTRACTION | Trait.COLLECTIVE | Trait.REDUCTION | Trait.LOOP)


def explained(problem: Problem, plan: Plan, prices: Prices) -> list[Diagnostic]:
    """Notes on a plan that is about to be written: one on all of it, one for each value that is
    kept and each op that runs again, but for small ones."""
    passage, choice = problem.passage, problem.choice
    kept = [n for n in sorted(plan.kept) if not _is_loop(passage.values[problem.numbers[n]])]
    kept_bytes = sum(choice.values[position].keep_bytes for position in kept)
    repeated_ns = sum(choice.ops[number].ns for number in plan.repeated)
    each = f"of each of {passage.trips} layers" if isinstance(passage, LoopPassage) else ""
    if not kept and not plan.repeated:
        return []
    named = [problem.numbers[position] for position in kept]
    named = [n for n in named if passage.makers.get(n) is not None]
    place = passage.values[problem.numbers[choice.required[0]]].location
    if isinstance(passage, LoopPassage):
        place = passage.place
    notes = [
        note(
            f"rematerialize: keeps {size(kept_bytes)} for the backward and computes again what "
            f"takes {duration(repeated_ns)}; in jax: {_policy(passage.values[n] for n in named)}",
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
            notes.append(note(f"again: {_name(op.results[0])}, {what}", op.location))
    return notes


def _is_loop(value: ir.Value) -> bool:
    """Whether a value is of a loop, whose own passage says what it keeps."""
    op = producer(value)
    return op is not None and op.name == WHILE


def _policy(values: Iterator[ir.Value]) -> str:
    """The policy of jax.checkpoint that keeps the same, beside what a layer is given."""
    listed = list(values)
    if not listed:
        return "jax.checkpoint(layer), which keeps nothing but what a layer is given"
    names = list(dict.fromkeys(_checkpoint_name(value) for value in listed))
    shown = ", ".join(f'"{name}"' for name in names)
    return (
        f"jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names({shown})), "
        "each by jax.ad_checkpoint.checkpoint_name where a note says kept"
    )


def _checkpoint_name(value: ir.Value) -> str:
    place = to_place(value.location)
    line = f"_{place.line}" if place.file else ""
    return f"{_name(value)}{line}"


def _name(value: ir.Value) -> str:
    op = producer(value)
    return "what a layer is given" if op is None else op.name.removeprefix("stablehlo.")
