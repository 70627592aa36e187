"""Layers as people write them run on a microbatch: in shard_maps, with kernels, with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact_comparison import assert_identical
from layer_styles import ATTENTION, MLP, export_step  # first: sets up the devices

import stablehlo_tools
from stablehlo_tools.artifacts.artifact import Artifact, parse
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import ops_named

REFUSED = ("scratch", "batch mean", "shifted dropless", "shifted ragged")
STYLES = [style for style in (*ATTENTION, *MLP) if style not in REFUSED]
USES = {
    "gpipe": "expand-pipeline{microbatches=2}",
    "circular": "expand-pipeline{microbatches=2 schedule=circular repeats=2}",
    # XLA's own partitioner aborts on a head that is divided in a branch.
    "1f1b": "expand-pipeline{microbatches=2 schedule=1f1b},partition",
    "accumulate": "accumulate-gradients{microbatches=2}",
}
QUICK = {
    ("ring", "1f1b"),
    ("kernel", "gpipe"),
    ("positions", "circular"),
    ("groups", "accumulate"),
    ("two experts", "gpipe"),
    ("checked", "accumulate"),
    ("dropless", "1f1b"),
    ("two dropless", "accumulate"),
    ("dropless inside", "gpipe"),
    ("ragged", "circular"),
    ("two ragged", "gpipe"),
    ("ragged inside", "1f1b"),
    ("state space", "accumulate"),
}


def _cases() -> list[object]:
    return [
        pytest.param(
            style,
            use,
            id=f"{style}, {use}",
            marks=[] if (style, use) in QUICK else pytest.mark.soak,
        )
        for style in STYLES
        for use in USES
    ]


def _artifact(style: str, *, balance: int = 0, stacked: bool = False) -> Artifact:
    return parse(bytes(export_step(style, balance=balance, stacked=stacked).serialize()))


@pytest.mark.parametrize(("style", "use"), _cases())
def test_a_style_is_the_same_on_microbatches(style: str, use: str) -> None:
    before = _artifact(style)
    after = stablehlo_tools.transform(before, USES[use])
    assert_identical(before, after)


@pytest.mark.parametrize(
    "passes",
    [
        "partition,rematerialize",
        pytest.param("collective-matmul", marks=pytest.mark.soak),
        pytest.param(
            "partition,create-reduce-scatter,pipeline-collectives", marks=pytest.mark.soak
        ),
        pytest.param(f"{USES['1f1b']},fold-pipeline", marks=pytest.mark.soak),
    ],
)
def test_other_passes_keep_a_kernel(passes: str) -> None:
    before = _artifact("kernel")
    assert_identical(before, stablehlo_tools.transform(before, passes))


@pytest.mark.parametrize("passes", [USES["1f1b"], "partition", "expand-pipeline{microbatches=4}"])
def test_grouped_products_stay_one_op(passes: str) -> None:
    after = stablehlo_tools.transform(_artifact("ragged inside"), passes)
    products = [
        op
        for op in ops_named(after.module.operation, {"stablehlo.composite"})
        if "chlo.ragged_dot" in str(op.attributes["name"])
    ]
    # Three of the forward, and two gradients for each.
    assert len(products) == 9
    assert not ops_named(after.module.operation, {"stablehlo.custom_call"})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("use", USES)
def test_an_auxiliary_loss_is_computed_for_each_microbatch(use: str, *, stacked: bool) -> None:
    passes = USES[use]
    text = passes.replace("microbatches=2", "microbatches=2 per-microbatch=true")
    before, expected = (_artifact("plain", balance=n, stacked=stacked) for n in (1, 2))
    with pytest.raises(ToolError, match="per-microbatch=true"):
        stablehlo_tools.transform(before, passes)
    after = stablehlo_tools.transform(before, text)
    assert_identical(expected, after)


@pytest.mark.parametrize("use", ["gpipe", "accumulate"])
@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("scratch", "dimension 0 of its grid is not parallel, and its scratch memory may pass"),
        ("batch mean", "compute statistics of each sample separately"),
        ("shifted dropless", "mixes samples|needs all samples"),
        ("shifted ragged", "mixes samples|it is divided if they are sorted by an argsort"),
    ],
)
def test_a_layer_that_mixes_samples_is_refused(style: str, said: str, use: str) -> None:
    artifact = _artifact(style)
    with pytest.raises(ToolError, match=said):
        stablehlo_tools.transform(artifact, USES[use])


@pytest.mark.parametrize("style", ["megatron", pytest.param("ring", marks=pytest.mark.soak)])
def test_ranks_along_the_axis_of_the_stages_run_a_layer_in_a_shard_map(
    style: str, tmp_path: Path
) -> None:
    from stablehlo_tools.cli.main import main

    step, ranks = tmp_path / "step.jax_export", tmp_path / "ranks"
    step.write_bytes(export_step(style).serialize())
    words = f"--schedule 1f1b --pipeline-axis stage --microbatches 2 -o {ranks}"
    assert main(["expand-mpmd", str(step), *words.split()]) == 0
    assert main(["check-mpmd", str(ranks), "--of", str(step)]) == 0
