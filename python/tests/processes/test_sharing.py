"""Work that is divided between a process and a fork of it."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from stablehlo_tools.processes import sharing
from stablehlo_tools.processes.sharing import beside, share_work

PATIENCE = 60.0  # seconds for a fork to begin


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks whatever threads tests before have left in this process, and on one core."""
    monkeypatch.setattr(sharing, "_may_fork", lambda: True)


def test_beside_another_thread_all_is_done_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # the fixture's
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with share_work(lambda _: os.getpid(), range(20)) as made, beside(os.getpid) as one:
            assert {*made(), one()} == {os.getpid()}
    finally:
        done.set()
        other.join()


def test_what_both_make_comes_in_order(tmp_path: Path):
    """The fork begins at the end."""

    mine = os.getpid()

    def work(number: int) -> tuple[int, int]:
        if os.getpid() == mine:
            time.sleep(0.05)  # so that what the fork sends is there first
        (tmp_path / str(number)).touch()
        return number * number, os.getpid()

    with share_work(work, range(5, 25)) as made:
        until = time.monotonic() + PATIENCE
        while not (tmp_path / "24").exists() and time.monotonic() < until:
            time.sleep(0.01)
        results = made()
    assert [square for square, _ in results] == [number * number for number in range(5, 25)]
    assert results[-1][1] != os.getpid()


def test_few_are_not_worth_a_fork():
    with share_work(lambda _: os.getpid(), range(3)) as made:
        assert made() == [os.getpid()] * 3


@pytest.mark.parametrize("wrong", [0, 11])
def test_what_is_raised_is_raised_here(wrong: int, capfd: pytest.CaptureFixture[str]):
    def work(number: int) -> int:
        if number == wrong:
            raise ValueError(number)
        return number

    with pytest.raises(ValueError, match=str(wrong)), share_work(work, range(12)) as made:
        made()
    assert capfd.readouterr().err == ""


def test_the_part_of_a_fork_that_died_is_done_here():
    mine = os.getpid()

    def work(number: int) -> int:
        if os.getpid() != mine and number == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with share_work(work, range(12)) as made:
        assert made() == list(range(12))


def test_work_that_nobody_asks_for_is_ended():
    started = time.monotonic()
    with share_work(time.sleep, range(60, 80)):
        pass
    assert time.monotonic() - started < 30


def test_one_thing_is_made_by_a_fork():
    with beside(os.getpid) as made:
        assert made() != os.getpid()


def test_what_is_raised_by_the_fork_is_raised_here(capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"), beside(work) as made:
        made()
    assert capfd.readouterr().err == ""


def test_what_a_fork_died_of_is_done_here():
    mine = os.getpid()

    def work() -> int:
        if os.getpid() != mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    with beside(work) as made:
        assert made() == 1
