"""What commands print with --json has the fields of docs/reference/schemas, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from docs.json_page import SCHEMAS

from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.cli.main import main
from stablehlo_tools.cli.parsers import parser_of

ROOT = Path(__file__).parents[3]
INPUTS = ROOT / "lit_tests" / "cli" / "Inputs"
TWO_LAYERS = INPUTS / "two_layers.mlir"
LAYERS = ROOT / "lit_tests" / "analysis" / "inspect_pipeline.mlir"
PAIR = ROOT / "python" / "tests" / "fixtures" / "torch_xla" / "deadlock_pair"
STEP = """
module attributes {mhlo.num_partitions = 2 : i32} {
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = "stablehlo.all_reduce"(%x) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<8xf32>) -> tensor<8xf32>
  return %y : tensor<8xf32>
}
}
"""
FAST = {
    "inspect": "inspect step.mlir",
    "inspect, of a pipeline": "inspect pipeline.mlir",
    "inspect-timed": "inspect step.mlir --hardware h100",
    "inspect-timed, on a TPU": "inspect step.mlir --hardware tpu-v5e",
    "inspect-timed, of a pipeline": "inspect pipeline.mlir --hardware h100",
    "check-order": "check-order step.mlir",
    "check-order, may deadlock": f"check-order {PAIR}/notoken_r0.mlir {PAIR}/notoken_r1.mlir",
    "verify": "verify step.mlir step.mlir",
    "verify, of a twin": "verify step.mlir step.mlir --twin always --trials 1",
    "compile": "compile step.mlir --target cpu",
    "doctor": "doctor",
    "expand-mpmd": f"expand-mpmd {INPUTS}/two_layers.mlir --schedule 1f1b --ranks 2 -o set",
    "expand-mpmd-compare": f"expand-mpmd {INPUTS}/two_layers.mlir --ranks 2 --compare",
    "check-mpmd": f"check-mpmd {INPUTS}/rank_set",
    "run-mpmd": f"run-mpmd {INPUTS}/rank_set",
    "run-mpmd, the same": f"run-mpmd own_set {TWO_LAYERS}",
    "run-mpmd, differs": "run-mpmd own_set other.mlir",
    "schedule": "schedule zb-v --stages 2 --microbatches 4 --format json",
    "schedule, searched": "schedule auto --stages 2 --microbatches 2 --format json",
    "schedule, of slices": "schedule seq1f1b --slices 2 --stages 2 --microbatches 2 --format json",
    "schedule, copying": "schedule 1f1b --offload 1,1 --stages 4 --microbatches 8 --format json",
    "schedule-compare": "schedule compare --stages 2 --microbatches 3 --format json",
    "schedule-invalid": "schedule twice.csv --format json",
    "plan": f"plan {INPUTS}/two_layers.mlir --hardware h100 --devices 4 --budget 0",
    "overlap-graph": f"overlap-graph {INPUTS}/overlap_graph.json -o schedule.json",
}
SLOW = {"optimize": "optimize step.mlir --target gpu --budget 5 -o fast.mlir"}


def validate(name: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step.mlir").write_text(STEP)
    if "pipeline.mlir" in command:
        expand = ["-p", "expand-pipeline{microbatches=4}", "-o", "pipeline.mlir"]
        assert main(["opt", str(LAYERS), *expand]) == 0
    if "own_set" in command:
        made = ["--schedule", "1f1b", "--ranks", "2", "-o", "own_set"]
        assert main(["expand-mpmd", str(TWO_LAYERS), *made]) == 0
        (folder / "other.mlir").write_text(TWO_LAYERS.read_text().replace("tanh", "sine"))
        capsys.readouterr()
    (folder / "twice.csv").write_text("0F0,0F0\n1F0\n")
    words = command.split()
    assert main(words if words[-1] == "json" else [*words, "--json"]) in (0, 1)
    schema = json.loads((SCHEMAS / f"{name.partition(',')[0]}.json").read_text())
    jsonschema.validate(json.loads(capsys.readouterr().out), schema)


@pytest.mark.parametrize("name", FAST)
def test_a_command_prints_the_fields_of_its_schema(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    validate(name, FAST[name], tmp_path, capsys)


@pytest.mark.soak
def test_optimize_prints_the_fields_of_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    validate("optimize", SLOW["optimize"], tmp_path, capsys)


def _prints_json(help_text: str) -> bool:
    return "--json" in help_text or re.search(r"--format \{[\w,]*json", help_text) is not None


def test_every_command_with_json_has_a_schema_and_a_run() -> None:
    _, parsers = parser_of(COMMANDS)
    printing = {name for name, parser in parsers.items() if _prints_json(parser.format_help())}
    ran = {command.split()[0] for command in [*FAST.values(), *SLOW.values()]}
    assert ran == printing
    names = {name.partition(",")[0] for name in [*FAST, *SLOW]}
    assert names == {path.stem for path in SCHEMAS.glob("*.json")}
