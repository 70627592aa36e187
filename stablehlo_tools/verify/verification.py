"""Whether two artifacts compute the same values, found out by running both on random inputs.

The programs run in one child process, on as many virtual CPU devices as they need. Agreement on
random inputs is strong evidence, and no more: see `Verification.vacuous`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.analysis.argument_ranges import Range
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.verify.comparison import BITWISE, Difference, OutputComparison, Rule
from stablehlo_tools.verify.job import Request, Run, RunAnswer, Side, run_child
from stablehlo_tools.verify.plan import Plan, make_plan, no_input
from stablehlo_tools.verify.signatures import Value, uncounted

Backend = Literal["cpu", "interpreter", "both"]


@dataclass(frozen=True)
class Options:
    """How to verify: `timeout` is for everything, in seconds; `rule` says when elements agree.

    `fixed` gives inputs, by number, one value in every element instead of random ones.
    `as_deployed` lets XLA:CPU fuse and simplify; rounding then moves with what it makes of them.
    `ranges` are those of the arguments of bare modules, where `before` does not show them itself.
    `conditioned`: a difference beyond a tolerance counts as rounding where nudging the inputs of
    `before` by a few units in the last place of f64 moves that output as far.
    """

    seed: int = 0
    trials: int = 3
    specials: bool = False
    rule: Rule = BITWISE
    backend: Backend = "cpu"
    timeout: float = 600.0
    fixed: Mapping[int, float] = field(default_factory=dict[int, float])
    as_deployed: bool = False
    ranges: tuple[Range, ...] = ()
    conditioned: bool = False


@dataclass(frozen=True)
class Output:
    """One output and how it compares; `shape` is that of one replica's or device's value, and
    `rounding` the largest difference beyond the rule that was taken for rounding."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    max_abs_difference: float | int | None
    first: Difference | None
    finite: int
    rounding: float = 0.0


@dataclass(frozen=True)
class Verification:
    """The answer. `trials` counts those that were run; the last one differs where not `same`.

    `vacuous` are outputs that were NaN, infinite or no more than rounding everywhere in every
    trial: they were not compared, for agreement shows nothing. `inputs` is the style of the random
    inputs.
    `before_repeats` is False where `before` did not even agree with itself. `simplified` is True
    where XLA:CPU has no form for the programs without its simplifier, which moves rounding.
    """

    same: bool
    rule: Rule
    backend: Backend
    trials: int
    devices: int
    seconds: float
    outputs: tuple[Output, ...]
    vacuous: tuple[int, ...] = ()
    before_repeats: bool = True
    simplified: bool = False
    inputs: str = "plain"
    steering: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[Output, ...]:
        """The outputs that agreement shows something about."""
        return tuple(o for o in self.outputs if o.index not in self.vacuous)

    @property
    def rounded(self) -> tuple[Output, ...]:
        """The outputs that differ beyond the rule, and no further than rounding moves them."""
        return tuple(output for output in self.outputs if output.rounding)

    @property
    def elements(self) -> int:
        """Elements of all outputs, each counted once however many devices hold it."""
        return sum(output.elements for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        return {
            "same": self.same,
            "trials": self.trials,
            "devices": self.devices,
            "backend": self.backend,
            "rule": str(self.rule),
            "outputs": [asdict(output) for output in self.outputs],
            "compared": len(self.compared),
            "vacuous": list(self.vacuous),
            "inputs": self.inputs,
            "hints": list(self.steering),
            "before_repeats": self.before_repeats,
            "simplified": self.simplified,
            "seconds": round(self.seconds, 3),
        }


def verify_artifacts(
    before: Artifact, after: Artifact, options: Options | None = None
) -> Verification:
    """Runs both artifacts on the same random inputs and compares every output on every device.

    Raises ToolError for artifacts that cannot be run or compared, and for a run that hangs.
    """
    options = options or Options()
    started = time.monotonic()
    artifacts: Mapping[Side, Artifact] = {"before": before, "after": after}
    for artifact in artifacts.values():
        artifact.check_values_known()
    backends = ("cpu", "interpreter") if options.backend == "both" else (options.backend,)
    plans = [make_plan(artifacts, backend, options.ranges) for backend in backends]
    first = uncounted(plans[0].run.inputs)
    count = min(len(plan.run.inputs) for plan in plans) - first
    for index in options.fixed:
        if index >= count:
            raise no_input(index, options.fixed[index], count)
    request = Request(
        tuple(plan.run for plan in plans),
        options.rule,
        options.trials,
        options.seed,
        options.specials,
        {str(first + index): value for index, value in options.fixed.items()},
        options.as_deployed,
        options.conditioned,
    )
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        directory = Path(path)
        for plan in plans:
            for side, program in plan.programs.items():
                (directory / plan.run.program(side)).write_bytes(program)
        try:
            answers = run_child(directory, request, artifacts, options.timeout)
        except ToolError as error:
            notes = tuple(note(hint) for hint in _steering(plans[0], options.fixed))
            error.diagnostic = replace(error.diagnostic, notes=(*error.diagnostic.notes, *notes))
            raise
    shown = len(answers) - 1 if not answers[-1].same else 0
    hints = _steering(plans[shown], options.fixed)
    return _verification(
        options, request.runs[shown], answers[shown], hints, time.monotonic() - started
    )


def _steering(plan: Plan, fixed: Mapping[int, float]) -> tuple[str, ...]:
    """A hint for each input that decides how often a loop runs, and was drawn at random."""
    inputs = plan.run.inputs
    first = uncounted(inputs)
    steering = [(index - first, inputs[index].name) for index in plan.steering]
    return tuple(
        f"input {index}{f' ({name})' if name else ''}, an integer, decides how often a loop runs "
        f"or which branch does: --set {index}=VALUE gives it a value that it has in use"
        for index, name in steering
        if index not in fixed
    )


def _verification(
    options: Options, run: Run, answer: RunAnswer, hints: tuple[str, ...], seconds: float
) -> Verification:
    outputs = tuple(
        _output(i, value, comparison)
        for i, (value, comparison) in enumerate(zip(run.outputs, answer.outputs, strict=True))
    )
    return Verification(
        same=answer.same,
        rule=options.rule,
        backend=options.backend,
        trials=answer.trials,
        devices=run.replicas * run.partitions,
        seconds=seconds,
        outputs=outputs,
        vacuous=tuple(i for i, comparison in enumerate(answer.outputs) if comparison.shows_nothing),
        before_repeats=answer.before_repeats,
        simplified=answer.simplified,
        inputs=answer.style,
        steering=() if answer.same else hints,
    )


def _output(index: int, value: Value, comparison: OutputComparison) -> Output:
    return Output(
        index,
        value.name,
        value.dtype,
        value.shape,
        comparison.elements,
        comparison.differing,
        comparison.max_abs_difference,
        comparison.first,
        comparison.finite,
        comparison.rounding,
    )
