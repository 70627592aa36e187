"""What a terminal shows that a pipe does not: colour, and a line while a command takes long."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stablehlo_tools.cli import progress, streams
from stablehlo_tools.cli.progress import ProgressLine

TOOL = [sys.executable, "-m", "stablehlo_tools"]
COLOUR = re.compile(r"\x1b\[(1;3|48;5)")
RED, GREEN, RESET = "\x1b[1;31m", "\x1b[1;32m", "\x1b[0m"


def on_a_terminal(arguments: list[str], **variables: str) -> tuple[int, str]:
    """The exit code of a command, and all that it writes to a terminal."""
    own, its = os.openpty()
    environment = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", **variables}
    process = subprocess.Popen(
        [*TOOL, *arguments], stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    return process.wait(timeout=120), _all_of(own)


def _all_of(descriptor: int) -> str:
    data = b""
    try:
        while part := os.read(descriptor, 1 << 16):
            data += part
    except OSError:  # nobody writes any more
        pass
    os.close(descriptor)
    return data.decode().replace("\r\n", "\n")


def test_errors_and_what_to_try_are_in_colour_on_a_terminal(tmp_path: Path):
    (tmp_path / "step.mlir").write_text("module {}")
    missing = str(tmp_path / "stp.mlir")
    code, said = on_a_terminal(["opt", missing])
    assert code == 2
    assert f"{missing}: {RED}error{RESET}: cannot read the file: No such file" in said
    assert f"{GREEN}try{RESET}: stablehlo-tools opt {tmp_path / 'step.mlir'}\n" in said


def test_a_report_fits_the_terminal_and_has_its_colours(tmp_path: Path):
    program = Path(__file__).parents[3] / "lit_tests" / "analysis" / "inspect_hardware.mlir"
    words = ["inspect", str(program), "--hardware", "h100"]
    code, said = on_a_terminal(words, COLUMNS="70")
    assert code == 0
    assert "\x1b[1minspect_hardware.mlir, as written" in said
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", said)
    own = plain[plain.index("inspect_hardware.mlir, as written") :]
    assert max(map(len, own.splitlines())) <= 70
    assert "  exposed " in own


def test_the_file_that_was_written_is_named(tmp_path: Path):
    (tmp_path / "step.mlir").write_text("module {}")
    words = ["opt", "step.mlir", "-o", "out.mlir"]
    done = subprocess.run([*TOOL, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "wrote out.mlir\n")


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(variables: dict[str, str]):
    for words in (["opt", "/nonexistent"], ["schedule", "1f1b", "--stages", "2"]):
        _, said = on_a_terminal(words, **variables)
        assert not COLOUR.search(said)


def test_a_schedule_on_a_terminal_has_its_colours():
    code, said = on_a_terminal(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"])
    assert code == 0
    assert "\x1b[48;5;25m\x1b[38;5;231mF0" in said
    assert "\\x1b" not in said


def test_the_word_that_answers_is_green_or_red(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    streams.print_answer("same: 2 outputs", holds=True)
    streams.print_answer("may-deadlock: one waits", holds=False)
    streams.print_answer("not proven\n  proven: a name", holds=False)
    assert shown.getvalue() == (
        f"{GREEN}same{RESET}: 2 outputs\n{RED}may-deadlock{RESET}: one waits\n"
        f"{RED}not proven{RESET}\n  proven: a name\n"
    )


def test_a_line_says_what_a_long_command_does_and_goes(monkeypatch: pytest.MonkeyPatch):
    own, its = os.openpty()
    kept = os.dup(2)
    os.dup2(its, 2)
    try:
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(its), "w"))
        monkeypatch.setenv("TERM", "xterm")
        with ProgressLine("optimize step.mlir") as line:
            _until(lambda: line.is_drawn)
            line.show("compiling \x1b[31m")
            time.sleep(1.0)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(its)
        sys.stderr.close()
    said = _all_of(own)
    assert "optimize step.mlir" in said
    assert "compiling \\x1b[31m" in said
    assert said.rstrip("\n").endswith("\x1b[2K")  # the line is gone


def _until(holds: object) -> None:
    assert callable(holds)
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it took half a minute")


def test_a_pipe_sees_no_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with ProgressLine("optimize step.mlir"):
        time.sleep(0.1)
    assert said.getvalue() == ""


def test_help_and_import_load_nothing_heavy():
    code = (
        "import sys, stablehlo_tools\n"
        "from stablehlo_tools.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'jax', 'jaxlib', 'numpy', 'rich', 'shtab'} & set(sys.modules))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout.splitlines()[-1] == "set()"
