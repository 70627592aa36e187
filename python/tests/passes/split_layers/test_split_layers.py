"""split-layers on whole programs: values, which loops there are, and that stacks stay in pieces."""

from __future__ import annotations

import pytest
from jax.export import Exported
from kept_values import assert_kept
from models.zoo import LAYER_SCANS
from pipeline_checks import loops, reference, shown
from range_checks import ALONE, COUNTS, carried_shapes, height, listed, restacked
from soaking import first

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

# Loops of these are over as many layers as data say, or read no stack.
UNCUT = ("dynamic-depth-forward", "until-settled-forward", "universal-forward")
SOONER = [
    "mlp-gradients",
    "remainder-forward",  # iterations of three layers, and two layers behind the loop
    "fori-gradients",
    "reverse-forward",
    "cast-before-gradients",  # all weights are converted at once
    "universal-gradients",  # all layers share their weights
]
BITWISE = {"mlp-gradients", "fori-gradients", "universal-gradients"}  # no sums over layers
LATER = [name for name in LAYER_SCANS if name not in UNCUT and name not in SOONER]


def cut(name: str, *then: str, **options: int) -> Exported:
    """A case for one device, with its loops over layers cut, and further passes run."""
    case = LAYER_SCANS[name]
    pipeline = [f"split-layers{{counts={listed(COUNTS[height(case)])}}}", *then]
    return stablehlo_tools.transform(case.build(**ALONE, **options), ",".join(pipeline))


@pytest.mark.parametrize("name", first(4, [*SOONER, *LATER]))
def test_values_are_kept_and_loops_are_cut(name: str):
    case = LAYER_SCANS[name]
    after = cut(name)
    before, now = (shown(loops(program)) for program in (case.build(**ALONE), after))
    assert now != before
    outputs = reference(case, **ALONE).compared(after)
    assert_kept(outputs)
    if name in BITWISE:
        assert_kept(outputs, bitwise=True)


def test_a_reverse_loop_goes_over_the_last_range_first():
    assert shown(loops(cut("mlp-gradients"))) == "3 1 4 4 1 3"
    assert shown(loops(cut("reverse-forward"))) == "4 1 3"


@pytest.mark.parametrize(
    "name",
    first(2, ["mlp-gradients", "fori-gradients", "llama-remat-gradients", "accumulate-gradients"]),
)
def test_residuals_pass_from_piece_to_piece(name: str):
    assert restacked(cut(name)) == []


def test_a_loop_around_carries_accumulators_in_pieces():
    case = LAYER_SCANS["accumulate-fori-step"]
    before = case.build(**ALONE, layers=7)
    after = stablehlo_tools.transform(before, "split-layers{counts=2,5}")
    assert shown(loops(after)) == "2[2 5 5 2]"
    (outer,) = carried_shapes(before)
    (pieces,) = carried_shapes(after)
    stacked = [shape for shape in outer if shape[:1] == (7,)]
    assert stacked
    assert not [shape for shape in pieces if shape[:1] == (7,)]
    for shape in stacked:
        for count in (2, 5):
            assert pieces.count((count, *shape[1:])) == stacked.count(shape)


@pytest.mark.soak
def test_each_stack_is_cut_by_a_run_of_its_own():
    case = LAYER_SCANS["two-stacks-gradients"]
    after = cut("two-stacks-gradients", "split-layers{counts=1,3}")
    assert shown(loops(after)) == "1 3 3 1 4 4 1 3 3 1"
    assert_kept(reference(case, **ALONE).compared(after))


def test_one_stack_of_two_that_are_alike_can_be_cut():
    before = LAYER_SCANS["teacher-gradients"].build(**ALONE)
    student = stablehlo_tools.transform(before, "split-layers{counts=3,5 loop=1}")
    assert sorted(shown(loops(student)).split()) == ["3", "3", "5", "5", "8"]


@pytest.mark.parametrize("name", UNCUT)
def test_what_is_no_loop_over_a_stack_is_refused(name: str):
    with pytest.raises(ToolError, match=r"no loop goes over 8 layers.*\(P1\)"):
        stablehlo_tools.transform(LAYER_SCANS[name].build(**ALONE), "split-layers{counts=3,5}")


def test_counts_that_are_no_sum_are_refused_with_the_heights_that_there_are():
    with pytest.raises(ToolError, match=r"9 layers, the sum of 4, 5: loops go over 8 \(P1\)"):
        stablehlo_tools.transform(
            LAYER_SCANS["mlp-gradients"].build(**ALONE), "split-layers{counts=4,5}"
        )


def test_the_same_input_gives_the_same_bytes():
    texts = {str(cut("stacked-inside-gradients").mlir_module()) for _ in range(2)}
    assert len(texts) == 1
