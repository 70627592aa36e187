"""Work that is divided between this process and a fork of it, which has all that it works on.

For processes of one thread that hold what cannot be sent to another process, such as modules.
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

_LEAST = 8  # numbers for which a fork is worth its start
_ROOM = 1 << 20  # bytes that the fork may be ahead


@contextlib.contextmanager
def shared[T](work: Callable[[int], T], numbers: Sequence[int]) -> Generator[Callable[[], list[T]]]:
    """What `work` makes of some numbers, in their order, once it is called for.

    Until then a fork, where there is a second core and no second thread, works on the last of them;
    this process does the rest, from the first on, and waits for nothing. What `work` makes must be
    sendable. Raises what `work` raises.
    """
    if len(numbers) < _LEAST or not _may_fork():
        yield lambda: [work(number) for number in numbers]
        return
    with _forked(partial(_work, work, numbers)) as receiving:

        def together() -> list[T]:
            made: dict[int, T] = {}
            for place, number in enumerate(numbers):
                with contextlib.suppress(EOFError):  # the part of a fork that died is done here
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
    """What `work` makes, once it is called for: by a fork, while this process does something else.

    It is done here where there is no second core, or another thread, and where it raises anything
    in the fork, which is so raised here. What it makes must be sendable.
    """
    if not _may_fork():
        yield work
        return
    with _forked(partial(_work, lambda _: work(), [0])) as receiving:

        def made() -> T:
            try:
                return receiving.recv()[1]
            except EOFError:
                return work()

        yield made


def _may_fork() -> bool:
    return (os.cpu_count() or 1) > 1 and threading.active_count() == 1


@contextlib.contextmanager
def _forked(work: Callable[[Connection], None]) -> Generator[Connection]:
    """Where a fork sends what it makes, until it is ended."""
    context = get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    fcntl.fcntl(sending.fileno(), fcntl.F_SETPIPE_SZ, _ROOM)
    worker = context.Process(target=work, args=(sending,), daemon=True)
    with warnings.catch_warnings(action="ignore"):  # of native threads: nobody waits for the fork
        worker.start()
    sending.close()
    try:
        yield receiving
    finally:
        worker.kill()
        worker.join()
        receiving.close()


def _work[T](work: Callable[[int], T], numbers: Sequence[int], sending: Connection) -> None:
    """In the fork: from the last number to the first, until it is ended. What is raised here is
    raised there, too, where that number is not had from here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(os.getppid())
    with contextlib.suppress(Exception):
        for place in reversed(range(len(numbers))):
            sending.send((place, work(numbers[place])))
