"""The models are what they say: they export, hold the collectives they claim, and compute."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from counting import op_counts
from jax.export import Exported
from models import export_model
from models.large import UNROLLED_OPS_PER_LAYER, unrolled_step, wide_program
from models.llama import LlamaConfig, example_arguments, export_train_step, input_numbers
from models.zoo import LAYER_SCANS, MODELS, SMALL, ZOO, Model, programs

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.liveness import dead_collectives
from stablehlo_tools.artifacts import artifact


def losses(config: LlamaConfig, steps: int = 4) -> list[float]:
    state, tokens = example_arguments(config)
    step = jax.jit(export_train_step(config).call)
    seen: list[float] = []
    for _ in range(steps):
        state, loss = step(state, tokens)
        seen.append(float(loss))
    return seen


@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_as_declared(name: str):
    model = SMALL[name]
    exported = model.build()
    assert isinstance(exported, Exported)
    assert exported.nr_devices == model.devices
    module = artifact.from_exported(exported).module
    assert bool(find_collectives(module)) is model.collectives


@pytest.mark.parametrize("model", programs(dead=True), ids=lambda model: model.name)
def test_dead_collectives_are_seen(model: Model):
    exported = model.build()
    assert isinstance(exported, Exported)
    assert [c.kind for c in dead_collectives(artifact.from_exported(exported).module)] == [
        "collective_permute"
    ]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"scan_layers": True, "remat": True}, marks=pytest.mark.soak)]
)
def test_llama_learns_the_same_however_it_is_sharded(options: dict[str, Any]):
    sharded = losses(LlamaConfig(layers=1, **options))
    alone = losses(LlamaConfig(layers=1, fsdp=1, model=1, **options))
    np.testing.assert_allclose(sharded, alone, rtol=1e-4)
    assert sharded[-1] < sharded[0] - 0.5


def test_llama_exports_forward_and_backward_apart():
    config = LlamaConfig()
    exported = export_train_step(config)
    counts = op_counts(artifact.from_exported(exported).module)
    assert counts["sdy.manual_computation"] == 2
    weights = 7 * config.layers + 2
    assert counts["stablehlo.all_gather"] == counts["stablehlo.reduce_scatter"] == weights
    assert len(input_numbers(exported, "second")) == 9 * config.layers + 3


def test_the_unrolled_step_grows_by_67_ops_a_layer():
    few, many = (
        op_counts(artifact.from_exported(unrolled_step(layers)).module) for layers in (2, 5)
    )
    assert many.total() - few.total() == 3 * UNROLLED_OPS_PER_LAYER
    assert pytest.approx(27_000, rel=0.01) == 400 * UNROLLED_OPS_PER_LAYER


@pytest.mark.parametrize("collectives", [1, 4, 9])
def test_the_wide_program_has_that_many_collectives(collectives: int):
    module = artifact.parse(wide_program(collectives).encode()).module
    assert len(find_collectives(module)) == collectives


def test_export_model_writes_an_artifact_with_options(tmp_path: Path):
    path = tmp_path / "llama.jax_export"
    export_model.main(["llama", "--layers=1", "--scan-layers=true", "-o", str(path)])
    counts = op_counts(stablehlo_tools.load(path).module)
    assert counts["stablehlo.while"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama", "--layer=1"], "is no --option=value of llama; its options: layers,"),
        (["llama", "--layers=x"], "--layers takes int, not 'x'"),
        (["llama", "--remat=yes"], "--remat must be true or false, not 'yes'"),
        (["llama", "--optimizer=x"], "the optimizer is sgd or adamw, not 'x'"),
        (["wide", "--count=1"], "wide is MLIR text: use -o NAME.mlir"),
        (["none"], "invalid choice: 'none'"),
    ],
)
def test_export_model_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "model.jax_export"
    with pytest.raises(SystemExit) as ended:
        export_model.main([*words, "-o", str(path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_programs_are_selected_by_tags():
    found = programs(scan=True, training=True, layer_scan=False)
    assert [model.name for model in found] == ["decoder-2d-scan-step"]
    assert programs(scan=True, layer_scan=True) == list(LAYER_SCANS.values())
    every = len(MODELS) + len(LAYER_SCANS)
    assert len(programs(training=True)) + len(programs(training=False)) == every
    with pytest.raises(ValueError, match="no program has the tag scanned"):
        programs(scanned=True)


def test_models_have_unique_names():
    large = sum(model.large for model in MODELS.values())
    assert len(MODELS) == len(SMALL) + len(ZOO) + large
