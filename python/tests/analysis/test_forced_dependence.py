"""Order through ops that compilers simplify: none is claimed that XLA takes away."""

from __future__ import annotations

import pytest
from order_cases import read, verdict
from simplified_ops import KEPT, LOST, Case, program

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.order.verdict import Decided
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package


def decided(text: str) -> Decided:
    """The verdict on two copies, compiled apart."""
    return verdict(read(text, text))


@pytest.mark.parametrize("case", LOST, ids=lambda case: case.name)
def test_no_order_through_what_an_identity_takes_away(case: Case) -> None:
    finding = decided(program([case], follow=True)).finding
    assert finding is not None
    assert finding.rule == "unordered"
    assert finding.confirmed


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_order_through_what_no_identity_takes_away(case: Case) -> None:
    assert decided(program([case], follow=True)).finding is None


@pytest.mark.parametrize("target", list(Target))
def test_what_counts_is_what_compilers_keep(target: Target) -> None:
    """Where the operand goes, its collective goes with it: nothing else uses it."""
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    cases = [*LOST, *KEPT]
    text = program(cases, follow=False)
    order = compile_artifact(artifact.parse(text.encode(), "cases"), target).order
    deleted = [cases[i] for i in order.deleted]
    assert [case.name for case in deleted if case.counts] == []
    assert len(deleted) > len(LOST) / 2  # the list is about compilers, not about fears
