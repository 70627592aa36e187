"""Starts the process that runs the programs, waits for it, and explains what ended it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, first_line
from stablehlo_tools.processes import child
from stablehlo_tools.processes.child import seconds_to_meet, virtual_devices
from stablehlo_tools.verify.job import Request, RunAnswer, Side, Stage, read_stage

_MODULE = "stablehlo_tools.verify.execution_process"
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
) -> tuple[RunAnswer, ...]:
    """Has the child answer a request whose programs lie in `directory`, in `timeout` seconds: the
    runs up to the first that differs.

    Raises ToolError, about the file that the child was busy with, when it does not.
    """
    devices = max(run.replicas * run.partitions for run in request.runs)
    environment = _environment(devices, timeout, as_deployed=request.as_deployed)
    outcome = child.ask(
        _MODULE, directory, asdict(request), timeout, environment, runs_programs=True
    )
    if outcome.answer is not None and not outcome.error:
        return tuple(RunAnswer.of(fields) for fields in outcome.answer["runs"])
    stage = read_stage(directory)
    if outcome.error:
        message = f"{_cannot(stage)}: {first_line(outcome.error)}"
    elif outcome.code is None:
        message = _timed_out(stage, devices, timeout, outcome.errors)
    else:
        message = _died(stage, outcome.code, outcome.errors)
    error = ToolError(message)
    error.input_name = artifacts[stage.side if stage else "before"].name
    raise error


def _environment(devices: int, timeout: float, *, as_deployed: bool) -> dict[str, str]:
    """The child's environment: as many CPU devices as needed, and rounding that stays put.

    XLA:CPU drops a narrowing that a widening follows, so that moving an op would change values:
    hence no excess precision, unless `as_deployed`. `XLA_FLAGS` of the caller can overrule that.
    """
    warned = max(1, int(seconds_to_meet(timeout) / 2))
    flags = [f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={warned}"]
    if not as_deployed:
        flags.append("--xla_allow_excess_precision=false")
    return virtual_devices(devices, timeout, flags)


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
    reports = list(_STUCK.finditer(errors))
    if not reports:
        return ""
    last = reports[-1]
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
