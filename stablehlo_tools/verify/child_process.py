"""Starts the process that runs the programs, waits for it, and explains what ended it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes.child import wait_or_end, with_package
from stablehlo_tools.verify.job import Answer, Request, Side, Stage, read_answer, read_stage

_ERRORS = "errors.txt"
_FATAL = re.compile(
    r"^F\d{4} [\d:.]+ +\d+ [^\]]+\] (?P<what>.*)$|^(?P<llvm>LLVM ERROR: .*)$", re.MULTILINE
)
_FRAME = re.compile(r'^  File ".*", line \d+ in (?P<name>\w+)$', re.MULTILINE)
_STUCK = re.compile(
    r"`(?P<what>[^`]*?) RendezvousKey\{.*?global_devices=\[(?P<devices>[\d, ]*)\].*?"
    r"Expected (?P<expected>\d+) threads to join the rendezvous, but (only (?P<arrived>\d+))?"
)
_INTERPRETER_STUCK = "rendezvous timed out"
_DEADLOCK = "a deadlock, a loop without end, or too much work"


def run_child(
    directory: Path, request: Request, artifacts: Mapping[Side, Artifact], timeout: float
) -> Answer:
    """Has the child answer a request whose programs lie in `directory`, in `timeout` seconds.

    Raises ToolError, about the file that the child was busy with, when it does not.
    """
    request.write(directory)
    devices = max(run.replicas * run.partitions for run in request.runs)
    options = ["-P", "-X", "faulthandler"]  # import nothing from here; a stack when it crashes
    command = [sys.executable, *options, "-m", "stablehlo_tools.verify.execution_process"]
    with (directory / _ERRORS).open("wb") as errors:
        child = subprocess.Popen(
            [*command, str(directory)],
            env=_environment(devices, timeout, as_deployed=request.as_deployed),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        code = wait_or_end(child, timeout)
    answer = read_answer(directory)
    if answer is not None and not answer.error:
        return answer
    stage = (answer.stage if answer else None) or read_stage(directory)
    errors_text = (directory / _ERRORS).read_text(encoding="utf-8", errors="replace")
    if answer is not None:
        raise _about(stage, artifacts, f"{_cannot(stage)}: {answer.error}")
    if code is None:
        raise _about(stage, artifacts, _timed_out(stage, devices, timeout, errors_text))
    raise _about(stage, artifacts, _died(stage, code, errors_text))


def _environment(devices: int, timeout: float, *, as_deployed: bool) -> dict[str, str]:
    """The child's environment: as many CPU devices as needed, and rounding that stays put.

    XLA:CPU drops a narrowing that a widening follows, so that moving an op would change values:
    hence no excess precision, unless `as_deployed`. `XLA_FLAGS` of the caller can overrule that.
    """
    stuck = min(timeout, max(40.0, timeout / 4))
    flags = [
        f"--xla_cpu_collective_call_terminate_timeout_seconds={math.ceil(stuck)}",
        f"--xla_cpu_collective_timeout_seconds={math.ceil(stuck)}",
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={max(1, int(stuck / 2))}",
    ]
    if not as_deployed:
        flags.append("--xla_allow_excess_precision=false")
    flags.append(os.environ.get("XLA_FLAGS", ""))
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    return {
        **with_package(inherited),
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _about(stage: Stage | None, artifacts: Mapping[Side, Artifact], message: str) -> ToolError:
    error = ToolError(message)
    error.input_name = artifacts[stage.side if stage else "before"].name
    return error


def _cannot(stage: Stage | None) -> str:
    if stage is None:
        return "the process that runs the programs did not start"
    backend = "the reference interpreter" if stage.backend == "interpreter" else "XLA:CPU"
    return f"{backend} failed while {stage.doing} it"


def _timed_out(stage: Stage | None, devices: int, timeout: float, errors: str) -> str:
    limit = f"within {timeout:g} s (--timeout)"
    if stage is None or stage.doing != "running":
        return f"not compiled {limit}"
    on = f"on {devices} devices, " if devices > 1 else ""
    return f"did not finish {limit} {on}in trial {stage.trial}: {_stuck(errors) or _DEADLOCK}"


def _died(stage: Stage | None, code: int, errors: str) -> str:
    stuck = _stuck(errors)
    if stuck and stage is not None:
        return f"did not finish in trial {stage.trial}: {stuck}"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{_cannot(stage)} and ended its process ({how}): {_last_words(errors)}"


def _stuck(errors: str) -> str:
    """Which collective waited for whom, in words; empty where none did."""
    if _INTERPRETER_STUCK in errors:
        return "a deadlock: a collective of the reference interpreter waited 3 s for the others"
    found = list(_STUCK.finditer(errors))
    if not found:
        return ""
    last = found[-1]
    arrived = f"{last['arrived']} of {last['expected']}" if last["arrived"] else "not all"
    return (
        f"a deadlock: {arrived} devices came to the {last['what']} of devices [{last['devices']}]"
    )


def _last_words(errors: str) -> str:
    """What the process said when it ended: its message, or the function that it was in."""
    fatal = _FATAL.search(errors)
    if fatal:
        return (fatal["what"] or fatal["llvm"]).strip()
    frame = _FRAME.search(errors)
    if frame:
        return f"in {frame['name']}"
    return next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
