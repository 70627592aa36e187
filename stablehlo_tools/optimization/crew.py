"""The workers: their answers are stored, and a crash of one does not affect the others.

`CandidateModule` refers to a module in the store. Call the methods from at most as many threads as
there are workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.proof import CandidateProof
from stablehlo_tools.optimization.remote_workers import FLAGS, WORKER, RemoteWorkers
from stablehlo_tools.optimization.store import AnswerStore
from stablehlo_tools.processes.child import Conversation, decoded_error
from stablehlo_tools.processes.forks import REFUSED
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions

REWRITE, EVALUATE, PROVE, ADVISE = "rewrite", "evaluate", "prove", "advise"  # its jobs
KEEP_LAYERS = "keep layers"  # another one
_LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class CompilationMachine:
    """The machine to compile for: `hardware` is a name or a file, `profile` its contents.

    `options` are the compiler's, in the form of `CompilerOptions.texts`.
    """

    target: str
    hardware: str
    profile: str
    compiler: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizedProgram:
    """The artifact to optimize: the digest of its bytes, and its name in messages."""

    digest: str
    name: str


@dataclass(frozen=True)
class CandidateModule:
    """A module of a candidate.

    `whole`: it is a program for all devices, whose collectives the compiler inserts.
    `predicted_ns`, `predicted_bytes`: predictions of the model of XLA's schedulers, or None.
    `said`: warnings of the passes.
    """

    digest: str
    whole: bool
    predicted_ns: float | None
    predicted_bytes: float | None
    said: tuple[str, ...] = ()


class OutOfTimeError(Exception):
    """The budget is spent."""


class Crew:
    """Workers for one program and machine, until a deadline (of `time.monotonic`).

    The workers of `executor` do the jobs, if it is given and works; `remarks` gets a line if it
    broke.
    """

    def __init__(
        self,
        workers: int,
        store: AnswerStore,
        program: OptimizedProgram,
        machine: CompilationMachine,
        deadline: float,
        executor: Executor | None = None,
        remarks: list[str] | None = None,
    ) -> None:
        self._remarks: list[str] = [] if remarks is None else remarks
        self._remote = executor and RemoteWorkers(executor, machine.target)
        self._store = store
        self._program = program
        self._machine = machine
        self._deadline = deadline
        # Starts all workers, because a worker ends with the thread that started it.
        self._starter = ThreadPoolExecutor(1)
        self._idle: queue.SimpleQueue[Conversation | None] = queue.SimpleQueue()
        self._started: list[Conversation] = []
        self._ended = False
        self._lock = threading.Lock()
        self._asked: dict[tuple[object, ...], Future[Any]] = {}
        for _ in range(workers):
            self._idle.put(None)  # started when first needed

    def rewrite(self, module: CandidateModule | None, passes: str) -> CandidateModule:
        """Runs passes on a module, or on the program itself if `module` is None.

        Raises ToolError if a pass refuses it or ends its process, OutOfTimeError.
        """
        of = None if module is None else module.digest
        answer = self._ask_once(
            {"job": REWRITE, "module": of, "passes": passes, "hardware": self._machine.hardware},
            [self._machine.profile],
            doing=f"running {passes}" if passes else "reading the program",
        )
        return CandidateModule(
            answer["blob"],
            answer["whole"],
            answer["predicted_ns"],
            answer["predicted_bytes"],
            tuple(answer["said"]),
        )

    def evaluate(
        self,
        module: CandidateModule | None,
        more: CompilerOptions = NO_OPTIONS,
        *,
        with_code: bool = False,
    ) -> Figures:
        """Compiles a module, or the program itself if `module` is None, and returns its figures.

        `more` options are added to the machine's. `with_code` also generates the code, which
        changes no figure. Raises ToolError if the compiler refuses it or dies, OutOfTimeError.
        """
        machine = self._machine
        options = CompilerOptions.parse(machine.options) | more
        answer = self._ask_once(
            {
                "job": EVALUATE,
                "module": None if module is None else module.digest,
                "hardware": machine.hardware,
                "target": machine.target,
                "options": options.texts(),
                "with_code": with_code,
            },
            [machine.profile, machine.compiler, *(os.environ.get(flag) for flag in FLAGS)],
            doing="compiling",
        )
        blob = answer["blob"]
        return Figures(**{k: v for k, v in answer.items() if k != "blob"}, schedule=blob)

    def advise(self) -> tuple[str, ...]:
        """Returns the pass pipelines that `inspect` advises for the program, largest gain first.

        Raises ToolError if the program cannot be timed, OutOfTimeError.
        """
        head = {"job": ADVISE, "module": None, "hardware": self._machine.hardware}
        return tuple(self._ask_once(head, [self._machine.profile], "advising")["pipelines"])

    def keep_layers(self, kept: int, least: int) -> tuple[str | None, int]:
        """Returns the digest of the program with `kept` of its layers, and the number of all.

        Returns None instead of the digest if fewer than `least` layers repeat, or if they cannot be
        left out. Raises ToolError if the process dies, OutOfTimeError.
        """
        head = {"job": KEEP_LAYERS, "module": None, "kept": kept, "least": least}
        answer = self._ask_once(head, [], "leaving out layers")
        return answer["blob"] if answer["layers"] else None, answer["layers"]

    def prove(
        self, module: CandidateModule, figures: tuple[Figures, Figures], limit: float
    ) -> CandidateProof:
        """Proves a module against the program. `figures` are of both, the program's first; `limit`
        is in bytes of a device.

        Raises ToolError if the process dies, OutOfTimeError.
        """
        head = {"job": PROVE, "module": module.digest, "limit": limit}
        answer = self._ask_once(
            {**head, "figures": tuple(map(astuple, figures))}, [], doing="comparing it"
        )
        return CandidateProof.from_json(answer)

    def end(self) -> None:
        """Ends all workers at once, including busy ones."""
        with self._lock:
            self._ended = True
            started = list(self._started)
        if self._remote is not None:
            self._remote.end()
        for worker in started:
            worker.end()
        self._starter.shutdown(wait=False)

    def _ask_once(self, head: dict[str, Any], depends: list[object], doing: str) -> dict[str, Any]:
        """Returns the answer of this or an earlier run; a second thread waits for the first."""
        question = (self._program.digest, tuple(sorted(head.items())), tuple(depends))
        with self._lock:
            known = self._asked.get(question)
            mine = known is None
            if known is None:
                known = self._asked[question] = Future()
        if mine:
            try:
                answer = self._store.answer(*question)
                if answer is None or not self._store.has(answer.get("blob", "")):
                    answer = self._ask(head, doing)
                    # A refusal by chance, such as a lack of memory, may not repeat.
                    if REFUSED not in answer or not decoded_error(answer[REFUSED]).by_chance:
                        self._store.keep(answer, *question)
                if REFUSED in answer:
                    raise decoded_error(answer[REFUSED])
                known.set_result(answer)
            except BaseException as error:
                known.set_exception(error)
        return known.result()

    def _ask(self, head: dict[str, Any], doing: str) -> dict[str, Any]:
        """Asks a worker. A refusal is also an answer; raises OutOfTimeError after the deadline."""
        seconds = self._deadline - time.monotonic()
        if seconds < _LEAST_SECONDS or self._ended:
            raise OutOfTimeError
        message = {**head, "name": self._program.name, "doing": doing, "seconds": seconds}
        files = {"artifact": self._program.digest}
        if head["module"] is not None:
            files["module"] = head["module"]
        answer, data = self._answer(message, files)
        # The worker ended the job at the deadline.
        if time.monotonic() >= self._deadline and REFUSED in answer:
            raise OutOfTimeError
        return answer if REFUSED in answer else {**answer, "blob": self._store.keep_blob(data)}

    def _answer(
        self, message: dict[str, Any], files: Mapping[str, str]
    ) -> tuple[dict[str, Any], bytes]:
        """Returns the answer of a worker to a message with files, which are digests."""
        if self._remote is not None:
            sent = {name: self._store.path(digest).read_bytes() for name, digest in files.items()}
            try:
                return self._remote.ask(message, sent)
            except TimeoutError:
                raise OutOfTimeError from None
            except BrokenExecutor as error:
                self._remote = None
                self._remarks.append(f"the executor broke, so this machine did the rest: {error}")
        paths = {name: str(self._store.path(digest)) for name, digest in files.items()}
        with self._worker() as worker:
            return worker.ask({**message, **paths}, b"")

    @contextlib.contextmanager
    def _worker(self) -> Generator[Conversation]:
        """Yields an idle worker; a worker that has ended is replaced.

        Raises ToolError if the worker ends in between."""
        worker = self._idle.get()
        try:
            if worker is None or worker.ended:
                with self._lock:
                    if self._ended:
                        raise OutOfTimeError
                    worker = self._starter.submit(Conversation, WORKER).result()
                    self._started.append(worker)
            yield worker
        except (OSError, EOFError):
            if self._ended:
                raise OutOfTimeError from None
            raise ToolError("another process ended the process that compiles") from None
        finally:
            # Also if it has ended: the next thread then replaces it.
            self._idle.put(worker)
