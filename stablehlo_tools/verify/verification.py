"""Finds out if two artifacts compute the same values, by running both on random
inputs.

Both compute modulo a prime instead of in floats, so that nothing is rounded and no tolerance is
needed; or in floats, if the options ask for that or an op has no form in the field. They run in one
child process, on as many virtual CPU devices as they need.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.symbolic import at_two_sizes, symbolic_names
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with_any
from stablehlo_tools.ir.builder import barrier
from stablehlo_tools.ir.values import CONSTANTS, is_float, stand_in
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.verify.comparison import BITWISE, Difference, OutputComparison, Rule
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.exact.programs import FieldPlan, plan_in_field
from stablehlo_tools.verify.exact.verification import CHILD, run_in_field
from stablehlo_tools.verify.job import Request, Run, RunAnswer, Side, run_child
from stablehlo_tools.verify.plan import make_plan, no_input
from stablehlo_tools.verify.signatures import Value, uncounted

Backend = Literal["cpu", "interpreter", "both"]
# auto: exact, or in floats if an op has no form in the field. exact: refused then.
Arithmetic = Literal["auto", "exact", "floats"]


@dataclass(frozen=True)
class Options:
    """Describes how to verify: `timeout` is for everything, in seconds; `trials` counts inputs.

    `fixed` gives inputs, by number, one value in every element instead of random ones. `limits` are
    those of indices among the arguments, if `before` does not show them itself. `partitioned`:
    also compares `before` as XLA's partitioner divides it with what it means.

    Only floats have a `rule` that says when elements agree, `specials`, and a `backend`;
    `as_deployed` lets XLA:CPU fuse and simplify, and rounding then follows what it makes of ops.
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
        """Returns True if something is asked that only floats have."""
        return (
            self.arithmetic == "floats"
            or self.rule != BITWISE
            or self.specials
            or self.as_deployed
            or self.backend != "cpu"
            or any(map(_is_special, self.fixed.values()))
        )


def _is_special(number: float) -> bool:
    return not math.isfinite(number) or (number == 0 and math.copysign(1, number) < 0)


@dataclass(frozen=True)
class Output:
    """One output and how it compares; `shape` is that of one replica's or device's value."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    max_abs_difference: float | int | None
    first: Difference | None
    finite: int


@dataclass(frozen=True)
class Exactness:
    """Describes what belongs to an answer in exact arithmetic.

    `degree` is that of the programs as polynomials of their inputs, None if it reaches the `prime`.
    `not_entered` are the branches and loops of either program that no input entered, of as many as
    `branches` says. `one_sided` are the marked comparisons of a twin without both outcomes.
    `wrongly_partitioned` are the outputs that XLA's partitioner gets wrong.
    """

    prime: int
    degree: int | None
    branches: Mapping[Side, int]
    not_entered: Mapping[Side, tuple[str, ...]]
    one_sided: Mapping[Side, tuple[int, ...]]
    wrongly_partitioned: Mapping[Side, tuple[int, ...]]

    def chance(self, inputs: int) -> float | None:
        """At most how probable it is that an element agrees in programs that differ, if hashes are
        random functions; None without a degree."""
        return None if self.degree is None else (self.degree / self.prime) ** inputs


@dataclass(frozen=True)
class Verification:
    """The answer. `trials` counts the inputs that were run; the last one differs where not `same`.

    `exact` is None where floats were compared, and `in_floats` says why, if an op had no form in
    the field. `sizes` are those that symbolic dimensions had; the answer is of the last.
    `vacuous` are outputs that are zero for all inputs or, in floats, NaN or infinite everywhere:
    agreement shows nothing about them.
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
    steering: tuple[str, ...] = ()
    exact: Exactness | None = None
    in_floats: str = ""
    sizes: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[Output, ...]:
        """The outputs that agreement shows something about."""
        return tuple(o for o in self.outputs if o.index not in self.vacuous)

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
            "kind": "floats" if self.exact is None else "exact",
            "in_floats": self.in_floats,
            "sizes": list(self.sizes),
            "exact": None if self.exact is None else self._exact_json(self.exact),
            "hints": list(self.steering),
            "before_repeats": self.before_repeats,
            "simplified": self.simplified,
            "seconds": round(self.seconds, 3),
        }

    def _exact_json(self, exact: Exactness) -> dict[str, Any]:
        fields = {**asdict(exact), "chance": exact.chance(self.trials)}
        del fields["one_sided"]  # a twin says which these are
        return fields


def verify_artifacts(
    before: Artifact, after: Artifact, options: Options | None = None
) -> Verification:
    """Runs both artifacts on the same random inputs and compares every output on every device.

    Raises ToolError for artifacts that cannot be run or compared, and for a run that hangs;
    UnmappedError for an op that has no form in exact arithmetic, if that was asked for.
    """
    options = options or Options()
    artifacts: Mapping[Side, Artifact] = {"before": before, "after": after}
    for artifact in artifacts.values():
        artifact.check_values_known()
    if symbolic_names(before):
        return _at_two_sizes(before, after, options)
    if options.asks_for_floats:
        return _in_floats(artifacts, options)
    try:
        started = time.monotonic()
        plan = plan_in_field(artifacts, options.limits, partitioned=options.partitioned)
        names: dict[Side, str] = {side: artifact.name for side, artifact in artifacts.items()}
        return run_plan(plan, names, options, started)
    except UnmappedError as error:
        if options.arithmetic == "exact":
            raise
        return replace(_in_floats(artifacts, options), in_floats=reason_for_floats(error))


def reason_for_floats(error: UnmappedError) -> str:
    """The op that has no form in the field, and where it is: `in_floats` of an answer."""
    place = error.diagnostic.place.render(error.input_name or "")
    return f"{error.diagnostic.message}{f' at {place}' if place else ''}"


def _at_two_sizes(before: Artifact, after: Artifact, options: Options) -> Verification:
    """The answer at the first sizes that differ, or at both together."""
    if symbolic_names(before) != symbolic_names(after):
        names = [", ".join(symbolic_names(artifact)) or "none" for artifact in (before, after)]
        places = f"{names[0]} in {before.name}, {names[1]} in {after.name}"
        raise ToolError(f"the symbolic dimensions differ: {places}")
    answers: list[Verification] = []
    sizes: list[str] = []
    for name, (one, other) in at_two_sizes((before, after)):
        answers.append(verify_artifacts(one, other, options))
        sizes.append(name)
        if not answers[-1].same:
            break
    return replace(answers[-1], sizes=tuple(sizes))


def run_plan(
    plan: FieldPlan,
    names: Mapping[Side, str],
    options: Options,
    started: float,
    *,
    platform: int = 0,
    child: str = CHILD,
) -> Verification:
    """The answer of a module, `child`, to a plan for files of these names, begun at `started`.

    `platform` is the index that an input has that is the index of one.
    """
    inputs = plan.signature.inputs
    first = uncounted(inputs)
    _check_fixed(options.fixed, len(inputs) - first)
    fixed = dict.fromkeys(range(first), float(platform))
    fixed |= {first + index: value for index, value in options.fixed.items()}
    answer = run_in_field(names, plan, fixed, options.seed, options.trials, options.timeout, child)
    outputs = tuple(
        output_of(i, value, comparison)
        for i, (value, comparison) in enumerate(
            zip(plan.signature.outputs, answer.outputs, strict=True)
        )
    )
    same = not any(output.differing for output in outputs)
    return Verification(
        same=same,
        rule=options.rule,
        backend="cpu",
        trials=answer.inputs,
        devices=plan.devices,
        seconds=time.monotonic() - started,
        outputs=outputs,
        vacuous=tuple(i for i in answer.zero if outputs[i].elements) if same else (),
        steering=() if same else _steering(inputs, plan.steering, options.fixed),
        exact=Exactness(
            plan.field.prime,
            plan.degree,
            answer.branches,
            answer.not_entered,
            answer.one_sided,
            answer.wrongly_partitioned,
        ),
    )


def _check_fixed(fixed: Mapping[int, float], count: int) -> None:
    for index, value in fixed.items():
        if index >= count:
            raise no_input(index, value, count)


def _in_floats(artifacts: Mapping[Side, Artifact], options: Options) -> Verification:
    started = time.monotonic()
    backends = ("cpu", "interpreter") if options.backend == "both" else (options.backend,)
    if options.specials or options.fixed:
        artifacts = {side: _with_hidden_constants(each) for side, each in artifacts.items()}
    plans = [make_plan(artifacts, backend, options.limits) for backend in backends]
    first = uncounted(plans[0].run.inputs)
    count = min(len(plan.run.inputs) for plan in plans) - first
    _check_fixed(options.fixed, count)
    request = Request(
        tuple(plan.run for plan in plans),
        options.rule,
        options.trials,
        options.seed,
        options.specials,
        {str(first + index): value for index, value in options.fixed.items()},
        options.as_deployed,
    )
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        directory = Path(path)
        for plan in plans:
            for side, program in plan.programs.items():
                (directory / plan.run.program(side)).write_bytes(program)
        try:
            answers = run_child(directory, request, artifacts, options.timeout)
        except ToolError as error:
            hints = _steering(plans[0].run.inputs, plans[0].steering, options.fixed)
            notes = [note(hint) for hint in hints]
            if error.diagnostic.message.startswith("XLA:CPU"):
                notes.append(note(_EXACT_RUNS))
            error.diagnostic = replace(error.diagnostic, notes=(*error.diagnostic.notes, *notes))
            raise
    shown = len(answers) - 1 if not answers[-1].same else 0
    hints = _steering(plans[shown].run.inputs, plans[shown].steering, options.fixed)
    return _verification(
        options, request.runs[shown], answers[shown], hints, time.monotonic() - started
    )


def _with_hidden_constants(artifact: Artifact) -> Artifact:
    """The program with barriers after its floats, so that `x + 0.0` stays: for -0.0 it is not x.

    XLA folds it when it converts StableHLO, before any pass that could be disabled.
    """
    copy = artifact.copy()
    for constant in ops_named(copy.module.operation, CONSTANTS):
        value, holder = constant.results[0], constant.parent
        in_reducer = holder is not None and holder.name in _WITH_SCALARS
        if is_float(value.type) and not in_reducer:
            point = ir.InsertionPoint.after(constant)
            stand_in(value, barrier([value], point, constant.location).results[0])
    return copy


_EXACT_RUNS = (
    "exact arithmetic, the default without --floats and tolerances, runs other ops on integers and "
    "may have no need of this one"
)
_WITH_SCALARS = ops_with_any(Trait.REDUCTION | Trait.ACROSS_DEVICES) | full_names(
    "map scatter select_and_scatter sort"
)


def _steering(
    inputs: Sequence[Value], numbers: Sequence[int], fixed: Mapping[int, float]
) -> tuple[str, ...]:
    """A hint for each input that decides how often a loop runs, and was drawn at random."""
    first = uncounted(inputs)
    steering = [(index - first, inputs[index].name) for index in numbers]
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
        output_of(i, value, comparison)
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
        steering=() if answer.same else hints,
    )


def output_of(index: int, value: Value, comparison: OutputComparison) -> Output:
    """The output of this number and how it compares."""
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
    )
