"""The programs of the zoo are what they say: they export, are sharded as declared, and learn."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from counting import op_counts
from jax import export
from models import devices, export_model
from models.zoo import MODELS, ZOO, Model

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact

# Ways to write or to divide a step that others here are one of; they take long to trace.
LONG = (
    "decoder-fsdp-step",
    "decoder-tp-step",
    "decoder-2d-remat-step",
    "convnet-channels-step",
    "mamba-associative-step",
)
each_model = pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=pytest.mark.soak if name in LONG else ())
        for name, model in ZOO.items()
    ],
)


@cache
def built(program: Model, **options: Any) -> export.Exported:
    exported = program.build(**options)
    assert isinstance(exported, export.Exported)
    return exported


def results(program: Model, steps: int = 1, **options: Any) -> list[Any]:
    """What some calls in a row give, on one batch, by the artifact as it is loaded again.

    A step's results are its metrics, and its state goes into the next one.
    """
    assert program.config is not None
    exported = export.deserialize(built(program, **options).serialize())
    mesh = devices.mesh(**dict(replace(program.config, **options).mesh.shape))
    arguments = program.arguments(**options)
    shardings = jax.tree.unflatten(jax.tree.structure(arguments), exported.in_shardings_jax(mesh))
    state, batch = jax.device_put(arguments, shardings)
    call = jax.jit(exported.call)
    seen: list[Any] = []
    for _ in range(steps):
        result = call(state, batch)
        if program.training:
            state, result = result
        seen.append(jax.tree.map(np.asarray, result))
    return seen


def losses(seen: list[Any]) -> list[list[float]]:
    return [[float(metrics[name]) for name in ("loss", "gradient_norm")] for metrics in seen]


@each_model
def test_zoo_models_are_as_declared(model: Model):
    exported = built(model)
    assert exported.nr_devices == model.devices == devices.DEVICES
    module = artifact.from_exported(exported).module
    found = {collective.kind for collective in find_collectives(module)}
    counts = op_counts(module)
    if model.partitioned_by == "shard_map":
        assert model.collectives
        assert {"all_to_all", "all_gather"} <= found
        assert counts["sdy.manual_computation"] == (2 if model.training else 1)
    else:
        assert not model.collectives
        assert not found
        assert counts["sdy.manual_computation"] == 0
        assert counts["sdy.sharding_constraint"] > 0


@each_model
def test_arguments_fit_the_program(model: Model):
    exported = built(model)
    arguments = model.arguments(seed=1)
    leaves: list[Any] = jax.tree.leaves(arguments)
    assert jax.tree.structure((arguments, {})) == exported.in_tree
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
        (aval.shape, aval.dtype) for aval in exported.in_avals
    ]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    jax.tree.map(np.testing.assert_array_equal, arguments, model.arguments(seed=1))
    others: list[Any] = jax.tree.leaves(model.arguments(seed=2))
    assert any((a != b).any() for a, b in zip(leaves, others, strict=True))


def test_arguments_stay_in_their_ranges():
    _, batch = ZOO["encoder-decoder-step"].arguments()
    tokens = np.concatenate([batch["source"].ravel(), batch["target"].ravel()])
    assert tokens.min() == 0
    assert 64 < tokens.max() < 96
    state, _ = ZOO["convnet-step"].arguments()
    assert state["statistics"]["stem_norm"]["variance"].min() > 0
    state, _ = ZOO["nnx-llama-step"].arguments()
    moments = state["optimizer"]["opt_state"]["1"]["0"]
    assert all(leaf.min() > 0 for leaf in jax.tree.leaves(moments["nu"]))
    assert moments["count"] == 10


@pytest.mark.parametrize(
    ("name", "fall"),
    [
        pytest.param("vit-step", 0.3, marks=pytest.mark.soak),
        pytest.param("convnet-step", 0.3, marks=pytest.mark.soak),
        pytest.param("mamba-scan-step", 0.015, marks=pytest.mark.soak),
        pytest.param("encoder-decoder-step", 0.3, marks=pytest.mark.soak),
        ("nnx-llama-step", 0.3),
    ],
)
def test_training_steps_learn(name: str, fall: float):
    fewer: dict[str, Any] = {} if name == "convnet-step" else {"layers": 1}
    seen = losses(results(ZOO[name], steps=6, **fewer))
    assert seen[-1][0] < seen[0][0] - fall
    assert all(norm > 0 for _, norm in seen)


@pytest.mark.parametrize(
    ("names", "mesh"),
    [
        (("decoder-tp-forward", "decoder-tp-forward"), {"fsdp": 1, "model": 1}),
        (("moe-forward", "moe-shard-map-forward"), {}),
    ],
    ids=["one_device", "shard_map"],
)
def test_forward_passes_compute_the_same(names: tuple[str, str], mesh: dict[str, int]):
    """What the learning of the soak tests needs, without the training steps."""
    one, other = names
    np.testing.assert_allclose(
        results(ZOO[one], layers=1)[0],
        results(ZOO[other], layers=1, **mesh)[0],
        rtol=1e-3,
        atol=1e-5,
    )


@pytest.mark.soak
def test_the_decoder_learns_the_same_on_one_device():
    model = ZOO["decoder-2d-scan-step"]
    sharded, alone = (
        losses(results(model, steps=6, layers=1, **mesh)) for mesh in ({}, {"fsdp": 1, "model": 1})
    )
    np.testing.assert_allclose(sharded, alone, rtol=1e-3)
    assert sharded[-1][0] < sharded[0][0] - 0.3


@pytest.mark.soak
def test_experts_learn_the_same_by_jit_and_by_shard_map():
    by_jit, by_hand = (
        losses(results(ZOO[name], steps=6, layers=1)) for name in ("moe-step", "moe-shard-map-step")
    )
    np.testing.assert_allclose(by_jit, by_hand, rtol=1e-3)
    assert by_jit[-1][0] < by_jit[0][0] - 0.1


def test_both_scans_compute_the_same():
    one, other = (
        results(ZOO["mamba-forward"], scan=scan, layers=1)[0]
        for scan in ("sequential", "associative")
    )
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_donation_shows_in_the_module():
    for donate in (True, False):
        text = built(ZOO["decoder-2d-step"], donate=donate, layers=1).mlir_module()
        assert ("tf.aliasing_output" in text) is donate


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("decoder-2d-step", 8.03),
        ("moe-step", 46.7),
        ("vit-step", 0.304),
        ("convnet-step", 0.0256),
        ("mamba-scan-step", 2.77),
        ("encoder-decoder-step", 0.783),
        ("nnx-llama-step", 8.03),
    ],
)
def test_full_sizes_are_those_of_published_models(name: str, billions: float):
    config = ZOO[name].config
    assert config is not None
    state, _ = replace(config.full(), training=False).program().arguments
    weights: list[Any] = jax.tree.leaves(state.get("parameters", state))
    assert sum(leaf.size for leaf in weights) == pytest.approx(billions * 1e9, rel=0.05)


def test_the_full_size_exports_for_64_devices_without_them(tmp_path: Path):
    path = tmp_path / "decoder.jax_export"
    export_model.main(["decoder-2d-step", "--full", "--layers=2", "-o", str(path)])
    exported = export.deserialize(bytearray(path.read_bytes()))
    assert exported.nr_devices == 64
    assert (64, 4096) in [aval.shape for aval in exported.in_avals]
    assert (128_256, 4096) in [aval.shape for aval in exported.in_avals]


def test_the_listing_groups_families(capsys: pytest.CaptureFixture[str]):
    export_model.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("vit: "))
    assert "classes=10" in lines[start]
    assert lines[start + 1].startswith("  vit-forward training=False")
    listed = [line.split()[0] for line in lines if not line.split()[0].endswith(":")]
    assert listed == list(MODELS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama", "--full"], "llama has no full size"),
        (["vit-step", "--optimizer=x"], "the optimizer is one of adamw, adam, sgd, not 'x'"),
        (["mamba-forward", "--scan=x"], "the scan is sequential or associative, not 'x'"),
        (["convnet-step", "--blocks=1,x"], "--blocks takes int, not '1,x'"),
    ],
)
def test_export_model_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        export_model.main([*words, "-o", str(tmp_path / "model.mlir")])
    assert message in capsys.readouterr().err
