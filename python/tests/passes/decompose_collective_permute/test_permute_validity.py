"""Permutes that skip the transfers that no output depends on, and only those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import kept_values
import numpy as np
import pipeline_programs as programs
import pytest
import random_pipelines
from compile_targets import TARGETS
from jax.export import Exported

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.demand import PermuteDemand, needs, permute_demand, permutes
from stablehlo_tools.analysis.demand.knowledge import StepBudget
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target
from stablehlo_tools.transforms.parts.decompose_collective_permute.skipping import (
    MOST_FORMS,
    Strategy,
    ValidityPlan,
    describe,
    plan,
    write,
)

Array = np.ndarray[Any, Any]
STRATEGIES: list[Strategy] = ["edges", "edges", "edges", "edges", "whole"]
Windows = dict[tuple[int, int], list[tuple[int, int]]]


def some(default: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """All cases; those that are not among the default ones are for `make soak`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in every]
    kept = [case if isinstance(case, tuple) else (case,) for case in default]
    assert set(kept) <= set(cases)
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.soak) for case in cases]


def demands(program: Artifact) -> list[PermuteDemand]:
    with program.module.context:
        return permute_demand(program.module, ModuleFacts.from_module(program.module))


def windows(demand: PermuteDemand) -> Windows:
    assert not demand.reason
    return {p: list(n) for p, n in zip(demand.pairs, demand.needed, strict=True) if n}


def of(exported: Exported) -> list[Windows]:
    return [windows(demand) for demand in demands(artifact.from_exported(exported))]


def rewritten(
    program: Artifact, strategy: Strategy = "edges", most_forms: int = MOST_FORMS
) -> tuple[Artifact, int]:
    """The program with its plans written, and how many transfers are skipped."""
    result = program.copy()
    skipped = 0
    for demand in demands(result):
        chosen = plan(demand, strategy, most_forms)
        if not isinstance(chosen, str):
            assert chosen.needed <= chosen.after < chosen.before
            skipped += chosen.before - chosen.after
            write_plan(result, chosen)
    result.module.operation.verify()
    return result, skipped


def write_plan(program: Artifact, chosen: ValidityPlan) -> None:
    with program.module.context:
        write(chosen)


def arguments(exported: Exported, seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(a.shape).astype(a.dtype) for a in exported.in_avals]


def values(exported: Exported, given: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in kept_values.run(exported, given)]


def check(exported: Exported, strategy: Strategy = "edges", most: int = MOST_FORMS) -> int:
    """That the values stay in every bit; how many transfers are skipped."""
    after, skipped = rewritten(artifact.from_exported(exported), strategy, most)
    given = arguments(exported)
    assert values(exported, given) == values(after.to_exported(), given)
    return skipped


def chain(stages: int, first: int, length: int) -> Windows:
    """Edge s>s+1 in `length` iterations from `first + s` on."""
    return {(s, s + 1): [(first + s, first + s + length - 1)] for s in range(stages - 1)}


PIPELINES = [(s, m, o) for s, m in ((2, 1), (4, 8), (8, 3)) for o in ("psum", "shards")]


@pytest.mark.parametrize(
    ("stages", "microbatches", "output"), some([(2, 1, "shards"), (8, 3, "psum")], PIPELINES)
)
def test_windows_of_a_pipeline(stages: int, microbatches: int, output: str) -> None:
    exported = programs.forward(stages, microbatches, output=output)
    assert of(exported) == [chain(stages, 0, microbatches)]
    assert check(exported) > 0


def test_windows_beside_a_free_axis() -> None:
    """Pairs count devices of the whole mesh, two of which share a stage."""
    exported = programs.forward(4, 5, data=2)
    (found,) = of(exported)
    expected = {
        (2 * s + data, 2 * s + 2 + data): [(s, s + 4)] for s in range(3) for data in range(2)
    }
    assert found == expected
    assert check(exported) == 18


@pytest.mark.parametrize("trips", some([0, 6], range(10)))
def test_trip_counts(trips: int) -> None:
    """The last four iterations of the last stage are put out; garbage is NaN."""
    stages, kept = 3, 4
    exported = programs.forward(stages, kept, trips)
    first = max(trips - kept, 0)
    expected: Windows = {}
    for source in range(stages - 1):
        delay = stages - 1 - source
        window = (max(first - delay, 0), trips - 1 - delay)
        if window[1] >= window[0]:
            expected[source, source + 1] = [window]
    found = of(exported)
    assert found == ([expected] if found else [])
    assert found or not trips
    check(exported)
    check(exported, "whole")


def test_forms_are_joined() -> None:
    """Fewer permutes skip less; 9 transfers of 24 are not needed."""
    exported = programs.forward(4, 5)
    program = artifact.from_exported(exported)
    assert [rewritten(program, "edges", most)[1] for most in (1, 2, 4, 100)] == [0, 4, 7, 9]
    assert check(exported, most=4) == 7


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "early"),
    some(
        [(4, 5, 2, True)],
        [(4, 4, 1, False), (4, 5, 1, False), (4, 4, 2, False), (4, 5, 2, False), (4, 5, 2, True)],
    ),
)
def test_windows_of_a_circular_pipeline(
    stages: int, microbatches: int, repeats: int, early: bool
) -> None:
    exported = programs.circular(stages, microbatches, repeats, early=early)
    expected = chain(stages, 1, microbatches * repeats)
    if repeats > 1:
        expected[stages - 1, 0] = [(microbatches, microbatches * repeats - 1)]
    assert of(exported) == [expected]
    assert check(exported) > 0


@pytest.mark.parametrize("form", some(["masked"], ["masked", "guarded"]))
def test_windows_of_a_training_step(form: str) -> None:
    """Backwards an edge moves zeros where the stage it comes from did nothing."""
    stages, microbatches = 4, 6
    exported = programs.training(stages, microbatches, form)
    back: Windows = {}
    for source in range(1, stages):
        first = stages - source
        back[source, source - 1] = [(first, first + microbatches - 1)]
    assert of(exported) == [chain(stages, 0, microbatches), back]
    assert check(exported) > 0


def test_garbage_times_zero_is_needed() -> None:
    """A gradient of zeros times NaN is NaN: so unmasked stages need all they work on."""
    forward, _ = of(programs.training(4, 6))
    assert forward == {(s, s + 1): [(0, 7)] for s in range(3)}
    masked = of(programs.forward(4, 6, output="product"))[0]
    assert masked == {(s, s + 1): [(s, 7)] for s in range(3)}


def test_garbage_that_is_put_out_is_needed() -> None:
    assert of(programs.forward(4, 6, output="buffers")) == [
        {(s, s + 1): [(0, 7)] for s in range(3)}
    ]


def test_a_choice_by_data_is_either() -> None:
    assert of(programs.chosen_by_data(4, 6)) == [{(s, s + 1): [(0, 7)] for s in range(3)}]


def test_ring_attention_needs_all_but_the_last() -> None:
    exported = programs.ring_attention(4)
    assert of(exported) == [{pair: [(0, 2)] for pair in programs.ring(4)}]
    assert check(exported) == 4
    assert check(exported, "whole") == 4


def test_an_unknown_number_of_iterations() -> None:
    program = artifact.from_exported(programs.until_small(4))
    (demand,) = demands(program)
    assert demand.reason == needs.UNKNOWN
    assert plan(demand) == needs.UNKNOWN


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutes, "MOST_STEPS", 100)
    (demand,) = demands(artifact.from_exported(programs.forward(4, 8)))
    assert demand.reason == permutes.LONG


def looping(step: int, trips: int = 100_000) -> str:
    """A loop with a permute in it, of so many iterations; for ever where the step is 0."""
    return f"""func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %end:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
      cond {{
        %n = stablehlo.constant dense<{trips}> : tensor<i32>
        %on = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %on : tensor<i1>
      }} do {{
        %p = "stablehlo.collective_permute"(%a) {{
          source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>,
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
        }} : (tensor<4xf32>) -> tensor<4xf32>
        %step = stablehlo.constant dense<{step}> : tensor<i32>
        %next = stablehlo.add %i, %step : tensor<i32>
        stablehlo.return %next, %p : tensor<i32>, tensor<4xf32>
      }}
      return %end#1 : tensor<4xf32>
    }}"""


def followed(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[PermuteDemand, int]:
    """The demand on the one permute of a text, and how many iterations were followed for it."""
    budgets: list[StepBudget] = []

    def budget(steps: int, iterations: int) -> StepBudget:
        budgets.append(StepBudget(steps, iterations))
        return budgets[-1]

    monkeypatch.setattr(permutes, "StepBudget", budget)
    (demand,) = demands(artifact.parse(text.encode(), "looping"))
    return demand, permutes.MOST_ITERATIONS - budgets[0].iterations


def test_a_loop_that_never_ends_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    demand, iterations = followed(looping(0), monkeypatch)
    assert demand.reason == needs.ENDLESS
    assert iterations <= 1


def test_a_long_loop_is_followed_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutes, "MOST_ITERATIONS", 100)
    demand, iterations = followed(looping(1), monkeypatch)
    assert demand.reason == permutes.LONG
    assert iterations == 101
    demand, iterations = followed(looping(1, trips=100), monkeypatch)
    assert not demand.reason
    assert iterations == 100


def test_a_budget_of_iterations_bounds_any_loop() -> None:
    assert permutes.MOST_ITERATIONS <= 10_000


@cache
def pipeline() -> Exported:
    return programs.circular(4, 5, 2)


def shrunk() -> list[tuple[int, str]]:
    return [(edge, end) for edge in range(4) for end in ("first", "last")]


@pytest.mark.parametrize(("edge", "end"), some([(0, "first"), (3, "last")], shrunk()))
def test_a_smaller_window_changes_values(edge: int, end: str) -> None:
    """What is said to be needed is: the windows are as small as can be."""
    program = artifact.from_exported(pipeline())
    (demand,) = demands(program)
    ((first, last),) = demand.needed[edge]
    smaller = (first + 1, last) if end == "first" else (first, last - 1)
    needed = [*demand.needed[:edge], (smaller,), *demand.needed[edge + 1 :]]
    chosen = plan(replace(demand, needed=tuple(needed)), most_forms=100)
    assert not isinstance(chosen, str)
    write_plan(program, chosen)
    given = arguments(pipeline())
    assert values(pipeline(), given) != values(program.to_exported(), given)


def test_idempotent() -> None:
    for strategy in ("edges", "whole"):
        once, _ = rewritten(artifact.from_exported(programs.forward(6, 4)), strategy, 3)
        twice, skipped = rewritten(once, strategy, 3)
        assert not skipped
        assert artifact.to_text(once.module) == artifact.to_text(twice.module)


def test_description() -> None:
    program = artifact.from_exported(programs.circular(4, 4, 1))
    (demand,) = demands(program)
    chosen = plan(demand)
    assert not isinstance(chosen, str)
    assert describe(chosen) == (
        "edge 0>1 is needed in iterations 1 to 4 of 7; edge 1>2 is needed in iterations 2 to 5 "
        "of 7; edge 2>3 is needed in iterations 3 to 6 of 7; edge 3>0 is never needed; 16 of 28 "
        "transfers are skipped"
    )
    assert (chosen.before, chosen.needed, chosen.after) == (28, 12, 12)


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("strategy", ["edges", "whole"])
def test_compiles(target: Target, strategy: Strategy, tmp_path: Path) -> None:
    """The permutes stay in branches, in the order of the program."""
    after, _ = rewritten(artifact.from_exported(programs.forward(4, 8)), strategy)
    path = tmp_path / "pipeline.mlir"
    path.write_text(artifact.to_text(after.module))
    assert main(["check-order", str(path)]) == 0
    compiled = compile_artifact(after, target)
    assert compiled.order.same_order
    assert len(compiled.program_ids) == len(find_collectives(after.module))


def run(program: Artifact, given: list[list[Any]], replicas: int) -> list[bytes]:
    devices = jax.devices()[: random_pipelines.DEVICES]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module),
        replicas,
        len(devices) // replicas,
        devices,
        partitioned=False,
    )
    return [part.tobytes() for part in bindings.run_on_devices(executable, given, devices)[0]]


def skipped_in(seed: int, strategy: Strategy) -> int:
    """How many transfers a random loop can do without, its values staying as they were."""
    text = random_pipelines.random_loop(seed)
    before = artifact.parse(text.encode())
    after, skipped = rewritten(before, strategy, 2 + seed % 7)
    if skipped:
        random = np.random.default_rng(seed)
        shapes = ((2,), (random_pipelines.ROWS, 2))
        given = [
            [random.standard_normal(shape).astype(np.float32) for _ in range(4)] for shape in shapes
        ]
        replicas = random_pipelines.replicas_of(seed)
        assert run(before, given, replicas) == run(after, given, replicas), text
    return skipped


@pytest.mark.parametrize("first", some([0], range(0, 60, 10)))
def test_random_loops(first: int) -> None:
    found = [skipped_in(seed, STRATEGIES[seed % 5]) for seed in range(first, first + 10)]
    assert sum(map(bool, found)) > 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_random_loops_soak(seed: int) -> None:
    skipped_in(seed, STRATEGIES[seed % 5])
