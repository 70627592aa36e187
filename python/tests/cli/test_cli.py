"""The command line as a process: what is left behind when it is interrupted or killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stablehlo_tools.artifacts.parsing import check_sections

TOOL = [sys.executable, "-m", "stablehlo_tools.cli.main"]
GATHER = (
    '%g{0} = "stablehlo.all_gather"(%v{0}) <{{all_gather_dim = 0 : i64, replica_groups = '
    "dense<[[0, 1]]> : tensor<1x2xi64>}}> : (tensor<4xf32>) -> tensor<8xf32>\n"
    "%v{1} = stablehlo.slice %g{0} [0:4] : (tensor<8xf32>) -> tensor<4xf32>\n"
)


@pytest.fixture(scope="module")
def large_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module that takes the tool seconds: time enough to be interrupted anywhere."""
    count = 20_000
    body = "".join(GATHER.format(i, i + 1) for i in range(count))
    path = tmp_path_factory.mktemp("large") / "large.mlir"
    path.write_text(
        "module attributes {mhlo.num_replicas = 2 : i32} {\n"
        f"func.func @main(%v0: tensor<4xf32>) -> tensor<4xf32> {{\n{body}"
        f"return %v{count} : tensor<4xf32>\n}}\n}}\n"
    )
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0, 0.5, 1])
def test_an_interrupted_run_leaves_no_part_of_a_file(
    large_module: Path, tmp_path: Path, number: signal.Signals, delay: float
):
    output = tmp_path / "out.mlirbc"
    command = [*TOOL, "opt", str(large_module), "-p", "thread-tokens", "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    _child_of(process)
    time.sleep(delay)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=600)
    assert "Traceback" not in stderr
    left = list(tmp_path.iterdir())
    if process.returncode == 0 or left:  # it was faster than the signal: then the file is whole
        assert left == [output]
        check_sections(output.read_bytes())


def _child_of(process: subprocess.Popen[str]) -> int:
    """The process that does the work of a command, once there is one: before, Python starts."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    return int(children.read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_is_ended_is_one_error(
    large_module: Path, tmp_path: Path, number: signal.Signals
):
    output = tmp_path / "out.mlirbc"
    command = [*TOOL, "opt", str(large_module), "-p", "thread-tokens", "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    os.kill(_child_of(process), number)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.count("error: ")) == (2, 1)
    assert f"was ended by {number.name}" in stderr
    assert not list(tmp_path.iterdir())


def test_a_command_ends_with_the_process_that_was_started(large_module: Path, tmp_path: Path):
    output = tmp_path / "out.mlirbc"
    command = [*TOOL, "opt", str(large_module), "-p", "thread-tokens", "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    child = _child_of(process)
    process.kill()
    process.communicate(timeout=60)  # until nobody holds standard error
    assert not Path(f"/proc/{child}/exe").exists()
    assert not list(tmp_path.iterdir())


def test_an_old_output_survives_a_refused_input(tmp_path: Path):
    output = tmp_path / "out.mlir"
    output.write_text("old")
    bad = tmp_path / "bad.mlir"
    bad.write_text("func.func @main() {\n  nonsense\n}")
    command = [*TOOL, "opt", str(bad), "-p", "thread-tokens", "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{bad}:2:3: error: ")
    said = result.stderr.splitlines()
    assert len([line for line in said if not line.startswith("try: ")]) == 1
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.mlir", "out.mlir"]


def test_a_cpp_pass_that_ends_its_process_is_one_error(tmp_path: Path):
    """Shardy's last step aborts on a slice of a sharded dimension that does not divide."""
    module, output = tmp_path / "sliced.mlir", tmp_path / "out.mlir"
    module.write_text(
        'sdy.mesh @mesh = <["x"=8]>\n'
        "func.func @main(%a: tensor<64xf32> "
        '{sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<63xf32> {\n'
        "  %0 = stablehlo.slice %a [0:63] {sdy.sharding = "
        '#sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}'
        " : (tensor<64xf32>) -> tensor<63xf32>\n"
        "  return %0 : tensor<63xf32>\n}\n"
    )
    command = [*TOOL, "opt", str(module), "-p", "sdy-convert-global-to-local", "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    error, *notes = result.stderr.splitlines()
    assert "error: the pipeline was ended by SIG" in error
    assert len(notes) <= 1
    assert not output.exists()


def test_cpp_passes_keep_input_output_and_exit_code(tmp_path: Path):
    source = (
        "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n  return %a : tensor<4xf32>\n}\n"
    )
    command = [*TOOL, "opt", "-", "-p", "cse,thread-tokens"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "return %arg0" in result.stdout
    bad = subprocess.run(command, input="nonsense", capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("<stdin>:1:1: error: ")
