"""1F1B of several stacks of layers in one loop over ticks."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from pipeline_checks import collectives_after_partition, loops
from soaking import first
from stacked_models import StackedModel

import stablehlo_tools
from stablehlo_tools.analysis.pipelines.pipeline_loops import find_pipelines
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.lockstep import Direction, training_lockstep

# An encoder that its decoder looks at; three stacks, of which the last link and the head look at
# the first; towers, whose outputs meet in the head.
MODELS = {
    "encoder-decoder": StackedModel(remat=True, layer_loss=True, update=True),
    "three": StackedModel(
        widths=(4, 4, 6),
        depths=(2, 3, 2),
        microbatches=3,
        links=("none", "none", "projection"),
        own=(True, False, True),
        across=(False, False, True),
        again=True,
        head_looks=True,
        link_loss=True,
    ),
    "towers": StackedModel(across=(False, False), towers=True, repeats=2),
}


def _pipelined(model: StackedModel, then: str = ",partition") -> export.Exported:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stablehlo_tools.transform(
            model.exported(), f"expand-pipeline{{{model.options}}}{then}"
        )


def _check(model: StackedModel) -> None:
    before = model.exported()
    assert_kept(Known.of(before, model.arguments()).compared(_pipelined(model)))


@pytest.mark.parametrize("name", first(1, MODELS))
def test_values_are_as_exact_as_before(name: str) -> None:
    _check(MODELS[name])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_values_of_models_at_random(seed: int) -> None:
    _check(StackedModel.drawn(seed))


def test_all_stacks_run_in_one_loop_over_ticks() -> None:
    after = _pipelined(StackedModel(), "")
    (ticks,) = loops(after)
    assert len(ticks.inner) == 4, "one for each stack and direction"


def test_values_of_one_type_share_a_permute() -> None:
    alike = StackedModel(widths=(4, 4), across=(False, False))
    sent = [each for each in collectives_after_partition(_pipelined(alike), "cse") if each.depth]
    assert Counter(each.kind for each in sent) == {"collective_permute": 2}
    # The encoder's output goes along with the decoder's activations, and its cotangent back.
    looked_at = StackedModel(widths=(4, 4))
    sent = [each for each in collectives_after_partition(_pipelined(looked_at)) if each.depth]
    assert Counter(each.kind for each in sent) == {"collective_permute": 4}


def test_explain_names_each_stack() -> None:
    model = StackedModel(depths=(4, 5))
    with pytest.warns(UserWarning, match="interleaved-1f1b") as said:
        stablehlo_tools.transform(model.exported(), f"expand-pipeline{{{model.options} explain}}")
    told = next(str(each.message) for each in said if "interleaved-1f1b" in str(each.message))
    assert "4 iterations on 2 ranks, 1 chunks of 2 on each and 5 iterations" in told
    assert "1 chunks of 2 to 3 on each" in told


def test_statistics_of_the_batch_between_stacks_are_refused() -> None:
    def loss(weights: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(h @ w), None

        hidden, _ = lax.scan(layer, x, weights["first"])
        hidden, _ = lax.scan(layer, hidden / jnp.square(hidden).sum(), weights["second"])
        return jnp.square(hidden).mean()

    mesh = AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    weights = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32, sharding=whole)
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=whole)
    step = export.export(jax.jit(jax.grad(loss)))({"first": weights, "second": weights}, batch)
    told = r"combines all samples of the batch, and the next loop over layers depends .*\(P7\)"
    with pytest.raises(ToolError, match=told):
        stablehlo_tools.transform(step, "expand-pipeline{microbatches=2 schedule=1f1b}")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_schedule_of_stacks_is_read_back(model: StackedModel) -> None:
    module = artifact.from_exported(_pipelined(model, "")).module
    (found,) = find_pipelines(module)
    stacks = len(model.widths)
    made = training_lockstep(model.stage, model.microbatches, stacks * model.repeats, False)
    assert [_work(each) for each in found.schedule.directions] == [
        _work(each) for each in made.directions
    ]
    assert sum(found.sizes) == sum(model.depths)
    assert [len(phase.layers) for phase in found.phases] == [stacks, stacks]
    assert found.skips


def _work(direction: Direction) -> list[list[tuple[int, int] | None]]:
    return [
        [None if cell is None else (cell.chunk, cell.microbatch) for cell in column]
        for column in direction.cells
    ]
