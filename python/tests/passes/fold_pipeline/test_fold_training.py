"""Differentiated pipelines fold to a loop over layers and its backward, with the same values."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpipe_by_hand import by_hand, decoder_by_hand
from gpipe_programs import (  # first: sets up the devices
    Case,
    Sizes,
    apart,
    rolled,
    scanned,
    shifted,
    single,
    unrolled,
)
from gpipe_variants import AT_ONCE, SLOTS, centred, circular, gathered, rotated, streamed, trained
from kept_values import run
from shard_map_steps import MEGATRON, Form, gpipe_step
from soaking import first
from test_fold_pipeline import folded, loops_of, names_of

import jax  # isort: skip
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.export import Exported
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import DOT_GENERAL
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.walk import ops_named

SINGLE = Sizes(each=1)
step = partial(trained, start=0.0)
recomputed: Any = jax.checkpoint(scanned, static_argnums=(0,))  # a stage


@partial(
    jax.checkpoint,
    static_argnums=(0,),
    policy=jax.checkpoint_policies.save_only_these_names("entering"),
)
def kept(layer: Any, weights: Any, h: jax.Array) -> jax.Array:
    """A stage that keeps what enters its layers, and makes the rest of it anew in its backward; of
    that, and of what it computes before its layers, jax makes loops and ops of their own."""
    one_each = jnp.cos(0 * jnp.arange(h.shape[-1], dtype=h.dtype))

    def one(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return layer(checkpoint_name(h, "entering"), w) * one_each, None

    return lax.scan(one, h, weights)[0]


# A step, and its loops: forward, then backward.
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "shifted": (partial(step, shifted), "8 8"),
    "shifted-checkpointed": (partial(step, shifted, layer="checkpointed"), "8 8"),
    "rolled-permuted": (partial(step, rolled, shift="permute"), "8 8"),
    "streamed": (partial(trained, streamed), "8 8"),
    "rotated": (partial(trained, rotated, AT_ONCE), "16 16"),
    "rolled-unrolled": (partial(step, rolled, stage=unrolled), "4 4"),
    "rolled-stage-checkpointed": (partial(step, rolled, stage=recomputed), "4[2] 4[2 2]"),
    "rolled-layers-kept": (partial(step, rolled, stage=kept), "8 8"),
    "rolled-layers-apart": (partial(step, rolled, stage=apart, layer="attention"), "8 8"),
}
MORE: dict[str, tuple[Callable[[], Case], str]] = {
    "circular": (partial(step, circular), "8 8"),
    "shifted-packed": (partial(step, shifted, layer="packed"), "8 8"),
    "rolled-attention": (partial(step, rolled, layer="attention"), "8 8"),
    "shifted-packed-checkpointed": (partial(step, shifted, layer="packed-checkpointed"), "8 8"),
    "shifted-packed-unrolled": (partial(step, shifted, stage=unrolled, layer="packed"), "4 4"),
    "rolled-packed": (partial(step, rolled, layer="packed"), "8 8"),
    "rolled-packed-checkpointed": (partial(step, rolled, layer="packed-checkpointed"), "8 8"),
    "shifted-normalised": (partial(step, shifted, layer="normalised"), "2 2 2 2 8 8"),
    "rolled-normalised": (partial(step, rolled, layer="normalised"), "2 8 8"),
    "shifted-single": (partial(step, shifted, SINGLE, stage=single), "4 4"),
    "gathered": (partial(step, gathered), "16 16"),
    "rotated-stored": (partial(trained, rotated), "16 16"),
    "rotated-three-times": (partial(trained, rotated, Sizes(2, 1, 4, 2, 3)), "6 6"),
    "shifted-unrolled": (partial(step, shifted, stage=unrolled), "4 4"),
    "rolled-single-checkpointed": (
        partial(step, rolled, SINGLE, stage=jax.checkpoint(single, static_argnums=(0,))),
        "4 4",
    ),
    "shifted-stage-checkpointed": (partial(step, shifted, stage=recomputed), "4[2] 4[2 2]"),
    "rolled-three-layers-apart": (partial(step, rolled, Sizes(each=3), stage=apart), "12 12"),
    "shifted-layers-apart": (partial(step, shifted, stage=apart), "8 8"),
    "shifted-layers-kept": (partial(step, shifted, stage=kept, layer="attention"), "8 8"),
    "shifted-shards": (partial(step, shifted, leave="shards"), "8 8"),
    "shifted-stacked": (partial(step, shifted, collect="stacked"), "8 8"),
    "shifted-bfloat16-sent": (partial(step, shifted, sent=jnp.bfloat16), "4[2] 4[2]"),
    "shifted-open-ring": (partial(step, shifted, closed=False), "8 8"),
    "shifted-strided": (partial(step, shifted, strided=True), "8 8"),
    "shifted-one-microbatch": (partial(step, shifted, Sizes(microbatches=1)), "8 8"),
    "shifted-data-axis-automatic": (
        partial(step, shifted, Sizes(samples=4), axes="partial"),
        "8 8",
    ),
    "streamed-one-slot": (partial(trained, streamed, Sizes(4, 2, 4, 2)), "8 8"),
    "streamed-three-slots": (partial(trained, streamed, Sizes(4, 1, 12, 2)), "4 4"),
    "centred": (partial(step, centred), "6[8] 6[8]"),
    "rolled": (partial(step, rolled), "8 8"),
    "rolled-single": (partial(step, rolled, SINGLE, stage=single), "4 4"),
    "rolled-select": (partial(step, rolled, shift="select"), "8 8"),
    "rolled-slices": (partial(step, rolled, shift="slices"), "8 8"),
    "rolled-pad": (partial(step, rolled, shift="pad"), "8 8"),
    "rolled-scanned": (partial(step, rolled, fed="xs", collect="stacked"), "8 8"),
}


def check(case: Case, loops: str, *others: Exported) -> None:
    """That a step folds to these loops and keeps its values, but for the rounding of sums; and so
    do others that were made of it."""
    plain = folded(case)
    assert loops_of(plain).strip() == loops
    assert not names_of(plain) & {"stablehlo.collective_permute", "stablehlo.all_reduce"}
    _compare(case, plain, *others)


def _compare(case: Case, *others: Exported) -> None:
    before = run(case.exported, case.arguments)
    expected = jax.tree.leaves(jax.jit(case.plain)(*case.arguments))
    for after in others:
        made = run(after, case.arguments)
        for one, other, right in zip(before, made, expected, strict=True):
            scale = float(np.abs(right).max())
            assert 0 < scale < np.inf
            np.testing.assert_allclose(one, other, rtol=0, atol=4e-6 * scale)
            np.testing.assert_allclose(other, np.asarray(right), rtol=0, atol=4e-6 * scale)


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_folds_to_a_loop_and_its_backward(name: str):
    check(CASES[name][0](), CASES[name][1])


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_more_training_steps_fold_to_a_loop_and_its_backward(name: str):
    check(MORE[name][0](), MORE[name][1])


SCHEDULES = {
    "interleaved": (shifted, "circular repeats=2"),
    "1f1b": (rolled, "1f1b"),
    "interleaved-1f1b": (rolled, "1f1b repeats=2"),
    "circular": (rotated, "eager-1f1b repeats=2"),
}


BY_HAND: dict[str, dict[str, Any]] = {
    "scored": {"scored": True},
    "outputs-to-all-ranks": {},
    "inside": {"inside": True},
    "explicit": {"explicit": True},
    "slice": {"leave": "slice"},
    "all-gather": {"leave": "all_gather"},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "sharded-weights": {"data": "outer", "sharded": True},
    "outer": {"data": "outer", "explicit": True},
    "inside": {"data": "inner", "inside": True},
    "inner": {"data": "inner"},
    "outer-inside": {"data": "outer", "inside": True},
    "outer-slice": {"data": "outer", "leave": "slice"},
}


@pytest.mark.parametrize("name", first(2, BY_HAND))
def test_a_step_that_is_written_by_hand_becomes_one_of_another_schedule(name: str):
    case = by_hand(Sizes(4, 1, 6, 2), **BY_HAND[name])
    expand = "fold-pipeline,expand-pipeline{microbatches=6 schedule=1f1b}"
    check(case, "4 4", stablehlo_tools.transform(case.exported, expand))


@pytest.mark.parametrize("inside", first(1, [True, False]), ids=["inside", "around"])
def test_a_decoder_that_is_written_by_hand_becomes_one_of_another_schedule(inside: bool):
    case = decoder_by_hand(inside=inside)
    expand = "fold-pipeline,expand-pipeline{microbatches=6 schedule=1f1b}"
    again = stablehlo_tools.transform(case.exported, expand)
    _compare(case, again)


@pytest.mark.parametrize("name", first(2, DIVIDED))
def test_other_manual_axes_are_left_to_the_partitioner(name: str):
    case = by_hand(Sizes(4, 1, 6, 4), **DIVIDED[name])
    plain = folded(case)
    assert not names_of(plain) & {"stablehlo.collective_permute", "sdy.manual_computation"}
    _compare(case, plain)


CUT: dict[str, dict[str, Any]] = {
    "in order": {},
    "strided, slice": {"leave": "slice"},
    "in order, inside": {"inside": True},
    "strided": {},
    "strided, inside": {"inside": True},
    "in order, slice": {"leave": "slice"},
}


@pytest.mark.parametrize("name", first(2, CUT))
def test_a_device_may_cut_its_samples_itself(name: str):
    """What is one microbatch lies apart in the whole batch."""
    case = by_hand(Sizes(4, 1, 6, 4), data="outer", cut=name.partition(",")[0], **CUT[name])
    expand = "fold-pipeline,expand-pipeline{microbatches=6 schedule=1f1b},partition"
    again = stablehlo_tools.transform(case.exported, expand)
    _compare(case, again)


@pytest.mark.parametrize("cut", ["", "in order", "strided"])
def test_samples_that_are_divided_stay_so(cut: str):
    """The devices of the axis for the samples each compute a half of every matrix product, also
    where there are fewer microbatches than the pipeline had."""
    case = by_hand(Sizes(4, 1, 6, 16), data="outer", cut=cut)
    pipeline = "fold-pipeline,expand-pipeline{microbatches=4},partition{choices=shardy}"
    module = stablehlo_tools.transform(from_exported(case.exported), pipeline).module
    rows = {shape_of(dot.operands[0])[0] for dot in ops_named(module.operation, {DOT_GENERAL})}
    assert rows == {6 * 16 // 4 // 2}, rows


STAGED: dict[str, P] = {name: P("stage", *spec[1:]) for name, spec in MEGATRON.items()}
ALONG: dict[str, P] = {name: P("stage") for name in MEGATRON}
THREE_AXES: dict[str, tuple[Form, bool]] = {
    "megatron": (Form(P(None, "data"), tensor="model", specs=STAGED, checks=False), False),
    "megatron, inside": (Form(P(None, "data"), tensor="model", specs=STAGED, checks=False), True),
}


@pytest.mark.parametrize("name", first(1, THREE_AXES))
def test_a_step_on_three_manual_axes_becomes_one_of_another_schedule(name: str):
    form, inside = THREE_AXES[name]
    case = gpipe_step(form, inside=inside)
    expand = "fold-pipeline,expand-pipeline{microbatches=4 schedule=1f1b},partition"
    again = stablehlo_tools.transform(case.exported, expand)
    _compare(case, again)


def test_a_pipeline_whose_other_axes_cannot_be_left_to_the_partitioner_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each device of them returns the gradients of its own samples; expand-pipeline behind it
    refuses, and both are said."""
    form = Form(P(None, "data"), specs=ALONG, checks=False, joined=lambda value, own: (value, own))
    case = gpipe_step(form, inside=True)
    path = tmp_path / "step.jax_export"
    path.write_bytes(bytes(case.exported.serialize()))
    pipeline = "fold-pipeline,expand-pipeline{microbatches=4}"
    assert main(["opt", str(path), "-p", pipeline, "-o", str(tmp_path / "out.mlir")]) == 2
    said = capsys.readouterr().err
    stays = said.index("fold-pipeline: a loop with permutes stays")
    why = re.compile(
        'the manual axis "data" around it .+ each device holds a term of a sum '
        "that no all_reduce completes"
    )
    assert why.search(said, stays) is not None
    assert stays < said.index("error: expand-")


@pytest.mark.parametrize("name", first(1, SCHEDULES))
def test_a_gpipe_step_becomes_one_of_another_schedule(name: str):
    build, schedule = SCHEDULES[name]
    case = trained(build) if build is rotated else step(build, Sizes(4, 2, 4, 2))
    microbatches = len(case.arguments[1]) // 2
    expand = f"expand-pipeline{{microbatches={microbatches} schedule={schedule}}}"
    again = stablehlo_tools.transform(case.exported, f"fold-pipeline,{expand}")
    assert "stablehlo.collective_permute" in names_of(again)
    _compare(case, again)


def test_a_step_of_any_size_folds():
    """A predicate of as many elements as a state has is known by what makes it."""
    case = trained(streamed, Sizes(4, 1, 8, 2100))
    assert 4 * 2100 * 8 > 1 << 16
    assert loops_of(folded(case)).strip() == "4 4"


@pytest.mark.parametrize("layer", first(1, ["packed", "normalised"]))
@pytest.mark.parametrize("schedule", first(1, ["1f1b", "eager-1f1b", "gpipe"]))
def test_what_is_done_with_weights_alone_is_no_loop_over_layers(schedule: str, layer: str):
    case = step(shifted, Sizes(4, 2, 4, 2), layer=layer)
    expand = f"expand-pipeline{{microbatches=4 schedule={schedule}}}"
    again = stablehlo_tools.transform(case.exported, f"fold-pipeline,{expand}")
    assert "stablehlo.collective_permute" in names_of(again)
    _compare(case, again)


@pytest.mark.parametrize("schedule", first(1, ["eager-1f1b repeats=2", "1f1b", "gpipe"]))
@pytest.mark.parametrize("sizes", first(1, [SLOTS, Sizes(2, 4, 6, 2), Sizes(4, 2, 12, 2)]), ids=str)
def test_microbatches_in_slots_of_stages_come_into_another_schedule(sizes: Sizes, schedule: str):
    case = trained(streamed, sizes)
    expand = f"expand-pipeline{{microbatches={sizes.microbatches} schedule={schedule}}}"
    again = stablehlo_tools.transform(case.exported, f"fold-pipeline,{expand}")
    assert not names_of(again) & {"stablehlo.gather", "stablehlo.scatter"}
    _compare(case, again)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(trained, shifted), r"a carry of the pipeline starts from nan.* \(P6\)"),
        (partial(step, shifted, leave="product"), r"it adds values of several ranks: .* \(P4\)"),
    ],
    ids=["garbage", "product"],
)
def test_a_step_that_is_not_understood_is_refused(build: Callable[[], Case], message: str):
    with pytest.raises(ToolError, match=message) as caught:
        folded(build())
    notes = str(caught.value)
    assert "note: the pipeline is here" in notes
    assert "note: its backward" in notes
