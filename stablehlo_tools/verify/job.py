"""What the parent process asks of the child that runs the programs, and what the child answers.

Both are JSON (`processes.child`) in a directory that the two share; the programs lie beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.processes import child
from stablehlo_tools.verify.comparison import Difference, OutputComparison, Rule
from stablehlo_tools.verify.random_inputs import Style
from stablehlo_tools.verify.signatures import Value

_STAGE = "stage.json"

Side = Literal["before", "after"]
SIDES: tuple[Side, Side] = ("before", "after")
# exported: a jax.export file, called as users call it. partitioned: a module that its shardings
# divide. per_device: a module as each device runs it. interpreter: see interpreter_program.py.
Form = Literal["exported", "partitioned", "per_device", "interpreter"]


@dataclass(frozen=True)
class Run:
    """Both programs on one backend. Each of `instances` gets inputs of its own, but for those that
    `shared` gives another instance's: by input and instance."""

    backend: str
    forms: Mapping[Side, Form]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    replicas: int
    partitions: int
    instances: int
    shared: tuple[tuple[int, ...], ...] = ()

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
        fields["runs"] = tuple(_run(run) for run in fields["runs"])
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
    """What the child is busy with: `compiling` or `running` one side, in one trial."""

    doing: str
    side: Side
    backend: str
    trial: int = 0

    def write(self, directory: Path) -> None:
        """Leaves word, for the case that the child does not come back."""
        (directory / _STAGE).write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class RunAnswer:
    """How the outputs compared: in the first trial that differs, or over all trials, on inputs of a
    `style`.

    `before_repeats` is False where `before` gave other values when run again. `simplified` is True
    where XLA:CPU could compile the programs only with its simplifier.
    """

    outputs: tuple[OutputComparison, ...]
    trials: int
    before_repeats: bool = True
    simplified: bool = False
    style: str = Style.PLAIN.value

    @property
    def same(self) -> bool:
        """Whether no element differs."""
        return not any(output.differing for output in self.outputs)

    @staticmethod
    def of(fields: dict[str, Any]) -> RunAnswer:
        """The answer that has these fields."""
        fields["outputs"] = tuple(_comparison(output) for output in fields["outputs"])
        return RunAnswer(**fields)


def read_stage(directory: Path) -> Stage | None:
    """What the child was last busy with, or None where it never began."""
    fields = child.read_json(directory / _STAGE)
    return None if fields is None else Stage(**fields)


def _run(fields: dict[str, Any]) -> Run:
    for name in ("inputs", "outputs"):
        fields[name] = tuple(_value(value) for value in fields[name])
    fields["shared"] = tuple(tuple(instances) for instances in fields["shared"])
    return Run(**fields)


def _value(fields: dict[str, Any]) -> Value:
    fields["shape"] = tuple(fields["shape"])
    return Value(**fields)


def _comparison(fields: dict[str, Any]) -> OutputComparison:
    first: dict[str, Any] | None = fields["first"]
    if first is not None:
        first["index"] = tuple(first["index"])
        fields["first"] = Difference(**first)
    return OutputComparison(**fields)
