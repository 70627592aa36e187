"""split-weight-gradients on whole programs: values, what moves, what is stored, and what stays."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from kept_values import assert_kept
from models.layer_scan import LayerScanModel
from models.zoo import LAYER_SCANS, programs
from pipeline_checks import loops, reference, shown
from range_checks import ALONE, COUNTS, height, listed, restacked
from soaking import first

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.passes.pipeline import Pipeline

WHOLE = "nested-gradients"  # all its gradients of weights come out of a loop in the chain
SOONER = [
    "mlp-gradients",
    "universal-gradients",  # all layers add to the gradients of the same weights
    "accumulate-fori-step",  # in a loop over microbatches
]
LATER = [
    case.name
    for case in programs(layer_scan=True, training=True)
    if case.name not in (*SOONER, WHOLE) and not case.name.endswith("-evaluation")
]
BITWISE = {"mlp-gradients", "universal-gradients"}
DIVIDED = "split-weight-gradients"


def divided(exported: Exported, *before: str) -> Exported:
    """A program behind some passes and this one."""
    return stablehlo_tools.transform(exported, ",".join([*before, DIVIDED]))


def cutting(case: LayerScanModel) -> str:
    """The pass that cuts the layers of a case."""
    return f"split-layers{{counts={listed(COUNTS[height(case)])}}}"


@pytest.mark.parametrize("name", first(2, [*SOONER, *LATER]))
def test_values_are_kept_and_loops_divided(name: str):
    case = LAYER_SCANS[name]
    before = case.build(**ALONE)
    after = divided(before)
    assert shown(loops(after)).count(" ") > shown(loops(before)).count(" ")
    outputs = reference(case, **ALONE).compared(after)
    assert_kept(outputs)
    if name in BITWISE:
        assert_kept(outputs, bitwise=True)


@pytest.mark.parametrize("name", first(1, [*SOONER, *LATER]))
def test_ranges_of_layers_are_divided_one_by_one(name: str):
    case = LAYER_SCANS[name]
    before = stablehlo_tools.transform(case.build(**ALONE), cutting(case))
    after = divided(before)
    assert shown(loops(after)).count(" ") > shown(loops(before)).count(" ")
    assert_kept(reference(case, **ALONE).compared(after))


def test_microbatches_ranges_and_gradients_of_weights_one_after_the_other():
    case = LAYER_SCANS["twelve-gradients"]
    passes = ["accumulate-gradients{microbatches=3}", "split-layers{counts=3,1,4}"]
    after = divided(case.build(**ALONE), *passes)
    assert shown(loops(after)) == "3[3 1 4 4 4 1 1 3 3]"
    assert restacked(after) == []
    assert_kept(reference(case, **ALONE).compared(after))


def test_the_chain_has_no_contraction_that_only_weights_need():
    """Of the three contractions of a matrix in the backward, the first loop has one for its input,
    the second one for its gradient; the forward has the third."""
    chain, gradients = _contractions(divided(LAYER_SCANS["mlp-gradients"].build(**ALONE)))[1:]
    assert (chain, gradients) == (2, 2)


def _contractions(exported: Exported) -> list[int]:
    """How many there are in the body of each loop."""
    module = artifact.from_exported(exported).module
    inline_all_calls(module)
    ops = [view.operation for view in entry_function(module).regions[0].blocks[0].operations]
    return [
        str(op.regions[1].blocks[0]).count("stablehlo.dot_general")
        for op in ops
        if op.name == "stablehlo.while"
    ]


def test_both_loops_have_the_mark_of_their_range():
    case = LAYER_SCANS["mlp-gradients"]
    after = divided(case.build(**ALONE), cutting(case))
    marks = re.findall(r"stablehlo_tools\.range = (\d)", str(after.mlir_module()))
    assert marks == ["0", "1", "2", "2", "2", "1", "1", "0", "0"]


def test_no_more_is_stored_than_a_cotangent_for_each_matrix():
    """A gradient of a weight needs one residual, which is there, and one cotangent."""
    module = artifact.from_exported(LAYER_SCANS["mlp-gradients"].build(**ALONE)).module
    diagnostics = Diagnostics()
    Pipeline.parse("split-weight-gradients{explain=true}").run(module, diagnostics, None)
    (account,) = [each.message for each in diagnostics.collected]
    samples, hidden, width, size = 8, 32, 16, 4
    assert "3 results of a loop over 8 layers" in account
    assert f"needs 2 values ({samples * (hidden + width) * size} bytes)" in account


def test_a_forward_loop_is_left_alone():
    before = LAYER_SCANS["mlp-gradients"].build(**ALONE)
    assert _contractions(divided(before))[0] == _contractions(before)[0]


@pytest.mark.parametrize("name", ["mlp-forward", "universal-forward", "mlp-evaluation"])
def test_a_program_without_a_backward_loop_is_refused(name: str):
    with pytest.raises(ToolError, match=r"no backward loop over layers.*\(P1\)"):
        divided(LAYER_SCANS[name].build(**ALONE))


def test_a_second_run_divides_nothing():
    assert_nothing_divided(divided(LAYER_SCANS["mlp-gradients"].build(**ALONE)))


def test_a_loop_in_the_chain_is_not_divided():
    assert_nothing_divided(LAYER_SCANS[WHOLE].build(**ALONE))


def assert_nothing_divided(exported: Exported):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = divided(exported)
    assert shown(loops(after)) == shown(loops(exported))
    assert any("nothing is divided" in str(each.message) for each in caught)


def test_steps_of_training_in_a_loop_are_divided_each():
    """The loop over steps takes slices of batches, and carries weights: it is none over layers."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    def steps(weights: jax.Array, batches: jax.Array) -> jax.Array:
        def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return weights - 0.1 * jax.grad(loss)(weights, x), None

        return lax.scan(step, weights, batches)[0]

    kinds = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((7, 4, 4), (3, 2, 4))]
    before = export.export(jax.jit(steps))(*kinds)
    after = divided(before, "split-layers{counts=3,4}")
    assert shown(loops(after)) == "3[3 4 4 4 3 3]"


def test_the_same_input_gives_the_same_bytes():
    exported = LAYER_SCANS["paired-gradients"].build(**ALONE)
    texts = {str(divided(exported).mlir_module()) for _ in range(2)}
    assert len(texts) == 1
