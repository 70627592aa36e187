"""Communication that a program leaves to a compiler is made to be timed, or said to be unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.partitioner_work import Annotation, left_to_the_partitioner
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report import exposure
from stablehlo_tools.report.exposure import explicit_collectives

_TILED = '{mhlo.sharding = "{devices=[1,2]<=[2]}"}'
_ROWS = '{mhlo.sharding = "{devices=[2,1]<=[2]}"}'
_DOT = """
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  return %0 : tensor<4x2xf32>
}"""


def _function(x: str, w: str, result: str = "", body: str = _DOT) -> str:
    return (
        f"func.func @main(%x: tensor<4x8xf32> {x}, %w: tensor<8x2xf32> {w})"
        f" -> (tensor<4x2xf32> {result}) {{{body}"
    )


_SDY = "{{sdy.sharding = #sdy.sharding<@mesh, [{}]>}}"
_MESH = 'sdy.mesh @mesh = <["x"=2]>\n'
_GSPMD = _function(_TILED, _ROWS, '{mhlo.sharding = "{replicated}"}')
_ON_OPS = _function(
    "",
    "",
    body="""
  %a = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[1,2]<=[2]}"}
    : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %0 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  return %0 : tensor<4x2xf32>
}""",
)
_SHARD_MAP = _function(
    "",
    "",
    body="""
  %a = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[1,2]<=[2]}"}
    : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %b = stablehlo.custom_call @SPMDFullToShardShape(%a) {mhlo.sharding = "{manual}"}
    : (tensor<4x8xf32>) -> tensor<4x4xf32>
  %c = "stablehlo.all_reduce"(%b) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids}> ({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d = stablehlo.custom_call @Sharding(%c) {mhlo.sharding = "{manual}"}
    : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %e = stablehlo.custom_call @SPMDShardToFullShape(%d) {mhlo.sharding = "{devices=[1,2]<=[2]}"}
    : (tensor<4x4xf32>) -> tensor<4x8xf32>
  %0 = stablehlo.dot_general %e, %w, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  return %0 : tensor<4x2xf32>
}""",
)
_ROUND_TRIP = """
module attributes {mhlo.num_partitions = 2 : i32,
    mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\\\\\22x\\\\\\22=2]>}"}} {
  func.func @main(%x: tensor<4x8xf32> {mhlo.frontend_attributes =
      {xla.sdy.sharding = "#sdy.sharding<@mesh, [{\\\\\\22x\\\\\\22}, {}]>"}}) -> tensor<8xf32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<4x8xf32>, tensor<f32>) -> tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}"""
_MODULE_OF_HLO = (
    """
module attributes {mhlo.num_partitions = 2 : i32,
    mhlo.spmd_parameters_shardings = ["{devices=[1,2]<=[2]}", "{replicated}"],
    mhlo.spmd_output_sharding = "{replicated}"} {
"""
    + _function("", "")
    + "}"
)
_FREE_AXIS = 'sdy.mesh @mesh = <["x"=2, "y"=2]>\n' + _function(
    _SDY.format('{}, {"x"}'),
    _SDY.format('{"y"}, {}'),
    body="""
  %0 = sdy.manual_computation(%x, %w) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"y"}, {}]>]
      out_shardings=[<@mesh, [{}, {}]>] manual_axes={"x"}
      (%a: tensor<4x8xf32>, %b: tensor<8x2xf32>) {
    %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
    sdy.return %1 : tensor<4x2xf32>
  } : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  return %0 : tensor<4x2xf32>
}""",
)
_INPUTS_ALONE = _MESH + _function(_SDY.format('{}, {"x"}'), _SDY.format('{"x"}, {}'))
_RESULT_ALONE = _MESH + _function("", "", _SDY.format('{"x"}, {}'))


def _loaded(text: str) -> Artifact:
    return artifact.parse(text.encode(), "program.mlir")


@pytest.mark.parametrize(
    ("text", "annotation", "partitions"),
    [
        pytest.param(_GSPMD, Annotation.GSPMD, 2, id="gspmd-arguments"),
        pytest.param(_ON_OPS, Annotation.GSPMD, 2, id="gspmd-custom-calls"),
        pytest.param(_SHARD_MAP, Annotation.GSPMD, 2, id="gspmd-shard-map"),
        pytest.param(_MODULE_OF_HLO, Annotation.GSPMD, 2, id="gspmd-of-hlo"),
        pytest.param(_ROUND_TRIP, Annotation.ROUND_TRIP, 2, id="round-trip"),
        pytest.param(_FREE_AXIS, Annotation.SHARDY, 4, id="free-axis"),
        pytest.param(_INPUTS_ALONE, Annotation.SHARDY, 2, id="inputs-alone"),
        pytest.param(_RESULT_ALONE, Annotation.SHARDY, 2, id="result-alone"),
    ],
)
def test_what_is_left_is_known(text: str, annotation: Annotation, partitions: int) -> None:
    left = left_to_the_partitioner(_loaded(text).module)
    assert left is not None
    assert (left.annotation, left.partitions) == (annotation, partitions)


def test_nothing_is_left_where_all_is_in_the_program() -> None:
    text = _INPUTS_ALONE
    explicit = explicit_collectives(_loaded(text))[0]
    assert find_collectives(explicit.module)
    assert left_to_the_partitioner(explicit.module) is None
    assert left_to_the_partitioner(_loaded(_function("", "")).module) is None


def test_a_collective_between_custom_calls_is_not_of_a_program_for_one_device() -> None:
    assert not is_per_device(_loaded(_SHARD_MAP).module)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [(_GSPMD, ["all_reduce"]), (_MODULE_OF_HLO, ["all_reduce"]), (_ROUND_TRIP, ["all_reduce"])],
)
def test_older_shardings_are_partitioned_to_be_timed(text: str, kinds: list[str]) -> None:
    explicit, (note,) = explicit_collectives(_loaded(text))
    assert [c.kind for c in find_collectives(explicit.module)] == kinds
    assert "it was partitioned (partition{choices=shardy},create-reduce-scatter)" in note
    assert left_to_the_partitioner(explicit.module) is None


def test_what_nobody_can_partition_is_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ToolError("XLA's partitioner refused the program: no")

    monkeypatch.setattr(exposure, "partition_with_xla", refuse)
    loaded = _loaded(_GSPMD.replace("{replicated}", "{maximal device=0}"))
    same, (note,) = explicit_collectives(loaded)
    assert same is loaded
    assert note.startswith("NOT INCLUDED: the communication")
    assert "XLA's partitioner refused the program: no" in note


def test_the_table_says_what_it_cannot_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(_GSPMD)
    assert main(["inspect", str(path)]) == 0
    table = capsys.readouterr().out
    assert "note: not listed: the collectives that a compiler adds for 2 devices" in table
    assert main(["inspect", str(path), "--json"]) == 0
    assert "GSPMD" in json.loads(capsys.readouterr().out)["left_to_compiler"]


@pytest.mark.parametrize("text", [_GSPMD, _SHARD_MAP, _ROUND_TRIP])
def test_no_order_is_proven_around_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{name}.mlir" for name in "ab"]
    for path in paths:
        path.write_text(text)
    assert main(["check-order", *map(str, paths)]) == 2
    assert "leaves collectives to XLA's partitioner" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["schedule-overlap", "pipeline-collectives"])
def test_passes_refuse_what_is_not_partitioned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(_GSPMD)
    assert main(["opt", str(path), "-p", name]) == 2
    assert "run partition,create-reduce-scatter first" in capsys.readouterr().err
