"""The child that runs the programs: what it is asked, what it answers, and what ended it.

Both are JSON (`processes.child`) in a directory that the two share; the programs lie beside them. A
child that ends without an answer has left word of what it was busy with, a `Stage`; that and its
standard error are explained.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, first_line
from stablehlo_tools.processes import child
from stablehlo_tools.processes.child import seconds_to_meet, virtual_devices
from stablehlo_tools.verify.comparison import Difference, OutputComparison, Rule
from stablehlo_tools.verify.signatures import Value

_MODULE = "stablehlo_tools.verify.execution_process"
_STAGE = "stage.json"
_INTERPRETER_STUCK = "rendezvous timed out"
_DEADLOCK = "a deadlock, a loop without end, or too much work"

Side = Literal["before", "after"]
SIDES: tuple[Side, Side] = ("before", "after")

# partitioned: a module that its shardings divide. per_device: a module as each device runs it.
# interpreter: see interpreter_program.py.
Form = Literal["partitioned", "per_device", "interpreter"]


@dataclass(frozen=True)
class Run:
    """Both programs on one backend. Each of `instances` gets inputs of its own, but for those that
    `shared` gives another instance's: by input and instance. `taken` are the inputs that a side's
    module takes: an export lacks those that it does not use."""

    backend: str
    forms: Mapping[Side, Form]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    replicas: int
    partitions: int
    instances: int
    shared: tuple[tuple[int, ...], ...] = ()
    taken: Mapping[Side, tuple[int, ...]] = field(default_factory=dict[Side, tuple[int, ...]])

    def program(self, side: Side) -> str:
        """The name of the file that holds a side's program."""
        return f"{self.backend}_{side}"


@dataclass(frozen=True)
class Request:
    """Everything that the child needs to know."""

    runs: tuple[Run, ...]
    rule: Rule
    trials: int
    seed: int
    specials: bool
    fixed: Mapping[str, float]  # by the number of the input
    as_deployed: bool

    @staticmethod
    def of(fields: dict[str, Any]) -> Request:
        """The request that has these fields."""
        fields["runs"] = tuple(run_of(run) for run in fields["runs"])
        fields["rule"] = Rule(**fields["rule"])
        return Request(**fields)

    def write(self, directory: Path) -> None:
        """Leaves the request in a directory."""
        child.write_request(directory, asdict(self))

    @staticmethod
    def read(directory: Path) -> Request:
        """Reads what `write` wrote."""
        return Request.of(child.read_request(directory))


@dataclass(frozen=True)
class Stage:
    """Describes what the child is busy with: `compiling` or `running` one side, in one trial."""

    doing: str
    side: str
    backend: str
    trial: int = 0

    def write(self, directory: Path) -> None:
        """Leaves word, for the case that the child does not come back."""
        (directory / _STAGE).write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class RunAnswer:
    """Describes how the outputs compared: in the first trial that differs, or over all trials.

    `before_repeats` is False where `before` gave other values when run again. `simplified` is True
    where XLA:CPU could compile the programs only with its simplifier.
    """

    outputs: tuple[OutputComparison, ...]
    trials: int
    before_repeats: bool = True
    simplified: bool = False

    @property
    def same(self) -> bool:
        """Returns True if no element differs."""
        return not any(output.differing for output in self.outputs)

    @staticmethod
    def of(fields: dict[str, Any]) -> RunAnswer:
        """The answer that has these fields."""
        fields["outputs"] = tuple(comparison_of(output) for output in fields["outputs"])
        return RunAnswer(**fields)


def run_child(
    directory: Path, request: Request, artifacts: Mapping[Side, Artifact], timeout: float
) -> tuple[RunAnswer, ...]:
    """Has the child answer a request whose programs lie in `directory`, in `timeout` seconds: the
    runs up to the first that differs.

    Raises ToolError, about the file that the child was busy with, when it does not.
    """
    devices = max(run.replicas * run.partitions for run in request.runs)
    # XLA:CPU drops a narrowing that a widening follows, so that moving an op would change values.
    flags = [] if request.as_deployed else ["--xla_allow_excess_precision=false"]
    names: dict[Side, str] = {side: artifact.name for side, artifact in artifacts.items()}
    answer = ask_child(_MODULE, directory, asdict(request), devices, names, timeout, flags)
    return tuple(RunAnswer.of(fields) for fields in answer["runs"])


def ask_child(
    module: str,
    directory: Path,
    request: dict[str, Any],
    devices: int,
    names: Mapping[Side, str],
    timeout: float,
    flags: Sequence[str],
) -> dict[str, Any]:
    """Returns what a child answers that runs programs on virtual devices, compiled with XLA's
    `flags`.

    `names` are the files of the sides that a `Stage` of it names; the caller's `XLA_FLAGS` overrule
    `flags`. Raises ToolError, about the file that it was busy with, when there is no answer.
    """
    warned = max(1, int(seconds_to_meet(timeout) / 2))
    # Warned of first, XLA names the collective and who is missing; `_STUCK` reads that.
    all_flags = [f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={warned}", *flags]
    environment = virtual_devices(devices, timeout, all_flags)
    outcome = child.ask(module, directory, request, timeout, environment, runs_programs=True)
    if outcome.answer is not None and not outcome.error:
        return outcome.answer
    # Returns what the child was last busy with, or None where it never began.
    fields = child.read_json(directory / _STAGE)
    stage = None if fields is None else Stage(**fields)
    name = names["after" if stage is not None and stage.side == "after" else "before"]
    if outcome.refusal is not None:
        error = outcome.refusal
        error.input_name = error.input_name or name
        raise error
    if outcome.error:
        message = f"{_cannot(stage)}: {first_line(outcome.error)}"
    elif outcome.code is None:
        message = _timed_out(stage, devices, timeout, outcome.errors)
    else:
        message = _died(stage, outcome.code, outcome.errors)
    error = ToolError(message)
    error.input_name = name
    raise error


def run_of(fields: dict[str, Any]) -> Run:
    """The run that has these fields."""
    for name in ("inputs", "outputs"):
        fields[name] = tuple(value_of(value) for value in fields[name])
    fields["shared"] = tuple(tuple(instances) for instances in fields["shared"])
    fields["taken"] = {side: tuple(inputs) for side, inputs in fields["taken"].items()}
    return Run(**fields)


def value_of(fields: dict[str, Any]) -> Value:
    """The value that has these fields."""
    fields["shape"] = tuple(fields["shape"])
    return Value(**fields)


def comparison_of(fields: dict[str, Any]) -> OutputComparison:
    """The comparison that has these fields."""
    first: dict[str, Any] | None = fields["first"]
    if first is not None:
        first["index"] = tuple(first["index"])
        fields["first"] = Difference(**first)
    return OutputComparison(**fields)


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


_FATAL = re.compile(
    r"^F\d{4} [\d:.]+ +\d+ [^\]]+\] (?P<what>.*)$|^(?P<llvm>LLVM ERROR: .*)$", re.MULTILINE
)
_FRAME = re.compile(r'^  File ".*", line \d+ in (?P<name>\w+)$', re.MULTILINE)
_STUCK = re.compile(
    r"`(?P<what>[^`]*?) RendezvousKey\{.*?global_devices=\[(?P<devices>[\d, ]*)\].*?"
    r"Expected (?P<expected>\d+) threads to join the rendezvous, but (only (?P<arrived>\d+))?"
)


def _stuck(errors: str) -> str:
    """Returns which collective waited for whom, in words; empty where none did."""
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
    """Returns what the process said when it ended: its message, or the function that it was in."""
    fatal = _FATAL.search(errors)
    if fatal:
        return (fatal["what"] or fatal["llvm"]).strip()
    frame = _FRAME.search(errors)
    if frame:
        return f"in {frame['name']}"
    return next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
