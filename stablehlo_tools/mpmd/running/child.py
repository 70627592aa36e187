"""Child processes that run programs: how they are started, what they answer, what ended them.

A request and an answer are JSON files in a directory that both sides share; arrays lie beside. The
parent holds the other end of a child's standard input: a child ends when its parent is gone.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import Diagnostic, ToolError, first_line, note
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.child import end_group, wait_or_end, with_package
from stablehlo_tools.processes.ending import how_it_ended, last_words

REQUEST, ANSWER, ERRORS = "request.json", "answer.json", "errors.txt"
_PACKAGE = "stablehlo_tools.mpmd.running"
_STANDARD_INPUT = 0


def inputs_of(rank: int) -> str:
    """The file with the arguments of a rank."""
    return f"inputs_{rank}.npz"


def outputs_of(rank: int) -> str:
    """The file with the results of a rank."""
    return f"outputs_{rank}.npz"


def command(module: str, *words: str) -> list[str]:
    """What starts a module of this package."""
    return [sys.executable, "-P", "-X", "faulthandler", "-m", f"{_PACKAGE}.{module}", *words]


def environment(devices: int, timeout: float, *, loose: bool = False) -> dict[str, str]:
    """The variables of a process with so many CPU devices.

    Its compiler keeps to the rounding of programs, or where `loose` rounds coarse floats less.
    """
    stuck = math.ceil(min(timeout, max(40.0, timeout / 4)))
    flags = [
        f"--xla_cpu_collective_call_terminate_timeout_seconds={stuck}",
        f"--xla_cpu_collective_timeout_seconds={stuck}",
        f"--xla_allow_excess_precision={str(loose).lower()}",
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
    ]
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("JAX_") and not name.lower().endswith("_proxy")
    }
    return {
        **with_package(kept),
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def ask(
    module: str,
    directory: Path,
    request: dict[str, Any],
    devices: int,
    timeout: float,
    what: str,
    *,
    loose: bool = False,
) -> dict[str, Any]:
    """Has a module of this package answer a request. `what` it does goes into messages.

    `loose`: see `environment`. Raises ToolError for what it raised, and where it died or took more
    than `timeout` seconds.
    """
    (directory / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    (directory / ANSWER).unlink(missing_ok=True)
    with (directory / ERRORS).open("wb") as errors:
        process = subprocess.Popen(
            command(module, str(directory)),
            env=environment(devices, timeout, loose=loose),
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = wait_or_end(process, timeout)
        finally:
            end(process)
    if code is None:
        raise ToolError(f"{what} took more than {timeout:g} s (--timeout) and was stopped")
    return _answer(directory, code, what)


def main(directory: Path, answer: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Answers the request that lies in a directory; what goes wrong is an answer, too."""
    listen(lambda: None)
    activity.trust_input()  # the parent has read it, and tells how this process ended
    request = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
    try:
        found = answer(directory, request)
    except ToolError as error:
        found = {"refused": _encoded(error), "input": error.input_name}
    except Exception as error:  # whatever XLA, JAX or the interpreter has to say
        found = {"error": first_line(str(error) or type(error).__name__)}
    (directory / ANSWER).write_text(json.dumps(found), encoding="utf-8")


def listen(told: Callable[[], None]) -> None:
    """Calls `told` when the parent says something, and ends the process when it is gone."""

    def follow() -> None:
        while os.read(_STANDARD_INPUT, 1):  # not sys.stdin, whose lock ends Python badly
            told()
        os._exit(1)  # whatever hangs

    threading.Thread(target=follow, daemon=True).start()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, if it runs, and what it is told things by."""
    end_group(process)
    assert process.stdin is not None
    process.stdin.close()


def said(path: Path) -> str:
    """What a process wrote to its standard error."""
    return path.read_text(encoding="utf-8", errors="replace")


def _answer(directory: Path, code: int, what: str) -> dict[str, Any]:
    file = directory / ANSWER
    if not file.exists():
        errors = said(directory / ERRORS)
        raise ToolError(f"the process {how_it_ended(code, what)}", notes=last_words(errors))
    found = json.loads(file.read_text(encoding="utf-8"))
    if "error" in found:
        raise ToolError(f"{what} failed: {found['error']}")
    if "refused" in found:
        message, *notes = found["refused"]
        error = ToolError(message, notes=tuple(note(text) for text in notes))
        error.input_name = found["input"]
        raise error
    return found


def _encoded(error: ToolError) -> list[str]:
    """The message of an error and of its notes, each with its place."""
    return [_placed(found) for found in (error.diagnostic, *error.diagnostic.notes)]


def _placed(found: Diagnostic) -> str:
    place = found.place.render("").strip()
    return f"{found.message} (at {place})" if place.strip(":") else found.message
