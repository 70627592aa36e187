"""`check-order` on real exports: as one program, and as programs compiled apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import order_models
import pytest
from models.zoo import SMALL, Model, programs
from order_cases import copies, read, rule, verdict
from order_models import DEVICES
from tree import FIXTURES

from stablehlo_tools.analysis.liveness import dead_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.targets.compilation import compile_artifact

TORCH_XLA = FIXTURES / "torch_xla"
TRUSTED = JobOptions(trust_partitioner=True, platform="cpu")
# One collective leads to the next by itself, or there are fewer than two.
NATURALLY_ORDERED = {
    *("silent", "unpartitioned", "unused-result", "barrier-result", "expert-exchange"),
    "condition-collective",  # which compares a sum over all devices, and computes nothing with it
}
DECIDED_BY_FLOATS = {"control-flow"}  # by a mean, which programs compiled apart may round apart
# Large, and of what smaller ones have: a loop, platforms to choose from, the layers of `llama`.
LARGE = ("llama-scan", "llama-remat", "llama-platforms")


def cases(models: Iterable[Model]) -> list[Any]:
    """The models, the large ones for `make soak`."""
    return [
        pytest.param(model, id=model.name, marks=pytest.mark.soak if model.name in LARGE else ())
        for model in models
    ]


each_model = pytest.mark.parametrize("model", cases(SMALL.values()))
for_several = pytest.mark.parametrize(
    "model", cases(model for model in SMALL.values() if model.devices > 1)
)


@each_model
def test_one_program_is_ordered(model: Model) -> None:
    built = model.build()
    assert not isinstance(built, str)
    assert rule(verdict(copies(built, 1))) == "ordered"


@for_several
def test_copies_are_ordered_where_their_values_order_them(model: Model) -> None:
    built = model.build()
    assert not isinstance(built, str)
    rules = rule(verdict(copies(built, model.devices), TRUSTED))
    assert (rules == "ordered") is (model.name in NATURALLY_ORDERED), rules


@for_several
def test_threaded_copies_are_ordered(model: Model) -> None:
    built = model.build()
    assert not isinstance(built, str)
    rules = rule(verdict(copies(built, model.devices, "thread-tokens"), TRUSTED))
    expected = "decided-at-run-time" if model.name in DECIDED_BY_FLOATS else "ordered"
    assert rules == expected


def test_data_parallel_copies_are_not_ordered() -> None:
    step = order_models.data_parallel()
    assert rule(verdict(copies(step, 1))) == "ordered"
    assert rule(verdict(copies(step, DEVICES))) == "unordered"
    assert rule(verdict(copies(step, 1), strict=True)) == "unordered"
    assert rule(verdict(copies(step, DEVICES, "thread-tokens"))) == "ordered"


def test_a_chain_of_values_orders_copies() -> None:
    assert rule(verdict(copies(order_models.chained(), DEVICES))) == "ordered"
    assert rule(verdict(copies(order_models.chained(), 2))) == "ordered"


def test_one_collective_more() -> None:
    workers = [*copies(order_models.chained(), 7), *copies(order_models.chained(extra=True), 1)]
    finding = verdict(workers).finding
    assert finding is not None
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "missing-collective")
    assert "device 7 issues all_reduce" in finding.message
    assert "order_models.py" in finding.message
    assert finding.actors[0].device == 7


def test_one_collective_before_the_other() -> None:
    turned = copies(order_models.both_orders(turned=True), 1, "thread-tokens")
    others = copies(order_models.both_orders(turned=False), 7, "thread-tokens")
    finding = verdict([*turned, *others]).finding
    assert finding is not None
    assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "conflicting-order")
    assert finding.confirmed
    assert 0 in finding.devices
    assert len(finding.devices) == 2


def test_nested_scans() -> None:
    step = order_models.nested_scans()
    assert rule(verdict(copies(step, 1))) == "ordered"
    decided = verdict(copies(step, DEVICES, "thread-tokens"))
    assert rule(decided) == "ordered"
    assert rule(verdict(copies(step, DEVICES))) == "ordered"  # each depends on the one before


def test_a_branch_on_the_axis_index() -> None:
    fits, does_not = (order_models.branch_on_index(groups_fit=fit) for fit in (True, False))
    assert rule(verdict(copies(fits, 1))) == "ordered"
    assert rule(verdict(copies(fits, DEVICES, "thread-tokens"))) == "ordered"
    for count in (1, 2, DEVICES):
        finding = verdict(copies(does_not, count)).finding
        assert finding is not None
        assert finding.verdict is not Verdict.ORDERED
    finding = verdict(copies(does_not, 1)).finding
    assert finding is not None
    assert finding.rule == "divergent-control-flow"
    assert "device 0 takes branch" in finding.sentences[0]


def test_a_loop_that_ends_by_a_value_of_all() -> None:
    assert rule(verdict(copies(order_models.until_small(of_all=True), 1))) == "ordered"
    finding = verdict(copies(order_models.until_small(of_all=False), 1)).finding
    assert finding is not None
    assert finding.rule == "divergent-control-flow"
    assert "the trip count may differ" in finding.message


@pytest.mark.parametrize("name", ["token", "notoken"])
def test_a_pair_of_torch_xla(name: str) -> None:
    pair = [artifact.load(TORCH_XLA / "deadlock_pair" / f"{name}_r{rank}.mlir") for rank in (0, 1)]
    assert rule(verdict(pair)) == ("ordered" if name == "token" else "unordered")


@pytest.mark.parametrize("path", sorted(TORCH_XLA.glob("*.mlir")), ids=lambda path: path.stem)
def test_one_program_of_torch_xla(path: Path) -> None:
    assert rule(verdict([artifact.load(path)])) == "ordered"


def test_a_plain_sharded_jit_cannot_be_told() -> None:
    built = SMALL["unpartitioned"].build()
    assert not isinstance(built, str)
    with pytest.raises(ToolError, match="XLA's partitioner may add") as raised:
        verdict(copies(built, 2))
    assert raised.value.input_name == "worker0"
    assert raised.value.diagnostic.place.file is not None


def test_an_artifact_for_two_platforms_needs_one() -> None:
    built = SMALL["two-platforms"].build()
    assert not isinstance(built, str)
    expected = "exported for cpu, cuda: choose one to check with --platform"
    with pytest.raises(ToolError, match=expected):
        verdict(copies(built, 2))
    with pytest.raises(ToolError, match="exported for cpu, cuda, not for tpu"):
        verdict(copies(built, 2), JobOptions(platform="tpu"))
    on_cuda, on_cpu = (
        verdict(copies(built, 2, "thread-tokens"), JobOptions(platform=platform))
        for platform in ("cuda", "cpu")
    )
    assert (on_cuda.collectives, on_cpu.collectives) == (4, 6)


def _dead_and_alive() -> Artifact:
    """Two that are deleted, one behind the other, one kept by a token's barrier only, and one."""
    gather = '"stablehlo.all_gather"(%V) <{all_gather_dim = 0 : i64, GROUPS}>'
    gather += " : (tensor<64x8xf32>) -> tensor<128x8xf32>"
    permute = '"stablehlo.collective_permute"(%V) <{PAIRS}> : (tensor<64x8xf32>)'
    permute += " -> tensor<64x8xf32>"
    text = f"""func.func @main(%x: tensor<64x8xf32>) -> tensor<64x8xf32> {{
        %t = stablehlo.create_token : !stablehlo.token
        %p = {permute.replace("%V", "%x")}
        %g = {gather.replace("%V", "%p")}
        %b:2 = stablehlo.optimization_barrier %g, %t : tensor<128x8xf32>, !stablehlo.token
        %c:2 = stablehlo.optimization_barrier %x, %b#1 : tensor<64x8xf32>, !stablehlo.token
        %q = {permute.replace("%V", "%c#0")}
        return %q : tensor<64x8xf32>
    }}"""
    text = text.replace("GROUPS", "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>")
    pairs = "source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>"
    return read(text.replace("PAIRS", pairs))[0]


def test_what_is_said_to_be_deleted_is_what_xla_deletes() -> None:
    loaded = _dead_and_alive()
    assert [c.kind for c in dead_collectives(loaded.module)] == ["collective_permute", "all_gather"]
    assert compile_artifact(_dead_and_alive(), "cpu").order.deleted == (0, 1)
    decided = verdict([loaded])
    assert len(decided.programs[0].dead) == 2
    assert decided.collectives == 1


@pytest.mark.parametrize("model", programs(dead=True), ids=lambda model: model.name)
def test_what_models_do_not_use_is_deleted(model: Model) -> None:
    built = model.build()
    assert not isinstance(built, str)
    (program,) = verdict(copies(built, 1)).programs
    deleted = compile_artifact(copies(built, 1)[0], "cpu").order.deleted
    assert len(deleted) == len(program.dead) == 1
