"""Pipelines fold to the layer scans that they compute, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gpipe_programs import (  # first: sets up the devices
    Case,
    Sizes,
    rolled,
    shifted,
    single,
    unrolled,
)
from gpipe_variants import (
    AT_ONCE,
    accompanied,
    centred,
    circular,
    gathered,
    language,
    multiplied,
    rotated,
    streamed,
    switched,
)
from kept_values import run

import jax  # isort: skip
import jax.numpy as jnp
from jax.export import Exported

import stablehlo_tools
from stablehlo_tools.analysis.loops import constant_integer, count_trips
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxView,
    TraceReshape,
    Transpose,
    reshaped_box,
)

TWO = Sizes(stages=2, each=3, microbatches=3, samples=3)
SINGLE = Sizes(each=1)
BATCHED = Sizes(samples=4)

# A pipeline, and the loops that it folds to: `8` layers, `4[2]` stages of which each is a loop.
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "shifted": (shifted, "8"),
    "shifted-data-axis-manual": (partial(shifted, BATCHED, axes="full"), "8"),
    "rolled": (rolled, "8"),
    "rolled-permuted": (partial(rolled, shift="permute"), "8"),
    "circular": (circular, "8"),
    "streamed": (streamed, "8"),
    "gathered": (gathered, "16"),
    "rotated": (rotated, "16"),
    "language-loss": (partial(language, loss=True), "8"),
    "centred": (centred, "6[8]"),
}
MORE: dict[str, tuple[Callable[[], Case], str]] = {
    "shifted-stacked-shards": (partial(shifted, collect="stacked", leave="shards"), "8"),
    "shifted-bfloat16-sent": (partial(shifted, sent=jnp.bfloat16), "4[2]"),
    "shifted-data-axis-automatic": (partial(shifted, axes="partial"), "8"),
    "rolled-attention": (partial(rolled, layer="attention"), "8"),
    "accompanied": (accompanied, "8"),
    "switched": (switched, "8"),
    "shifted-two-stages": (partial(shifted, TWO), "6"),
    "shifted-stacked": (partial(shifted, collect="stacked"), "8"),
    "shifted-shards": (partial(shifted, leave="shards"), "8"),
    "shifted-single": (partial(shifted, SINGLE, stage=single), "4"),
    "shifted-unrolled": (partial(shifted, stage=unrolled), "4"),
    "shifted-open-ring": (partial(shifted, closed=False), "8"),
    "shifted-strided": (partial(shifted, strided=True), "8"),
    "shifted-counted": (partial(shifted, loop="fori"), "8"),
    "shifted-attention": (partial(shifted, layer="attention"), "8"),
    "shifted-attention-single": (partial(shifted, SINGLE, layer="attention", stage=single), "4"),
    "shifted-one-microbatch": (partial(shifted, Sizes(microbatches=1)), "8"),
    "rolled-two-stages": (partial(rolled, TWO), "6"),
    "rolled-select": (partial(rolled, shift="select"), "8"),
    "rolled-slices": (partial(rolled, shift="slices"), "8"),
    "rolled-pad": (partial(rolled, shift="pad"), "8"),
    "rolled-stacked": (partial(rolled, collect="stacked"), "8"),
    "rolled-inputs-scanned": (partial(rolled, fed="xs", collect="stacked"), "8"),
    "rolled-single": (partial(rolled, SINGLE, stage=single), "4"),
    "rolled-unrolled": (partial(rolled, stage=unrolled, constrained=False), "4"),
    "rolled-one-microbatch": (partial(rolled, Sizes(microbatches=1, samples=3)), "8"),
    "rolled-one-sample": (partial(rolled, Sizes(samples=1), layer="attention"), "6[8]"),
    "rotated-at-once": (partial(rotated, AT_ONCE), "16"),
    "circular-four-stages": (partial(circular, Sizes(4, 1, 5, 2, 3)), "12"),
    "gathered-two-stages": (partial(gathered, Sizes(2, 1, 5, 2, 3)), "6"),
    "looked-up": (partial(accompanied, travels=False), "8"),
    "numbered-layers": (partial(accompanied, travels=False, numbered=True), "4[2]"),
    "language": (language, "8"),
}


def folded(case: Case) -> Exported:
    return stablehlo_tools.transform(case.exported, "fold-pipeline")


def loops_of(exported: Exported) -> str:
    """The trip counts of all loops, those in a loop in brackets."""
    return " ".join(map(_shown, from_exported(exported).module.body.operations))


def _shown(view: Any) -> str:
    op = view.operation
    blocks = [block for region in op.regions for block in region.blocks]
    inner = " ".join(filter(None, (_shown(v) for block in blocks for v in block.operations)))
    if op.name != "stablehlo.while":
        return inner
    count = count_trips(op, _constant)
    assert not isinstance(count, str)
    return f"{count.trips[0]}[{inner}]" if inner else str(count.trips[0])


def _constant(value: ir.Value) -> list[int] | None:
    known = constant_integer(value)
    return None if known is None else [known]


def names_of(exported: Exported) -> set[str]:
    names: set[str] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        names.add(op.name)
        return ir.WalkResult.ADVANCE

    walk(from_exported(exported).module.operation, visit)
    return names


def check(case: Case, loops: str) -> None:
    """That a pipeline folds to these loops, and keeps its values: some processors round a row of a
    product otherwise where other rows stand beside it."""
    plain = folded(case)
    assert loops_of(plain).strip() == loops
    assert not names_of(plain) & {"stablehlo.collective_permute", "stablehlo.all_reduce"}
    before, after = run(case.exported, case.arguments), run(plain, case.arguments)
    expected = np.asarray(jax.jit(case.plain)(*case.arguments))
    assert np.isfinite(expected).all()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-6)
        np.testing.assert_allclose(other, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_folds_to_a_loop_over_layers(name: str):
    check(CASES[name][0](), CASES[name][1])


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_more_pipelines_fold_to_loops_over_layers(name: str):
    check(MORE[name][0](), MORE[name][1])


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_expanded_from_a_folded_pipeline_folds_back(chunks: int):
    case = rolled(Sizes(4, 2, 4, 2))
    plain = folded(case)
    schedule = "circular" if chunks > 1 else "gpipe"
    options = f"microbatches=4 repeats={chunks} schedule={schedule}"
    again = stablehlo_tools.transform(plain, f"expand-pipeline{{{options}}}")
    assert "stablehlo.collective_permute" in names_of(again)
    twice = stablehlo_tools.transform(again, "fold-pipeline")
    assert loops_of(twice).strip() == loops_of(plain).strip() == "8"
    expected = run(case.exported, case.arguments)
    for exported in (again, twice):
        np.testing.assert_array_equal(run(exported, case.arguments)[0], expected[0])


def test_outputs_masked_by_a_product_are_refused():
    with pytest.raises(ToolError, match=r"it adds values of several ranks: .* \(P4\)"):
        folded(multiplied())


@pytest.mark.parametrize(
    ("box", "before", "after", "expected"),
    [
        (Box((2, 0), (1, 8)), (6, 8), (6, 1, 8), Box((2, 0, 0), (1, 1, 8))),
        (Box((2, 0), (2, 8)), (6, 8), (3, 2, 8), Box((1, 0, 0), (1, 2, 8))),
        (Box((3, 0), (2, 8)), (6, 8), (3, 2, 8), None),
        (Box((0, 1, 0), (2, 1, 8)), (2, 3, 8), (6, 8), None),
        (Box((1, 0, 0), (1, 3, 8)), (2, 3, 8), (6, 8), Box((3, 0), (3, 8))),
        (Box((0, 2), (4, 3)), (4, 6), (4, 2, 3), None),
        (Box((0, 3), (4, 3)), (4, 6), (4, 2, 3), Box((0, 1, 0), (4, 1, 3))),
        (Box((), ()), (), (1, 1), Box((0, 0), (1, 1))),
    ],
)
def test_a_box_behind_a_reshape(
    box: Box, before: tuple[int, ...], after: tuple[int, ...], expected: Box | None
):
    assert reshaped_box(box, before, after) == expected
    if expected is None:
        return
    numbers = np.arange(np.prod(before, dtype=int)).reshape(before)
    taken, wanted = _taken(numbers, box), _taken(numbers.reshape(after), expected)
    np.testing.assert_array_equal(taken.ravel(), wanted.ravel())


def _taken(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return array[tuple(slice(s, s + n) for s, n in zip(box.starts, box.sizes, strict=True))]


def test_a_part_of_a_view_is_where_its_elements_are():
    view = BoxView(Box((5, 0), (6, 4))).of_operand(TraceReshape((3, 2, 4), (6, 4)))
    view = view.of_operand(Transpose((1, 0, 2)))
    part = view.restrict_to(Box((0, 1, 0), (2, 1, 4)))
    assert part is not None
    assert part.target == Box((7, 0), (2, 4))
    assert part.ops == (TraceReshape((1, 2, 4), (2, 4)), Transpose((1, 0, 2)))
    assert view.of_operand(TraceReshape((24,), (2, 3, 4))).restrict_to(Box((2,), (4,))) is None
