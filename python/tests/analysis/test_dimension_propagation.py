"""The batch-dims analysis: what it finds, what it names as mixing, and that parts keep values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from split_cases import INDEPENDENT, MIXING, Case, split, values

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling


def seeds_of(case: Case) -> dict[int, DimTiling]:
    """The batch of a case."""
    return {at: DimTiling(dim) for at, dim in enumerate(case.batch) if dim is not None}


def assert_same(case: Case, seeds: dict[int, DimTiling], parts: int) -> None:
    """That a function gives the same in parts."""
    arguments = case.arguments()
    in_parts, _ = split(case.function, arguments, seeds, parts)
    for one, other in zip(
        values(case.function, arguments), values(in_parts, arguments), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.name)
def test_independent_batches_are_followed_to_the_end(case: Case):
    _, dims = split(case.function, case.arguments(), seeds_of(case), 2)
    assert not dims.meetings
    assert dims.op_tilings


@pytest.mark.parametrize("case", MIXING, ids=lambda case: case.name)
def test_what_mixes_samples_is_named(case: Case):
    _, dims = split(case.function, case.arguments(), seeds_of(case), 2)
    assert dims.meetings
    assert dims.meetings[0].mixed.name == f"stablehlo.{case.mixes}"


# Their ops and layouts are in other cases, or for `make soak`, which cuts all of these everywhere.
LIKE_OTHERS = (
    "matmul_weights_first",
    "attention_keys_whole",
    "merged_as_minor",
    "layers",
    "embedding",
    "rematerialised",
    "softmax_over_batch",
    "two_steps",
    "outer_product",
    "squared",
    "argmax_of_batch",
)


@pytest.mark.parametrize(
    "case",
    [case for case in [*INDEPENDENT, *MIXING] if case.name not in LIKE_OTHERS],
    ids=lambda case: case.name,
)
def test_values_are_kept(case: Case):
    assert_same(case, seeds_of(case), 2)


def all_seeds(case: Case, parts: int) -> list[dict[int, DimTiling]]:
    """Every way to cut each argument, or not, `outer` 1 or 2."""
    ways: list[list[DimTiling | None]] = []
    for argument in case.arguments():
        layouts = [DimTiling(d, outer) for d in range(argument.ndim) for outer in (1, 2)]
        ways.append([None, *(cut for cut in layouts if cut.fits(argument.shape, parts))])
    return [
        {at: layout for at, layout in enumerate(cut) if layout is not None}
        for cut in itertools.product(*ways)
        if any(cut)
    ]


@pytest.mark.soak
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("case", [*INDEPENDENT, *MIXING], ids=lambda case: case.name)
def test_values_are_kept_however_arguments_are_cut(case: Case, parts: int):
    for seeds in all_seeds(case, parts):
        assert_same(case, seeds, parts)
