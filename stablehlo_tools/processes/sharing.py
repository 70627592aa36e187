"""Divides work between this process and a fork of it, which shares its data.

For processes of one thread with data that cannot be sent to another process, such as modules.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

from stablehlo_tools.processes.activity import end_with_parent

_LEAST = 8  # numbers from which on a fork is worth its start
_ROOM = 1 << 20  # bytes of results that the fork may send before they are read


@contextlib.contextmanager
def share_work[T](
    work: Callable[[int], T], numbers: Sequence[int]
) -> Generator[Callable[[], list[T]]]:
    """Yields a function that returns the results of `work` for some numbers, in their order.

    Until it is called, a fork works on the numbers from the last on, if there is a second core and
    no second thread. The call then works from the first on and never waits for the fork. Results
    must be picklable. Raises the exceptions of `work`.
    """
    if len(numbers) < _LEAST or not _may_fork():
        yield lambda: [work(number) for number in numbers]
        return
    with _start_fork(partial(_work, work, numbers)) as receiving:

        def together() -> list[T]:
            made: dict[int, T] = {}
            for place, number in enumerate(numbers):
                with contextlib.suppress(EOFError):  # if the fork died, its part is done here
                    while receiving.poll():
                        done, value = receiving.recv()
                        made.setdefault(done, value)
                if len(made) >= len(numbers):
                    break
                if place not in made:
                    made[place] = work(number)
            return [made[place] for place in range(len(numbers))]

        yield together


@contextlib.contextmanager
def beside[T](work: Callable[[], T]) -> Generator[Callable[[], T]]:
    """Yields a function that returns the result of `work`, which a fork computes meanwhile.

    The call runs `work` in this process if there is no second core or a second thread, or if it
    raises in the fork; then the exception is raised here. The result must be picklable.
    """
    if not _may_fork():
        yield work
        return
    with _start_fork(partial(_work, lambda _: work(), [0])) as receiving:

        def made() -> T:
            try:
                return receiving.recv()[1]
            except EOFError:
                return work()

        yield made


def _may_fork() -> bool:
    return (os.cpu_count() or 1) > 1 and threading.active_count() == 1


@contextlib.contextmanager
def _start_fork(work: Callable[[Connection], None]) -> Generator[Connection]:
    """Yields the connection on which a fork sends its results; ends the fork after the block."""
    context = get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    # No one reads until the call, so a full pipe would stop the fork.
    fcntl.fcntl(sending.fileno(), fcntl.F_SETPIPE_SZ, _ROOM)
    worker = context.Process(target=work, args=(sending,), daemon=True)
    # Python warns of native threads. They are harmless here, because no one waits for the fork.
    with warnings.catch_warnings(action="ignore"):
        worker.start()
    # With this end open here, `recv` would not notice the end of the fork.
    sending.close()
    try:
        yield receiving
    finally:
        worker.kill()
        worker.join()
        receiving.close()


def _work[T](work: Callable[[int], T], numbers: Sequence[int], sending: Connection) -> None:
    """Works, in the fork, from the last number to the first, until the fork is ended.

    At an exception it stops. The parent then repeats this number itself, and raises there."""
    # Ctrl-C reaches the whole group; the parent handles it and ends the fork.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(os.getppid())
    with contextlib.suppress(Exception):
        for place in reversed(range(len(numbers))):
            sending.send((place, work(numbers[place])))
