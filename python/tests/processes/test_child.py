"""Children of the package: what they answer, what ended them, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes.child import ChildOutcome, Conversation, ask

ANSWERS = "from stablehlo_tools.processes.child import answer_request as answer, serve\n"
SECONDS = 300.0


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., ChildOutcome]:
    def run(code: str, timeout: float = SECONDS) -> ChildOutcome:
        (tmp_path / "client.py").write_text(ANSWERS + code)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return ask("client", tmp_path, {"number": 3}, timeout, environment)

    return run


def test_a_request_and_its_answer(asked: Callable[..., ChildOutcome]) -> None:
    outcome = asked("answer(lambda directory, request: {'twice': 2 * request['number']})")
    assert outcome == ChildOutcome(0, {"twice": 6}, "")
    assert not outcome.error
    assert outcome.refusal is None


def test_what_is_raised_is_an_answer(asked: Callable[..., ChildOutcome]) -> None:
    outcome = asked(
        """
from stablehlo_tools.diagnostics import Place, ToolError, note
def refuse(directory, request):
    raise ToolError("no", Place("model.py", 3), (note("why", Place("model.py", 4)),))
answer(refuse)
"""
    )
    assert str(outcome.refusal) == outcome.error == "model.py:3: error: no\nmodel.py:4: note: why"
    assert asked("answer(lambda directory, request: {}['x'])").error == "'x'"


def test_a_death_is_an_error_with_its_last_words(asked: Callable[..., ChildOutcome]) -> None:
    outcome = asked("import os; os.write(2, b'out of luck\\n'); os.abort()")
    assert (outcome.code, outcome.answer) == (-signal.SIGABRT, None)
    assert str(outcome.death("it", "running")) == (
        "error: it was ended by SIGABRT while running\nnote: it said: out of luck"
    )


def test_a_child_that_takes_too_long_is_ended(asked: Callable[..., ChildOutcome]) -> None:
    outcome = asked("import time; time.sleep(600)", timeout=0.2)
    assert outcome.code is None
    with pytest.raises(ToolError, match="too long"):
        outcome.in_time("too long")


def test_modules_of_the_working_directory_are_not_taken(
    asked: Callable[..., ChildOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's json.py must not become what a child of the package imports."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(elsewhere)
    assert asked("answer(lambda directory, request: {})").answer == {}


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ends, nothing that it asked goes on: XLA may take hours."""
    (tmp_path / "client.py").write_text(
        ANSWERS + "import os, time\n"
        "def sleep(directory, request):\n"
        "    (directory / 'new').write_text(str(os.getpid()))\n"
        "    (directory / 'new').rename(directory / 'pid')\n"
        "    time.sleep(600)\n"
        "answer(sleep)\n"
    )
    code = (
        "import pathlib, sys; from stablehlo_tools.processes.child import ask\n"
        "ask('client', pathlib.Path(sys.argv[1]), {}, 600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    _wait((tmp_path / "pid").exists)
    child = Path("/proc", (tmp_path / "pid").read_text(), "exe")
    assert child.exists()
    parent.kill()
    parent.wait()
    _wait(lambda: not child.exists())


def test_a_conversation(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(
        ANSWERS + "serve(lambda head, data: (head + 1, data[::-1]) if head else exit())"
    )
    client = Conversation("client", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert client.ask(1, b"abc") == (2, b"cba")
    assert client.ask(5, b"") == (6, b"")
    with pytest.raises(EOFError):
        client.ask(0, b"")
    assert client.exit_code() == 0
    client.end()


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
