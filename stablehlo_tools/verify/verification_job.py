"""The child that runs the programs: its request, its answer, and errors that explain its end.

Request and answer are files (`processes.child`) in a directory that both sides share. A child also
writes its current `JobStage`. If it ends without an answer, the error is made of the stage and of
its standard error.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.diagnostics import ToolError, first_line
from stablehlo_tools.processes import child
from stablehlo_tools.processes.child import seconds_to_meet, virtual_devices
from stablehlo_tools.verify.comparison import BITWISE, OutputComparison, Rule
from stablehlo_tools.verify.signatures import SignatureValue

_STAGE = "stage.pickle"
_INTERPRETER_STUCK = "rendezvous timed out"
_DEADLOCK = "a deadlock, a loop without end, or too much work"

Side = Literal["before", "after"]
SIDES: tuple[Side, Side] = ("before", "after")

# partitioned: a module that its shardings divide. per_device: the module of each device.
# interpreter: see interpreter_program.py.
Form = Literal["partitioned", "per_device", "interpreter"]


@dataclass(frozen=True)
class BackendRun:
    """Both programs on one backend.

    Each of `instances` gets its own inputs. `shared[input][instance]` is the first instance with
    the same values. `taken` are the inputs of a side's module: an export lacks unused ones."""

    backend: str
    forms: Mapping[Side, Form]
    inputs: tuple[SignatureValue, ...]
    outputs: tuple[SignatureValue, ...]
    replicas: int
    partitions: int
    instances: int
    shared: tuple[tuple[int, ...], ...] = ()
    taken: Mapping[Side, tuple[int, ...]] = field(default_factory=dict[Side, tuple[int, ...]])
    programs: Mapping[Side, bytes] = field(default_factory=dict[Side, bytes])


Backend = Literal["cpu", "interpreter", "both"]
# auto: exact, or in floats if an op has no form in the field. exact: raises UnmappedError then.
Arithmetic = Literal["auto", "exact", "floats"]


@dataclass(frozen=True)
class Options:
    """The options of a verification. `timeout` is the total in seconds; `trials` counts inputs.

    `fixed` maps inputs, by number, to one value for every element instead of random ones. `limits`
    are the limits of arguments that are indices, if `before` does not show them. `partitioned`:
    also checks that XLA's partitioner does not change the values of `before`.

    Only floats have a `rule` for equal elements, `specials`, and a `backend`. `as_deployed` lets
    XLA:CPU fuse and simplify, which changes the rounding.
    """

    arithmetic: Arithmetic = "auto"

    seed: int = 0
    trials: int = 3
    specials: bool = False
    rule: Rule = BITWISE
    backend: Backend = "cpu"
    timeout: float = 600.0
    fixed: Mapping[int, float] = field(default_factory=dict[int, float])
    as_deployed: bool = False
    limits: tuple[int, ...] = ()
    partitioned: bool = True

    @property
    def asks_for_floats(self) -> bool:
        """True if an option is set that only floats have."""
        return (
            self.arithmetic == "floats"
            or self.rule != BITWISE
            or self.specials
            or self.as_deployed
            or self.backend != "cpu"
            or any(
                not math.isfinite(number) or (number == 0 and math.copysign(1, number) < 0)
                for number in self.fixed.values()
            )
        )


@dataclass(frozen=True)
class VerificationRequest:
    """The request to the child; `fixed` counts the inputs of the runs."""

    runs: tuple[BackendRun, ...]
    options: Options


@dataclass(frozen=True)
class JobStage:
    """The activity of the child: `compiling` or `running` one side, in one trial."""

    doing: str
    side: str
    backend: str
    trial: int = 0

    def write(self, directory: Path) -> None:
        """Writes the stage, in case the child dies."""
        child.write_message(directory / _STAGE, self)


@dataclass(frozen=True)
class RunAnswer:
    """The comparison of the outputs: in the first trial that differs, or over all trials.

    `before_repeats` is False if `before` returned other values when run again. `simplified` is True
    if XLA:CPU could compile the programs only with its simplifier.
    """

    outputs: tuple[OutputComparison, ...]
    trials: int
    before_repeats: bool = True
    simplified: bool = False

    @property
    def same(self) -> bool:
        """True if no element differs."""
        return not any(output.differing for output in self.outputs)


def ask_child(
    module: str,
    directory: Path,
    request: Any,
    devices: int,
    names: Mapping[Side, str],
    timeout: float,
    flags: Sequence[str],
) -> Any:
    """Runs a child that runs programs on virtual devices; returns its answer.

    XLA compiles with `flags`, which the caller's `XLA_FLAGS` override. `names` are the files of the
    sides, for errors. Raises ToolError, with the file of the child's last `JobStage`, if there is
    no answer.
    """
    warned = max(1, int(seconds_to_meet(timeout) / 2))
    # XLA's warning names the collective and the missing devices; `_STUCK` parses it. So it must
    # come before the collective times out.
    all_flags = [f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={warned}", *flags]
    environment = virtual_devices(devices, timeout, all_flags)
    outcome = child.ask(module, directory, request, timeout, environment, runs_programs=True)
    if outcome.answer is not None and not outcome.error:
        return outcome.answer
    stage: JobStage | None = child.read_message(directory / _STAGE)  # None if it never began
    name = names["after" if stage is not None and stage.side == "after" else "before"]
    if outcome.refusal is not None:
        error = outcome.refusal
        error.input_name = error.input_name or name
        raise error
    code, stuck = outcome.code, _stuck(outcome.errors)
    if outcome.error:
        message = f"{_cannot(stage)}: {first_line(outcome.error)}"
    elif code is None:
        message = f"not compiled within {timeout:g} s (--timeout)"
        if stage is not None and stage.doing == "running":
            where = f"on {devices} devices, in" if devices > 1 else "in"
            message = (
                f"did not finish within {timeout:g} s (--timeout) {where} trial {stage.trial}: "
                f"{stuck or _DEADLOCK}"
            )
    elif stuck and stage is not None:
        message = f"did not finish in trial {stage.trial}: {stuck}"
    else:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        message = f"{_cannot(stage)} and ended its process ({how}): {_last_words(outcome.errors)}"
    killed = code == -signal.SIGKILL
    if killed:
        message = (
            f"{_cannot(stage)} and was killed, which is usual if the machine runs out of memory"
        )
    error = ToolError(message, added=("--twin", "always") if killed else ())
    error.input_name = name
    raise error


def _cannot(stage: JobStage | None) -> str:
    if stage is None:
        return "the process that runs the programs did not start"
    backend = "the reference interpreter" if stage.backend == "interpreter" else "XLA:CPU"
    return f"{backend} failed while {stage.doing} it"


_FATAL = re.compile(
    r"^F\d{4} [\d:.]+ +\d+ [^\]]+\] (?P<what>.*)$|^(?P<llvm>LLVM ERROR: .*)$", re.MULTILINE
)
_FRAME = re.compile(r'^  File ".*", line \d+ in (?P<name>\w+)$', re.MULTILINE)
_STUCK = re.compile(
    r"`(?P<what>[^`]*?) RendezvousKey\{.*?global_devices=\[(?P<devices>[\d, ]*)\].*?"
    r"Expected (?P<expected>\d+) threads to join the rendezvous, but (only (?P<arrived>\d+))?"
)


def _stuck(errors: str) -> str:
    """Describes the collective that timed out and its devices; "" if none did."""
    if _INTERPRETER_STUCK in errors:
        return "a deadlock: a collective of the reference interpreter waited 3 s for other devices"
    reports = list(_STUCK.finditer(errors))
    if not reports:
        return ""
    last = reports[-1]
    arrived = f"{last['arrived']} of {last['expected']}" if last["arrived"] else "not all"
    return (
        f"a deadlock: {arrived} devices reached the {last['what']} of devices [{last['devices']}]"
    )


def _last_words(errors: str) -> str:
    """Returns the last message of the process, or else the function in which it ended."""
    if fatal := _FATAL.search(errors):
        return (fatal["what"] or fatal["llvm"]).strip()
    if frame := _FRAME.search(errors):
        return f"in {frame['name']}"
    return next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
