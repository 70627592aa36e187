"""Tells every process of a job what the others are doing, and ends it if one of them is lost.

A collective waits forever for a process that has ended, and XLA cannot be interrupted. So a thread
of each process writes its activity to the key-value store of `jax.distributed` twice a second, and
reads that of the others. The process ends if another one has failed or ended early. It also ends if
another one has been silent for `silence` seconds, or has held up all others for `patience` seconds.
The message names the rank and its last activity.
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
_LINGER = 3.0  # seconds that rank 0 stays after a fault, so that others can read its status
_PREFIX = "stablehlo_tools"
_FAULT = 1  # exit code
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_jobs = 0  # counts the jobs of this process, in the same order on all processes


@dataclass
class Status:
    """The activity of a process. `step` is the current or last step. `ended` is the reason for its
    end, "" while it runs."""

    doing: str = "starting"
    step: int = -1
    since: float = 0.0  # seconds since `doing` changed
    closed: bool = False
    ended: str = ""
    beat: int = 0


class Watch:
    """Watches one job from one process."""

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
        """Waits until all processes have arrived, and starts to watch.

        Raises ToolError if they have loaded different sets. Every process then raises it.
        """
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
                f"rank {ranks} has another set than rank 0: digests {found[odd[0]][:12]} and "
                f"{found[0][:12]} over all files"
            )
        self._answered = time.monotonic()
        self._heard = dict.fromkeys(found, self._answered)
        # the process that reports if this one is killed
        coordinator = bindings.coordinator_address() if self._me else ""
        self._words = subprocess.Popen(
            [sys.executable, "-S", "-I", last_words.__file__, str(self._me), coordinator],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ).stdin
        for work in (self._tell, self._look):
            threading.Thread(target=work, daemon=True).start()

    @property
    def doing(self) -> str:
        """The activity of this process, in words for the others."""
        return self._own.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._own.doing, self._changed = what, time.monotonic()
        self._say(what)

    @contextmanager
    def during(self, what: str, number: int | None = None) -> Generator[None]:
        """Reports an activity. An error within it is reported to the others.

        If the error is a consequence of another process's failure, this process ends with that
        message. Raises ToolError if the job is closed.
        """
        if self._own.closed:
            raise ToolError("this job is closed")
        self.doing = what
        if number is not None:
            self._own.step = number
        try:
            with naming(self._name):
                yield
        except ToolError as error:
            self.report_failure(error)
            raise
        except jax.errors.JaxRuntimeError as error:  # perhaps due to another process
            seconds = 0.0 if _OUT_OF_MEMORY in str(error) else 2 * self._silence
            # The fault of another process may be known a little later.
            until = time.monotonic() + (seconds if self._client is not None else 0.0)
            while not (fault := self._fault()) and time.monotonic() < until:
                time.sleep(_PERIOD / 2)
            if fault:
                self._end(fault)
            self.report_failure(error)
            raise
        except BaseException as error:
            self.report_failure(error)
            raise
        finally:
            self.doing = f"after {what}"

    def report_failure(self, error: BaseException) -> None:
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
        """Tells the others that this process is done."""
        self._own.closed = True
        if self._client is not None:
            self._set_at_last()
        self._stop.set()

    def _leave(self) -> None:
        """Runs at exit: tells the others why, unless the job is closed."""
        if self._own.closed:
            return
        error = getattr(sys, "last_exc", None)
        if error is not None:
            self.report_failure(error)
        elif not self._own.ended:
            self._own.ended = self._early()
            self._set_at_last()
        # Exit at once: at shutdown jax would wait minutes for the other processes, and then abort.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LINGER if self._me == 0 else 0)
        os._exit(_FAULT)

    def _early(self) -> str:
        return f"ended {self._where()}, without closing the job"

    def _where(self) -> str:
        doing = self._own.doing
        return doing if doing.startswith("after ") else f"in {doing}"

    def _set(self) -> None:
        assert self._client is not None
        self._own.since = time.monotonic() - self._changed
        self._own.beat += 1
        if self._own.closed or self._own.ended:
            self._say("")
        try:
            text = json.dumps(asdict(self._own))
            self._client.key_value_set(f"{self._keys}/{self._me}", text, allow_overwrite=True)
        except Exception:  # XLA's own types; `_look` reports if this lasts too long
            return
        self._answered = time.monotonic()

    def _set_at_last(self) -> None:
        """Tells the others, and waits a moment at most: the coordinator may be gone."""
        telling = threading.Thread(target=self._set, daemon=True)
        try:
            telling.start()
        except RuntimeError:  # at exit Python starts no more threads
            if time.monotonic() - self._answered < self._silence:
                self._set()
            return
        telling.join(_LINGER)

    def _say(self, what: str) -> None:
        """Records the activity that is reported if this process is killed now."""
        if self._words is not None:
            with suppress(OSError, ValueError):
                self._words.write(f"{what}\n")
                self._words.flush()

    def _tell(self) -> None:
        """Writes and reads activities until the job is closed. A call may hang."""
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
        """Ends the process after a fault of another one."""
        while not self._stop.wait(_PERIOD):
            fault = self._fault()
            if fault and not self._own.ended:
                self._end(fault)

    def _end(self, fault: str) -> NoReturn:
        """Ends the process because of a fault of another one.

        It cannot continue without it, and a wait within XLA cannot be interrupted.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        print(f"error: {fault}", file=sys.stderr, flush=True)
        self._own.ended = f"ended for {fault}"
        self._set_at_last()
        time.sleep(_LINGER if self._me == 0 else 0)
        os._exit(_FAULT)

    def _fault(self) -> str:
        """Returns the fault of another process; "" if there is none."""
        now = time.monotonic()
        for process, status in sorted(self._others.items()):
            if status.ended and not status.ended.startswith("ended for "):
                return f"rank {process} {status.ended}"
        for process, status in sorted(self._others.items()):
            if status.ended:
                return status.ended.removeprefix("ended for ")
            if status.closed and status.step < self._own.step:
                return (
                    f"rank {process} closed the job after step {status.step}, but rank {self._me} "
                    f"is in step {self._own.step}"
                )
        if now - self._answered > self._silence and self._me != 0:
            last = self._others.get(0, Status())
            return (
                "rank 0, which coordinates the job, has not answered for "
                f"{now - self._answered:.0f} s; its last activity: {last.doing}"
            )
        for process, heard in sorted(self._heard.items()):
            last = self._others.get(process, Status())
            if process != self._me and not last.closed and now - heard > self._silence:
                return (
                    f"no sign of rank {process} for {now - heard:.0f} s; its last activity: "
                    f"{last.doing}"
                )
        # the process that all others wait for
        waiting = now - self._changed
        if self._own.doing.startswith("after") or waiting < self._patience:
            return ""
        late = min(self._others.items(), key=lambda item: (item[1].step, item[0]), default=None)
        if late is None:
            return ""
        process, status = late
        return (
            f"rank {self._me} has waited for {waiting:.0f} s in {self._own.doing}; the last rank "
            f"is {process}, for {status.since:.0f} s in: {status.doing}"
        )
