"""`make-test --init`: what it writes runs, fails where it should, and is never written over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stablehlo_tools.cli.main import main

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "older_jax"
SHARDED = """\
module {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
      -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh, []>}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0, 1]
        : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    return %sum : tensor<f32>
  }
}
"""


def lit(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder, as its workflow does."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    workflow = yaml.safe_load((folder / "ci.yml").read_text())
    *_, installing, running = workflow["jobs"]["artifacts"]["steps"]
    assert installing["run"].startswith("pip install 'stablehlo-tools[tests]>=0.")
    return subprocess.run(
        ["bash", "-c", running["run"]],
        cwd=folder.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_suite_of_ones_own_artifact_runs_and_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    step = str(FIXTURES / "jax_0.12.0.jax_export")
    assert main(["make-test", "--init", "artifacts", step, "--cost"]) == 0
    test = tmp_path / "artifacts" / "jax_0.12.0.mlir"
    assert capsys.readouterr().out.splitlines()[-1] == "try: lit -v artifacts"
    text = test.read_text()
    assert "-p thread-tokens" in text
    assert "--at-most exposed_ns=" in text
    ran = lit(tmp_path / "artifacts")
    assert ran.returncode == 0, ran.stdout
    assert "PASS: artifacts :: jax_0.12.0.mlir" in ran.stdout
    test.write_text(text.replace('// CHECK: "stablehlo.all_gather"', '// CHECK: "stablehlo.no_op"'))
    failed = lit(tmp_path / "artifacts")
    assert failed.returncode == 1
    assert "FAIL: artifacts :: jax_0.12.0.mlir" in failed.stdout


def test_without_an_artifact_a_program_stands_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["make-test", "--init", "artifacts"]) == 0
    first, second = (tmp_path / "artifacts" / "placeholder.mlir").read_text().splitlines()[:2]
    assert first.startswith("// A placeholder for your program")
    assert "make-test step.jax_export -p thread-tokens --brief -o artifacts/step.mlir" in second
    assert lit(tmp_path / "artifacts").returncode == 0


def test_a_program_that_is_to_be_partitioned_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("sharded.mlir").write_text(SHARDED)
    assert main(["make-test", "--init", "artifacts", "sharded.mlir"]) == 0
    text = (tmp_path / "artifacts" / "sharded.mlir").read_text()
    assert "-p partition,create-reduce-scatter" in text
    assert 'CHECK: "stablehlo.all_reduce"' in text


def test_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "lit.cfg.py").write_text("mine")
    assert main(["make-test", "--init", "artifacts"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "stablehlo-tools: error: 'artifacts/lit.cfg.py' exists, and --init starts a new suite: "
        "add a test to a suite with -o TEST.mlir",
        "try: stablehlo-tools make-test --init artifacts-2",
    ]
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["lit.cfg.py"]


@pytest.mark.parametrize("words", [["-o", "x.mlir"], ["--update"], ["a.mlir", "b.mlir"]])
def test_init_takes_an_artifact_and_no_output(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["make-test", "--init", "artifacts", *words]) == 2
    assert not list(tmp_path.iterdir())
