"""Ranks that are laid along an axis of the program's mesh, each a mesh of the others."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from tree import ROOT

from stablehlo_tools import bindings
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import Expansion, ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set
from stablehlo_tools.mpmd.staging.pipeline_axis import lay_along

sys.path.append(str(ROOT / "python" / "examples"))
import export_step

RANKS = 2
SHARDED = """
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=4, "data"=2, "model"=2], device_ids=[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]>
  func.func public @main(
      %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage", "data"}, {"model"}]>},
      %v: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "stage":(1)2}p1, {"stage":(2)2, ?}p2]>}
  ) -> (tensor<8x8xf32> {jax.result_info = "stage", sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}]>}) {
    %0 = sdy.sharding_constraint %w <@mesh, [{"model", "stage":(1)2}, {}], replicated={"data"}> : tensor<8x8xf32>
    %1 = stablehlo.add %0, %v {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}], replicated={"stage"}>]>} : tensor<8x8xf32>
    return %1 : tensor<8x8xf32>
  }
}
"""  # noqa: E501
LAID = (
    'sdy.mesh @mesh = <["data"=2, "model"=2]>',
    '%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>}',
    '%arg1: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}p1, {?}p2]>}',
    '{jax.result_info = "stage", sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}',
    'sdy.sharding_constraint %arg0 <@mesh, [{"model"}, {}], replicated={"data"}>',
    "#sdy.sharding_per_value<[<@mesh, [{}, {}]>]>",
    "mhlo.num_partitions = 4 : i32",
)


@cache
def step() -> Artifact:
    """A step of four layers on a mesh of two stages and four devices each."""
    return artifact.from_exported(export_step.exported(4, 8, 16, RANKS, "float32"))


def expanded(axis: str | None, ranks: int = RANKS, program: Artifact | None = None) -> Expansion:
    request = ExpansionRequest("1f1b", ranks, load_hardware("h100"), None, 2, axis=axis)
    return expand_mpmd(program or step(), request)


def test_the_axis_leaves_the_meshes_and_the_shardings() -> None:
    context = bindings.new_context()
    module = bindings.parse_module(SHARDED, context)
    with context, ir.Location.unknown():
        lay_along(module, "stage", 4)
    assert module.operation.verify()
    for text in LAID:
        assert text in str(module)


def test_each_rank_is_a_mesh_of_the_other_axes(tmp_path: Path) -> None:
    found = expanded("stage")
    assert found.manifest.devices == 4
    assert not [each for each in found.warnings if "--pipeline-axis" in each.message]
    assert 'sdy.mesh @mesh = <["rank"=2, "data"=4]>' in str(found.modules[0])
    write(tmp_path, found.manifest, found.modules)
    assert prove(load(tmp_path)).is_proven


@pytest.mark.soak
def test_ranks_along_an_axis_give_the_values_of_the_step(tmp_path: Path) -> None:
    found = expanded("stage")
    write(tmp_path, found.manifest, found.modules)
    assert run_set(load(tmp_path), step(), SetOptions()).same


def test_without_the_axis_a_rank_is_the_whole_mesh_and_says_so() -> None:
    found = expanded(None)
    assert found.manifest.devices == 8
    (warning,) = [each for each in found.warnings if "--pipeline-axis" in each.message]
    assert "including those along 'stage': --pipeline-axis stage places one rank" in warning.message


@pytest.mark.parametrize(
    ("axis", "ranks", "told"),
    [
        ("stages", 2, r"axis 'stages' .*there are stage of 2, data of 4"),
        ("stage", 4, r"the mesh has 2 devices along 'stage', but there are 4 ranks \(P8\)"),
    ],
)
def test_an_axis_that_ranks_cannot_lie_along_is_refused(axis: str, ranks: int, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        expanded(axis, ranks)


def test_what_is_written_for_devices_is_refused() -> None:
    with pytest.raises(ToolError, match=r"is written for the devices of the whole mesh.*\(P8\)"):
        expanded("stage", program=transform(step(), "partition"))
