"""The planners of pipeline-collectives by themselves: moves, stages, groups, and the choice."""

from __future__ import annotations

import pytest
from sink_programs import parsed

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import is_the_same
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    loops_of,
    survey_loop,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.shift_choice import (
    MotionBudget,
    Prediction,
    best_choice,
    possible,
    prefetch_groups,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.stages import (
    StageChoice,
    Stages,
    stages_for,
    waiting_values,
)

KEPT: list[Artifact] = []  # modules whose loops tests hold
STACK, SHARD = "tensor<6x4x8xf32>", "tensor<4x8xf32>"
WEIGHT, X, I32 = "tensor<8x8xf32>", "tensor<2x8xf32>", "tensor<i32>"
GROUPS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"


def gathered(name: str, of: str) -> str:
    """A weight of this layer: a row of a stack, gathered."""
    return f"""
        %{name}s = stablehlo.dynamic_slice {of}, %i, %z, %z, sizes = [1, 4, 8]
          : ({STACK}, {I32}, {I32}, {I32}) -> tensor<1x4x8xf32>
        %{name}r = stablehlo.reshape %{name}s : (tensor<1x4x8xf32>) -> {SHARD}
        %{name} = "stablehlo.all_gather"(%{name}r) <{{all_gather_dim = 0 : i64, {GROUPS}}}>
          : ({SHARD}) -> {WEIGHT}"""


def dot(name: str, one: str, other: str) -> str:
    """A product of activations and a weight."""
    return f"""
        %{name} = stablehlo.dot_general {one}, {other}, contracting_dims = [1] x [0]
          : ({X}, {WEIGHT}) -> {X}"""


QUERY_AND_KEY = (
    gathered("q", "%w")
    + gathered("k", "%v")
    + dot("a", "%x", "%q")
    + dot("b", "%x", "%k")
    + f"\n        %y = stablehlo.add %a, %b : {X}"
)
ONE_AFTER_THE_OTHER = (
    gathered("q", "%w") + dot("a", "%x", "%q") + gathered("k", "%v") + dot("y", "%a", "%k")
)
OF_ACTIVATIONS = dot("a", "%x", "%m") + (
    f"""
        %s = "stablehlo.all_reduce"(%a) <{{{GROUPS}}}> ({{
        ^bb0(%l: tensor<f32>, %r: tensor<f32>):
          %t = stablehlo.add %l, %r : tensor<f32>
          stablehlo.return %t : tensor<f32>
        }}) : ({X}) -> {X}
        %y = stablehlo.tanh %s : {X}"""
)


def surveyed(body: str, trips: str = "%six") -> LoopSurvey:
    """A loop over layers of two stacks of weights, read."""
    types = f"{I32}, {STACK}, {STACK}, {WEIGHT}, {X}"
    program = parsed(
        f"""
    module attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32}} {{
    func.func @main(%w0: {STACK}, %v0: {STACK}, %m0: {WEIGHT}, %x0: {X}, %n: {I32}) -> {X} {{
      %z = stablehlo.constant dense<0> : {I32}
      %one = stablehlo.constant dense<1> : {I32}
      %six = stablehlo.constant dense<6> : {I32}
      %r:5 = stablehlo.while(%i = %z, %w = %w0, %v = %v0, %m = %m0, %x = %x0) : {types}
      cond {{
        %c = stablehlo.compare LT, %i, {trips} : ({I32}, {I32}) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      }} do {{{body}
        %next = stablehlo.add %i, %one : {I32}
        stablehlo.return %next, %w, %v, %m, %y : {types}
      }}
      return %r#4 : {X}
    }} }}"""
    )
    KEPT.append(program)
    with program.module.context:
        return survey_loop(
            loops_of(program.module)[0], program.module, ModuleFacts.from_module(program.module)
        )


def test_a_gather_of_weights_goes_ahead_with_no_op_but_itself():
    loop = surveyed(QUERY_AND_KEY)
    assert (loop.trips, loop.fewest, loop.reason) == (6, 6, "")
    assert [[op.name for op in move.ops] for move in loop.ahead] == [["stablehlo.all_gather"]] * 2
    assert possible(loop) == StageChoice(frozenset({0, 1}))


def test_what_follows_from_the_iteration_before_stays():
    loop = surveyed(OF_ACTIVATIONS)
    assert "follows from carry 4" in loop.ahead[0].reason
    assert not possible(loop)


def test_nothing_moves_where_it_is_not_known_how_often_the_loop_runs():
    loop = surveyed(QUERY_AND_KEY, trips="%n")
    assert (loop.trips, loop.fewest) == (None, 0)
    assert {move.reason for move in loop.ahead} == {loop.reason}


def test_the_same_each_time_is_what_reads_no_counter():
    same = gathered("q", "%w").replace("%w, %i", "%w, %z") + dot("y", "%x", "%q")
    loop = surveyed(same)
    assert is_the_same(loop.body, loop.ahead[0].ops)
    loop = surveyed(gathered("q", "%w") + dot("y", "%x", "%q"))
    assert not is_the_same(loop.body, loop.ahead[0].ops)


@pytest.mark.parametrize("distance", [1, 2])
def test_a_stage_is_how_many_iterations_late_an_op_runs(distance: int):
    loop = surveyed(ONE_AFTER_THE_OTHER)
    stages = stages_for(loop, StageChoice(frozenset({0})), distance)
    assert isinstance(stages, Stages)
    first, second = (collective.op for collective in loop.collectives)
    assert (stages.stage_of(first), stages.stage_of(second)) == (0, distance)
    assert stages.depth == distance
    assert [(w.value, w.age) for w in waiting_values(loop.body, stages)] == [
        (first.results[0], age) for age in range(1, distance + 1)
    ]


def test_a_loop_has_to_run_more_often_than_iterations_are_in_flight():
    refusal = stages_for(surveyed(ONE_AFTER_THE_OTHER), StageChoice(frozenset({0})), 6)
    assert refusal == "the loop runs 6 times, but must run more than 6 times"


def test_gathers_that_are_multiplied_with_the_same_go_ahead_together():
    assert prefetch_groups(surveyed(QUERY_AND_KEY)) == [frozenset({0, 1})]
    assert prefetch_groups(surveyed(ONE_AFTER_THE_OTHER)) == [frozenset({0}), frozenset({1})]


GAINS = {
    frozenset[int](): (1000.0, 100.0),
    frozenset({0}): (900.0, 150.0),
    frozenset({0, 1}): (700.0, 220.0),
}


def judged(choice: StageChoice) -> Prediction | None:
    """More ahead is faster, and takes more memory."""
    if choice.late:
        return None
    ns, peak = GAINS[choice.ahead]
    return Prediction(ns, peak, holds=True)


@pytest.mark.parametrize(
    ("limit", "ahead"), [(500.0, {0, 1}), (200.0, {0}), (120.0, set[int]()), (50.0, set[int]())]
)
def test_the_fastest_choice_within_memory_is_taken(limit: float, ahead: set[int]):
    loop = surveyed(ONE_AFTER_THE_OTHER)
    assert best_choice(loop, judged, MotionBudget(limit, 1, is_held=False)) == StageChoice(
        frozenset(ahead)
    )


def test_fences_hold_all_that_fits_before_a_part_is_tried():
    tried: list[StageChoice] = []

    def judge(choice: StageChoice) -> Prediction | None:
        tried.append(choice)
        return judged(choice)

    loop = surveyed(ONE_AFTER_THE_OTHER)
    best = best_choice(loop, judge, MotionBudget(500.0, 1, is_held=True))
    assert best == StageChoice(frozenset({0, 1}))
    assert StageChoice(frozenset({0})) not in tried


def test_what_saves_next_to_nothing_is_left():
    loop = surveyed(ONE_AFTER_THE_OTHER)
    slow = {ahead: Prediction(1000.0 - len(ahead) / 2, 1.0, holds=True) for ahead in GAINS}
    best = best_choice(
        loop,
        lambda choice: None if choice.late else slow.get(choice.ahead),
        MotionBudget(None, 1, is_held=False),
    )
    assert best == StageChoice()
