"""The command line with streams that are closed or have no reader; names that steer a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stablehlo_tools.diagnostics import Diagnostic, Place, Severity, printable

TOOL = [sys.executable, "-P", "-m", "stablehlo_tools.cli.main"]
MODULE = """sdy.mesh @mesh = <["x"=2]>
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%b: tensor<f32>, %c: tensor<f32>):
    %sum = stablehlo.add %b, %c : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups =
      dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
      loc("psum\\1B[31m\\E2\\80\\AEdesrever")
  return %0 : tensor<4xf32>
}
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "module.mlir"
    path.write_text(MODULE)
    return path


def _shell(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command of bash, in which $0 is the tool."""
    tool = " ".join(TOOL)
    return subprocess.run(
        [
            "bash",
            "-o",
            "pipefail",
            "-c",
            command.replace("TOOL", tool),
            *map(str, ("sh", *arguments)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_answer_is_the_exit_code_though_nobody_reads_it(module: Path) -> None:
    """`check-order X | head` under pipefail is not a deadlock."""
    for command in ("check-order", "inspect"):
        done = _shell(f'TOOL {command} "$1" | true', module)
        assert (done.returncode, done.stderr) == (0, "")
    apart = _shell('TOOL check-order --strict "$1" "$2" | true', module, module)
    assert (
        apart.returncode == _shell('TOOL check-order --strict "$1" "$2"', module, module).returncode
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_end_no_command(closed: str, module: Path, tmp_path: Path) -> None:
    """What does not need the stream works; what does says that it cannot be had."""
    out = tmp_path / "out.mlir"
    done = _shell(f'TOOL opt "$1" -o "$2" {closed}', module, out)
    named = "" if "2>&-" in closed else f"wrote {out}\n"
    assert (done.returncode, done.stderr, done.stdout) == (0, named, "")
    assert out.read_text().startswith("module")
    printed = _shell(f'TOOL inspect "$1" {closed}', module)
    if ">&-" in closed.split():
        said = "stablehlo-tools: error: cannot write the output: Bad file descriptor\n"
        assert (printed.returncode, printed.stderr) == (2, "" if "2>&-" in closed else said)
    else:
        assert (printed.returncode, printed.stderr) == (0, "")
        assert "all_reduce" in printed.stdout


def test_closed_standard_input_is_no_file() -> None:
    done = _shell("TOOL opt - <&-")
    assert done.returncode == 2
    said, tried = done.stderr.splitlines()
    assert said.endswith("error: cannot read the file: Bad file descriptor")
    assert tried == "try: another path"


def test_nothing_steers_the_terminal(module: Path, tmp_path: Path) -> None:
    """Neither a location of the module nor the name of a file."""
    shown = _shell('TOOL inspect "$1"', module).stdout
    assert r"psum\x1b[31m\u202edesrever" in shown
    assert shown == printable(shown)
    name = tmp_path / "a\x1b]0;owned\x07\u2066b.mlir"
    for command in ('TOOL opt "$1"', 'TOOL inspect "$1"', 'TOOL opt "$2" -o "$1/x.mlir"'):
        said = _shell(command, name, module).stderr
        assert said == printable(said)
        assert sum("error: " in line for line in said.splitlines()) == 1
        assert r"\x1b]0;owned\x07\u2066b" in said.replace("\\\\", "\\")
    told = Diagnostic(Severity.ERROR, "m\x9b", Place("f\r.py", 3)).render("x\u200f")
    assert told == r"f\x0d.py:3: error: m\x9b"


def test_long_names(module: Path, tmp_path: Path) -> None:
    """As long as a file system takes; longer ones are one error."""
    longest = tmp_path / ("ä" * 125 + ".mlir")
    assert len(os.fsencode(longest.name)) == 255
    assert _shell('TOOL opt "$1" -o "$2"', module, longest).returncode == 0
    assert longest.read_text().startswith("module")
    done = _shell('TOOL opt "$1" -o "$2"', module, tmp_path / ("a" * 256 + ".mlir"))
    assert done.returncode == 2
    assert done.stderr.endswith("\ntry: another path\n")
    assert done.stderr.count("\n") == 2
    assert "File name too long" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["opt", "MODULE", "-p", "canonicalize{max-iterations=99999999999999999999}"],
            "for the --max-iterations option: '99999999999999999999' value invalid for long",
        ),
        (["schedule", "auto", "--stages", "4", "--microbatches", "8", "--effort", "0"], "--effort"),
    ],
)
def test_numbers_without_meaning(words: list[str], said: str, module: Path) -> None:
    words = [str(module) if word == "MODULE" else word for word in words]
    done = subprocess.run([*TOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    error, *tried = done.stderr.splitlines()
    assert "error:" in error
    assert said in error
    assert all(line.startswith("try: ") for line in tried)


DROPPED = """
import os, signal, sys
from stablehlo_tools.cli import main

def deaf(_parsed):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 0.1)
    except KeyboardInterrupt:
        pass  # as native code that calls back does with what a callback raises
    while True:
        signal.pause()

main._run = deaf
sys.exit(main._command([]))
"""


def test_an_interrupt_that_is_dropped_is_repeated() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "stablehlo-tools: interrupted\n")


UNRAISABLE = """
import os, signal, sys
from stablehlo_tools.cli import main

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 0.1)

def deaf(_parsed):
    Collected()
    while True:
        signal.pause()

main._run = deaf
sys.exit(main._command([]))
"""

AT_THE_END = """
import atexit, os, signal, sys
from stablehlo_tools.cli import main
from stablehlo_tools.cli.supervisor import run_supervised

def interrupted():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 0.1)

def done(_parsed):
    atexit.register(interrupted)
    return 1

main._run = done
code = run_supervised(lambda: main._command([]))
os.kill(os.getpid(), signal.SIGINT)
sys.exit(code)
"""


def test_an_interrupt_that_python_drops_is_told_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNRAISABLE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "stablehlo-tools: interrupted\n")


def test_an_interrupt_that_comes_too_late_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
