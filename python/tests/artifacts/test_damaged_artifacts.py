"""Damaged artifacts: no bytes end a command by a signal, a hang or a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_mutations import FORMS, encoded, mutated
from tree import ROOT, SUPPORT

SEARCHED = os.pathsep.join(str(ROOT / name) for name in ("lit_tests", "."))
COMMANDS = (["opt", "-p", "thread-tokens"], ["opt", "-p", "cse,canonicalize"], ["inspect"])


def outcomes(commands: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and the standard error of each command."""
    result = subprocess.run(
        [sys.executable, SUPPORT / "forked_commands_process.py"],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SEARCHED},
    )
    assert result.returncode == 0, result.stderr
    return [(code, said) for code, said in json.loads(result.stdout)]


def problem(code: int, said: str, output: Path | None) -> str | None:
    """What is wrong with how a command took its input."""
    errors = [line for line in said.splitlines() if ": error: " in line]
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if "Traceback" in said or "a bug in this tool" in said:
        return "a bug"
    if len(errors) != (code == 2):
        return f"{len(errors)} errors with exit code {code}"
    if output is not None and output.exists() != (code == 0):
        return "an output file"
    return None


def check(directory: Path, seeds: range) -> None:
    """Every seed damages one artifact of one form, and one command is given the result."""
    forms = encoded()
    commands: list[list[str]] = []
    outputs: list[Path | None] = []
    for seed in seeds:
        form = FORMS[seed % len(FORMS)]
        programs = forms[form]
        path = directory / f"{seed}{form.value}"
        path.write_bytes(mutated(programs[seed // len(FORMS) % len(programs)], seed))
        command = COMMANDS[seed // 3 % len(COMMANDS)]
        output = None
        words = [command[0], str(path), *command[1:]]
        if command[0] == "opt":
            output = directory / f"{seed}.out{FORMS[seed // 5 % 3].value}"
            words += ["-o", str(output)]
        commands.append(words)
        outputs.append(output)
    ended = outcomes(commands)
    wrong = [
        f"{' '.join(words)}: {what}\n{said}"
        for words, (code, said), output in zip(commands, ended, outputs, strict=True)
        if (what := problem(code, said, output))
    ]
    assert not wrong, f"{len(wrong)} of {len(commands)}:\n" + "\n".join(wrong)
    codes = [code for code, _ in ended]
    assert codes.count(0) > len(codes) // 20, "hardly any is read: nothing but refusals was tested"


def test_damaged_artifacts_are_refused_or_read(tmp_path: Path):
    check(tmp_path, range(40))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(-1, 4))
def test_more_damaged_artifacts_are_refused_or_read(tmp_path: Path, part: int):
    check(tmp_path, range(max(40, 200 + 500 * part), 700 + 500 * part))
