"""Verdicts on pairs of programs that differ in the ops around a collective, against a reading of
the compiled text that is not the tool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from collective_surroundings import Surrounding, exported, listed_collectives, surroundings
from compile_targets import TARGETS
from order_cases import all_reduce, main, read
from workers.run import State, run_workers

from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.job_schedules import decide_order, decide_without_compilers

PAIRS = 100
OPTIONS = JobOptions()
CPU, GPU, TPU = TARGETS


def pair(*surrounded: Surrounding, threaded: bool) -> tuple[Artifact, Artifact]:
    """One program of all surroundings, and one of the plain ones."""
    made = surrounded, tuple(each.plain for each in surrounded)
    one, other = (artifact.from_exported(exported(*each), f"p{i}") for i, each in enumerate(made))
    if threaded:
        run_pipeline(one, Pipeline.parse("thread-tokens"))
        run_pipeline(other, Pipeline.parse("thread-tokens"))
    return one, other


def compiled_lists(programs: Sequence[Artifact], target: Target) -> list[list[str]]:
    return [listed_collectives(compile_artifact(each, target).text) for each in programs]


def is_claimed(made: Surrounding) -> bool:
    """Whether the threaded pair is called ordered without a compiler."""
    try:
        programs = pair(made, threaded=True)
    except ToolError:  # no token can be threaded
        return False
    return decide_without_compilers(programs, OPTIONS).verdict is Verdict.ORDERED


def claimed(seed: int, count: int) -> list[Surrounding]:
    """So many surroundings whose threaded pairs are called ordered without a compiler."""
    return list(islice(filter(is_claimed, surroundings(seed)), count))


def assert_claims_hold(chosen: Sequence[Surrounding], target: Target) -> None:
    """All pairs at once, as one pair of programs; names those that are exchanged otherwise."""
    one, other = compiled_lists(pair(*chosen, threaded=True), target)
    if one == other:
        return
    if len(chosen) == 1:
        pytest.fail(f"{chosen[0]}: {one} and {other}")
    middle = len(chosen) // 2
    assert_claims_hold(chosen[:middle], target)
    assert_claims_hold(chosen[middle:], target)
    pytest.fail(f"only together: {chosen}")


@pytest.mark.parametrize(
    ("target", "seed", "count"),
    [
        pytest.param(*TPU.values, 1, 12, id="tpu", marks=TPU.marks),
        *(
            pytest.param(
                *each.values, 2, PAIRS, id=f"{each.id}-many", marks=[*each.marks, pytest.mark.soak]
            )
            for each in TARGETS
        ),
    ],
)
def test_what_is_claimed_without_a_compiler_holds(target: Target, seed: int, count: int) -> None:
    assert_claims_hold(claimed(seed, count), target)


@pytest.mark.parametrize(
    ("target", "made"),
    [
        pytest.param(
            TPU.values[0], Surrounding(kind, result=result), marks=TPU.marks, id=f"{kind}-{result}"
        )
        for kind, result in (
            ("all_gather", "cast"),
            ("all_to_all", "cast"),
            ("all_gather", "dot one-hot"),
        )
    ],
)
def test_a_type_that_no_output_needs_is_exchanged_as_another(
    target: Target, made: Surrounding
) -> None:
    """XLA:TPU exchanges bf16, through barriers, if only a conversion or a product reads it."""
    one, other = compiled_lists(pair(made, threaded=True), target)
    assert ("bf16[" in one[0], "f32[" in other[0]) == (True, True)
    assert not is_claimed(made)


SAME = """%ones = stablehlo.constant dense<1.0> : tensor<4xf32>
    %i = stablehlo.constant dense<0> : tensor<i32>
    %v = "stablehlo.case"(%i) ({ stablehlo.return %ones : tensor<4xf32> },
        { stablehlo.return %ones : tensor<4xf32> }) : (tensor<i32>) -> tensor<4xf32>"""


@pytest.mark.parametrize(
    "target", [pytest.param(*GPU.values, marks=[*GPU.marks, pytest.mark.soak]), TPU]
)
def test_a_sum_of_what_all_replicas_have_is_not_exchanged(target: Target) -> None:
    """A branch hides the constant from the text, but not from the compiler."""
    texts = [
        main(
            f"{SAME}\n{all_reduce('%r', value)}\nreturn %r : tensor<4xf32>",
            arguments="%x: tensor<4xf32>",
            results="tensor<4xf32>",
        )
        for value in ("%v", "%x")
    ]
    programs = read(*texts)
    for program in programs:
        run_pipeline(program, Pipeline.parse("thread-tokens"))
    one, other = compiled_lists(programs, target)
    assert (len(one), len(other)) == (0, 1)
    assert decide_without_compilers(programs, OPTIONS).verdict is not Verdict.ORDERED


@pytest.mark.soak
@pytest.mark.parametrize("threaded", [False, True], ids=["bare", "threaded"])
@pytest.mark.parametrize(
    ("target", "made"),
    [
        pytest.param(*each.values, made, id=f"{each.id}-{number}", marks=each.marks)
        for number, made in enumerate(islice(surroundings(3), PAIRS))
        for each in [TARGETS[number % len(TARGETS)]]
    ],
)
def test_what_is_said_of_schedules_holds(target: Target, made: Surrounding, threaded: bool) -> None:
    try:
        programs = pair(made, threaded=threaded)
        without = decide_without_compilers(programs, OPTIONS)
        order = decide_order(programs, OPTIONS, [target])
    except ToolError as error:
        pytest.skip(error.diagnostic.message)
    assert threaded or without.verdict is not Verdict.ORDERED
    one, other = compiled_lists(programs, target)
    assert other
    if order.holds:
        assert one == other


@pytest.mark.soak
@pytest.mark.parametrize(
    "made",
    list(islice((m for m in surroundings(4) if m.dtype != "bfloat16"), PAIRS)),  # as NumPy saves
    ids=str,
)
def test_processes_end_if_the_schedules_are_ordered(made: Surrounding, tmp_path: Path) -> None:
    """Two processes, each with a program of the pair, whose collectives gloo carries."""
    order = decide_order(pair(made, threaded=False), OPTIONS, [Target.CPU])
    if not order.holds:
        pytest.skip("not ordered, so it may end or not")
    paths = [tmp_path / f"{number}.jax_export" for number in range(2)]
    for path, each in zip(paths, (made, made.plain), strict=True):
        path.write_bytes(exported(each).serialize())
    arguments = [np.ones(aval.shape, aval.dtype) for aval in exported(made).in_avals]
    workers = run_workers(paths, [arguments, arguments])
    assert [worker.state for worker in workers] == [State.FINISHED] * 2


def test_the_reading_follows_loops_and_asynchronous_pairs() -> None:
    text = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0:T(256)} get-tuple-element(%p), index=1
  %r = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %r)
}

ENTRY %main (a: f32[4]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %w = (s32[], f32[4]{0}) while(%t), condition=%go, body=%body, CONFIG
  %s = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  ROOT %d = f32[8]{0} all-gather-done(%s)
}
"""
    summed = "all-reduce f32[4] replica_groups={{0,1}}"
    gathered = "all-gather f32[4] replica_groups={{0,1}} dimensions={0}"
    text = text.replace("CONFIG", 'backend_config={"known_trip_count":{"n":"2"}}')
    text += "\n%add (b: f32[]) -> f32[] {\n}\n%go (b: f32[]) -> pred[] {\n}\n"
    assert listed_collectives(text) == [summed, summed, gathered]
