"""Every process of a job knows what the others are doing, and ends where one of them is lost.

A collective waits for ever for a process that is gone, and XLA cannot be interrupted. So a thread
of each process tells the others twice a second, by the key-value store of `jax.distributed`, what
it is doing, and reads what they do. Where one has failed, ended early, has not been heard of for
`silence` seconds, or everybody has been waiting for it for `patience` seconds, the process ends
with one message that names the rank and what it was doing.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, NoReturn

import jax

from stablehlo_tools import bindings
from stablehlo_tools.diagnostics import ToolError, first_line, naming
from stablehlo_tools.mpmd.runtime import last_words

_PERIOD = 0.5  # seconds
_LINGER = 3.0  # seconds that a process stays to be read, where it has found out a fault
_PREFIX = "stablehlo_tools"
_FAULT = 1  # exit code
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_jobs = 0  # of this process, in the same order on all


@dataclass
class Status:
    """What a process does. `step`: the one that it is in or behind; `ended`: why it is no longer
    there, "" where all is well."""

    doing: str = "starting"
    step: int = -1
    since: float = 0.0  # seconds that it has been doing so
    closed: bool = False
    ended: str = ""
    beat: int = 0


class Watch:
    """Of one job, from one process."""

    def __init__(self, name: str, digest: str, silence: float, patience: float) -> None:
        global _jobs  # noqa: PLW0603 - jobs are numbered alike on all processes
        _jobs += 1
        self._name, self._digest = name, digest
        self._silence, self._patience = silence, patience
        self._client = bindings.coordination_client() if jax.process_count() > 1 else None
        self._me, self._count = jax.process_index(), jax.process_count()
        self._keys = f"{_PREFIX}/{_jobs}"
        self._own = Status()
        self._changed = time.monotonic()
        self._others: dict[int, Status] = {}
        self._heard: dict[int, float] = {}
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._words: IO[str] | None = None
        self._ending = threading.Lock()

    def agree(self) -> None:
        """Waits until all processes have come, and begins to watch. Raises ToolError where they
        have other sets, which every process then says."""
        if self._client is None:
            return
        atexit.register(self._leave)
        self._client.key_value_set(f"{self._keys}/digest/{self._me}", self._digest)
        found: dict[int, str] = {}
        for process in range(self._count):
            try:
                found[process] = self._client.blocking_key_value_get(
                    f"{self._keys}/digest/{process}", int(1000 * self._patience)
                )
            except Exception:  # XLA's own types
                raise ToolError(
                    f"rank {process} did not load a set within {self._patience:g} s"
                ) from None
        odd = [process for process, digest in found.items() if digest != found[0]]
        if odd:
            ranks = ", ".join(map(str, odd))
            raise ToolError(
                f"rank {ranks} has another set than rank 0: {found[odd[0]][:12]} and "
                f"{found[0][:12]}, by the bytes of all files"
            )
        now = time.monotonic()
        self._heard = dict.fromkeys(found, now)
        self._answered = now
        self._words = _last_words(self._me)
        for work in (self._tell, self._look):
            threading.Thread(target=work, daemon=True).start()

    @property
    def doing(self) -> str:
        """What this process does, in words for others."""
        return self._own.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._own.doing, self._changed = what, time.monotonic()
        self._say(what)

    @contextmanager
    def during(self, what: str, number: int | None = None) -> Generator[None]:
        """Says what is being done; an error is told to the others, or is about one of them. Raises
        ToolError where the job is closed."""
        if self._own.closed:
            raise ToolError("this job is closed")
        self.doing = what
        if number is not None:
            self._own.step = number
        try:
            with naming(self._name):
                yield
        except ToolError as error:
            self.failed(error)
            raise
        except jax.errors.JaxRuntimeError as error:  # perhaps of another process's end
            seconds = 0.0 if _OUT_OF_MEMORY in str(error) else 2 * self._silence
            # The fault of another process may be known a little later.
            until = time.monotonic() + (seconds if self._client is not None else 0.0)
            while not (fault := self._fault()) and time.monotonic() < until:
                time.sleep(_PERIOD / 2)
            if fault:
                self._end(fault)
            self.failed(error)
            raise
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.doing = f"behind {what}"

    def failed(self, error: BaseException) -> None:
        """Tells the others why this process ends."""
        if self._client is None or self._own.ended:
            return
        if isinstance(error, SystemExit) and not error.code:
            self._own.ended = self._early()
        else:
            said = f"{type(error).__name__}: {first_line(str(error))}"
            said = error.diagnostic.message if isinstance(error, ToolError) else said
            self._own.ended = f"failed {self._where()}: {said}"
        self._set_at_last()

    def close(self) -> None:
        """Says that all is done."""
        self._own.closed = True
        if self._client is not None:
            self._set_at_last()
        self._stop.set()

    def _leave(self) -> None:
        """At the end of the process."""
        if self._own.closed:
            return
        error = getattr(sys, "last_exc", None)
        if error is not None:
            self.failed(error)
        elif not self._own.ended:
            self._own.ended = self._early()
            self._set_at_last()
        # The others end, too: jax's own goodbye would wait for them for minutes, and abort.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LINGER if self._me == 0 else 0)
        os._exit(_FAULT)

    def _early(self) -> str:
        return f"ended {self._where()}, without closing the job"

    def _where(self) -> str:
        doing = self._own.doing
        return doing if doing.startswith("behind ") else f"in {doing}"

    def _set(self) -> None:
        assert self._client is not None
        self._own.since = time.monotonic() - self._changed
        self._own.beat += 1
        if self._own.closed or self._own.ended:
            self._say("")
        try:
            text = json.dumps(asdict(self._own))
            self._client.key_value_set(f"{self._keys}/{self._me}", text, allow_overwrite=True)
        except Exception:  # XLA's own types; `_look` says when it has been so for too long
            return
        self._answered = time.monotonic()

    def _set_at_last(self) -> None:
        """Tells the others, if the coordinator takes it within a moment: it may be gone."""
        telling = threading.Thread(target=self._set, daemon=True)
        try:
            telling.start()
        except RuntimeError:  # Python ends, and starts no threads any more
            if time.monotonic() - self._answered < self._silence:
                self._set()
            return
        telling.join(_LINGER)

    def _say(self, what: str) -> None:
        """Says what should be said of this process if it ends now."""
        if self._words is not None:
            with suppress(OSError, ValueError):
                self._words.write(f"{what}\n")
                self._words.flush()

    def _tell(self) -> None:
        """Tells and reads, until it is over; a call may hang."""
        assert self._client is not None
        while not self._stop.wait(_PERIOD):
            self._set()
            try:
                listed = self._client.key_value_dir_get(self._keys)
            except Exception:  # as above
                continue
            for key, text in listed:
                name = key.rsplit("/", 1)[1]
                if "/digest/" in key or int(name) == self._me:
                    continue
                status = Status(**json.loads(text))
                if status != self._others.get(int(name)):
                    self._others[int(name)] = status
                    self._heard[int(name)] = time.monotonic()

    def _look(self) -> None:
        """Ends the process where it must."""
        while not self._stop.wait(_PERIOD):
            fault = self._fault()
            if fault and not self._own.ended:
                self._end(fault)

    def _end(self, fault: str) -> NoReturn:
        """Ends the process for what is wrong with another one: nothing can go on without it, and
        what waits in XLA cannot be interrupted."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        print(f"error: {fault}", file=sys.stderr, flush=True)
        self._own.ended = f"ended for {fault}"
        self._set_at_last()
        time.sleep(_LINGER if self._me == 0 else 0)
        os._exit(_FAULT)

    def _fault(self) -> str:
        """What is wrong with another process; "" where nothing is."""
        now = time.monotonic()
        for process, status in sorted(self._others.items()):
            if status.ended and not status.ended.startswith("ended for "):
                return f"rank {process} {status.ended}"
        for process, status in sorted(self._others.items()):
            if status.ended:
                return status.ended.removeprefix("ended for ")
            if status.closed and status.step < self._own.step:
                return (
                    f"rank {process} closed the job behind step {status.step}, and rank "
                    f"{self._me} is in step {self._own.step}"
                )
        if now - self._answered > self._silence and self._me != 0:
            last = self._others.get(0, Status())
            return (
                f"rank 0, which coordinates the job, has not answered for "
                f"{now - self._answered:.0f} s; then it was in: {last.doing}"
            )
        for process, heard in sorted(self._heard.items()):
            last = self._others.get(process, Status())
            if process != self._me and not last.closed and now - heard > self._silence:
                return (
                    f"rank {process} has not been heard of for {now - heard:.0f} s; then it was "
                    f"in: {last.doing}"
                )
        # The process that all others wait for.
        waiting = now - self._changed
        if self._own.doing.startswith("behind") or waiting < self._patience:
            return ""
        late = min(self._others.items(), key=lambda item: (item[1].step, item[0]), default=None)
        if late is None:
            return ""
        process, status = late
        return (
            f"rank {self._me} has waited for {waiting:.0f} s in {self._own.doing}; rank {process} "
            f"is the last one, {status.since:.0f} s in: {status.doing}"
        )


def _last_words(rank: int) -> IO[str] | None:
    """What speaks for this process where it cannot: a process of its own, which outlives it."""
    coordinator = bindings.coordinator_address() if rank else ""
    command = [sys.executable, "-S", "-I", last_words.__file__, str(rank), coordinator]
    listening = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    return listening.stdin
