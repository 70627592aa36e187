"""What shells are told to complete: bash is asked; the others' scripts name the same words."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.cli.completion import SHELLS, script
from stablehlo_tools.cost.hardware import known_hardware
from stablehlo_tools.passes.registry import NAMED, PASSES


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell") / "completion.bash"
    path.write_text(script("bash"))
    return path


def completed(bash_script: Path, *words: str, folder: Path | None = None) -> list[str]:
    """What bash offers for the last of the words."""
    listed = " ".join(f"'{word}'" for word in ("stablehlo-tools", *words))
    code = (
        f"source '{bash_script}'; COMP_WORDS=({listed}); COMP_CWORD={len(words)}\n"
        "_shtab_stablehlo_tools\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    finished = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    assert finished.stderr == ""
    return finished.stdout.split()


def test_commands_and_options_are_completed(bash_script: Path):
    assert completed(bash_script, "check-") == ["check-order", "check-mpmd"]
    assert set(completed(bash_script, "")) == set(COMMANDS)
    assert "--print-ir-after-all" in completed(bash_script, "opt", "--pri")
    assert completed(bash_script, "compile", "x", "--target", "t") == ["tpu"]


def test_passes_are_completed_each_behind_its_comma(bash_script: Path):
    assert completed(bash_script, "opt", "x", "-p", "thread") == ["thread-tokens"]
    assert completed(bash_script, "opt", "x", "-p", "partition,order-") == [
        "partition,order-collectives"
    ]
    assert set(completed(bash_script, "opt", "--help", "")) == {*PASSES, *NAMED}


def test_hardware_and_schedules_are_completed(bash_script: Path):
    assert "h100" in completed(bash_script, "inspect", "x", "--hardware", "h1")
    assert "zb-v" in completed(bash_script, "expand-mpmd", "x", "--schedule", "zb")
    assert "1f1b" in completed(bash_script, "schedule", "1f")


def test_files_are_completed(bash_script: Path, tmp_path: Path):
    (tmp_path / "step.mlir").touch()
    assert completed(bash_script, "opt", "st", folder=tmp_path) == ["step.mlir"]
    assert completed(bash_script, "opt", "x", "-o", "st", folder=tmp_path) == ["step.mlir"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_knows_passes_and_hardware(shell: str):
    said = script(shell)
    for word in (*PASSES, *NAMED, *known_hardware(), *COMMANDS):
        assert word in said
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=said, text=True, check=True)
