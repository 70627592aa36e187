"""The manual page: what it has, and that roff has nothing against it."""

import shutil
import subprocess

import pytest

from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.cli.main import main
from stablehlo_tools.cli.man import page
from stablehlo_tools.cli.parsers import parser_of


def test_the_page_has_every_command_and_every_option():
    said = page().replace("\\-", "-")
    for name, command in parser_of(COMMANDS)[1].items():
        assert f".SH COMMAND: {name}\n" in said
        for action in command._actions:  # pyright: ignore[reportPrivateUsage]
            for option in action.option_strings:
                assert f"\\fB{option}\\fR" in said


def test_no_line_of_text_begins_like_a_request():
    requests = {".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".RS", ".RE", ".B", ".I"}
    for line in page().splitlines():
        assert not line.startswith("'")
        assert not line.startswith(".") or line.split()[0] in requests


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("chosen", [None, "opt"])
def test_groff_warns_of_nothing(chosen: str | None):
    groff = ["groff", "-man", "-ww", "-Tutf8", "-P-c"]
    finished = subprocess.run(groff, input=page(chosen), capture_output=True, text=True, check=True)
    assert finished.stderr == ""
    assert "STABLEHLO-TOOLS" in finished.stdout


def test_no_page_of_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["man", "optt"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "stablehlo-tools: error: no command is called 'optt'; did you mean 'opt'?",
        "try: stablehlo-tools man opt",
    ]
