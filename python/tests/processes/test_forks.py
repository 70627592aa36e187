"""What ends a fork, and what it answers. In a process of one thread, as servers are."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
    import os, time
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.processes.forks import REFUSED, in_fork

    def refusal(work, seconds=60.0):
        answer, data = in_fork(work, "doing it", seconds)
        assert data == b""
        return answer[REFUSED]["message"]
"""


def passes(body: str) -> None:
    """Runs statements behind the prelude in a process of their own."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_answer_and_its_bytes_come_back():
    passes("""
        pid = os.getpid()
        answer, data = in_fork(lambda: ({"own": os.getpid() != pid}, b"x" * 100_000), "it", 60.0)
        assert answer == {"own": True} and len(data) == 100_000
    """)


def test_a_refusal_comes_back_as_such():
    passes("""
        def work():
            raise ToolError("not this one")
        assert refusal(work) == "not this one"
    """)


def test_a_fork_that_dies_is_a_refusal_that_names_the_signal():
    passes("""
        assert "SIGABRT while doing it" in refusal(os.abort)
    """)


def test_only_what_another_try_may_not_meet_is_told_apart():
    passes("""
        def by_chance(work, seconds=60.0):
            return in_fork(work, "doing it", seconds)[0][REFUSED]["chance"]
        def work():
            raise ToolError("not this one")
        assert not by_chance(work) and not by_chance(os.abort)
        assert by_chance(lambda: os.kill(os.getpid(), 9)) and by_chance(lambda: time.sleep(60), 0.1)
    """)


def test_an_error_of_ours_is_told_and_does_not_end_the_server():
    passes("""
        answer, _ = in_fork(lambda: 1 // 0, "doing it", 60.0)
        assert "ZeroDivisionError" in answer[REFUSED]["notes"][0]["message"]
    """)


def test_a_fork_that_takes_too_long_is_stopped():
    passes("""
        began = time.monotonic()
        assert "took more than 1 s" in refusal(lambda: time.sleep(600), 1.0)
        assert time.monotonic() - began < 60
    """)


def test_what_a_fork_prints_stays_out_of_the_conversation(capfd: pytest.CaptureFixture[str]):
    passes("""
        answer, _ = in_fork(lambda: (os.write(1, b"noise") and {}, b""), "doing it", 60.0)
        assert answer == {}
    """)
    assert "noise" not in capfd.readouterr().out
