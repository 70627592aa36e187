"""A fork server of the lit suite that keeps what each command printed.

    python server.py MODULE PACKAGE LISTENER

MODULE has the `main` of the command; all modules of the PACKAGE beside it are loaded, but for those
that need jax. As in the lit suite a command gets its arguments, directory, environment and streams;
what it writes goes to files in the directory that GOLDEN_RECORD names, and on from there.
"""

import contextlib
import gc
import importlib
import importlib.abc
import json
import os
import pkgutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lit_tests"))

import forked_process
from fork_server import Server
from forked_process import LIT, ONE_THREAD, Request

COMMAND = "stablehlo-tools"
RECORD, SKIPPED, LIMIT = b"GOLDEN_RECORD", b"GOLDEN_SKIPPED", b"GOLDEN_LIMIT"
LOCATED = b"GOLDEN_LOCATED"
QUICK = 3  # seconds that a command may take that runs once more, for its locations
FULL = os.makedev(1, 7)  # /dev/full, which must refuse what is written


def main(module: str, package: str, listener: socket.socket) -> None:
    """Serve until standard input ends. In a fork, run the command and end as it does."""
    environment = dict(os.environb)
    forked_process.MAINS[COMMAND] = module
    load(module, package)
    gc.freeze()
    request = Server(listener).serve()
    if request is not None:
        watch(request, environment)


class WithoutJax(importlib.abc.MetaPathFinder):
    """Refuses to load jax, whose threads would not live on in forks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """None for every other module, which leaves it to the finders that follow."""
        if fullname == "jax" or fullname.startswith("jax."):
            raise ImportError(f"{fullname} is not to be loaded here")


def load(module: str, package: str) -> None:
    """Import the command and all of its package that goes without jax."""
    os.environb[ONE_THREAD] = b"1"
    importlib.import_module(module)
    finder = WithoutJax()
    sys.meta_path.insert(0, finder)
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)
    sys.meta_path.remove(finder)
    del os.environb[ONE_THREAD]


def watch(request: Request, environment: dict[bytes, bytes]) -> NoReturn:
    """Run the command in a fork, write its record, hand on what it printed, and end as it did."""
    own = request.environment
    directory = own.pop(RECORD, b"")
    skipped = own.pop(SKIPPED, b"").decode().split(",")
    limit = float(own.pop(LIMIT, b"600"))
    locate = own.pop(LOCATED, b"")
    if own.get(b"PYTHONPATH", LIT) == LIT:  # lit sets its own where it has run its `diff`
        own[b"PYTHONPATH"] = environment[b"PYTHONPATH"]
    base = f"{os.fsdecode(directory)}/{time.monotonic_ns():020}-{os.getpid()}"
    record: dict[str, Any] = {"arguments": request.arguments}
    if request.arguments and request.arguments[0] in skipped:
        write(f"{base}.json", record | {"skipped": True})
        os._exit(0)
    reader, *writers = request.streams
    captured = captures(writers, base)
    clean = {n: v for n, v in environment.items() if n not in (RECORD, SKIPPED, LIMIT)}
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        streams = (reader, *(os.dup(file) for file in captured))
        # The command's own are closed as it ends, not when this process does.
        for stream in {*writers, *captured}:
            os.close(stream)
        become(Request(request.arguments, request.directory, own, streams), clean)
    os.close(reader)
    status, late = await_end(child, limit)
    record["seconds"] = round(time.monotonic() - start, 3)
    record["status"] = "late" if late else status
    record["joined"] = captured[0] == captured[1]
    located = located_arguments(request.arguments, f"{base}.mlir")
    if status == 0 and locate and located and record["seconds"] < QUICK:
        if os.fork() == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            output = os.open(f"{base}.loc", os.O_WRONLY | os.O_CREAT, 0o644)
            streams = (nothing, output, os.dup(nothing))
            become(Request(located, request.directory, own, streams), clean)
        os.wait()
    write(f"{base}.json", record)
    hand_on(captured[0], writers[0])
    if not record["joined"]:
        hand_on(captured[1], writers[1])
    os._exit(status if status >= 0 else 128 - status)


def become(request: Request, environment: dict[bytes, bytes]) -> NoReturn:
    """In a fork: run the command, and end as it does."""
    forked_process.run(COMMAND, request, environment)


def located_arguments(arguments: list[str], path: str) -> list[str]:
    """The same command with the locations that its text leaves out; empty if it cannot be."""
    plain = arguments[:1] == ["opt"] and not {"-", "--verify-diagnostics"}.intersection(arguments)
    if not plain or "--print-locations" in arguments:
        return []
    if "-o" not in arguments[:-1]:
        return [*arguments, "--print-locations"]
    output = arguments.index("-o") + 1
    if not arguments[output].endswith(".mlir"):
        return []
    return [*arguments[:output], path, *arguments[output + 1 :], "--print-locations"]


def captures(writers: list[int], base: str) -> list[int]:
    """The files that take the place of standard output and error: one where they were one."""
    files: list[int] = []
    for stream, suffix in zip(writers, ("out", "err"), strict=True):
        state = os.fstat(stream)
        if stat.S_ISCHR(state.st_mode) and state.st_rdev == FULL:
            files.append(stream)
        elif files and os.path.sameopenfile(*writers):
            files.append(files[0])
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            files.append(os.open(f"{base}.{suffix}", flags, 0o644))
    return files


def await_end(child: int, limit: float) -> tuple[int, bool]:
    """The exit status of a child, negative for a signal, and whether it had to be ended."""
    late = False

    def end(*_: object) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)

    def end_with_client(*_: object) -> NoReturn:
        os.kill(child, signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGTERM, end_with_client)
    signal.setitimer(signal.ITIMER_REAL, limit)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status), late


def hand_on(file: int, stream: int) -> None:
    """Write what was captured where the command would have written it."""
    if file == stream:
        return
    os.lseek(file, 0, os.SEEK_SET)
    with contextlib.suppress(BrokenPipeError):
        while data := os.read(file, 1 << 16):
            while data:
                data = data[os.write(stream, data) :]


def write(path: str, record: dict[str, Any]) -> None:
    """Write a record whole."""
    Path(f"{path}~").write_text(json.dumps(record))
    Path(f"{path}~").rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
