"""Decides if two artifacts compute the same values, by running both on random inputs.

Both compute modulo a prime instead of in floats, so there is no rounding and no tolerance. They
compute in floats if the options require it or an op has no form in the field. They run in one child
process, on as many virtual CPU devices as they need.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stablehlo_tools.analysis.captured_constants import captured_ops, own_constants
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.symbolic import at_two_sizes, symbolic_names
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with_any
from stablehlo_tools.ir.builder import barrier
from stablehlo_tools.ir.values import CONSTANTS, is_float, stand_in
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.processes.child import read_message
from stablehlo_tools.verify.comparison import ElementDifference, OutputComparison, Rule
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.exact.programs import (
    PARTIAL,
    Exactness,
    FieldAnswer,
    FieldPlan,
    FieldRequest,
    plan_in_field,
)
from stablehlo_tools.verify.run_plan import make_plan, no_input
from stablehlo_tools.verify.signatures import SignatureValue, count_platform_inputs
from stablehlo_tools.verify.verification_job import (
    SIDES,
    Backend,
    Options,
    RunAnswer,
    Side,
    VerificationRequest,
    ask_child,
)

_CHILD = "stablehlo_tools.verify.exact.process"
_FLOATS_CHILD = "stablehlo_tools.verify.execution_process"
# Compilation dominates the time, and integer results are the same at every optimization level.
_EXACT_FLAGS = ("--xla_backend_optimization_level=0",)


@dataclass(frozen=True)
class ComparedOutput:
    """One output and its comparison; `shape` is that of one replica's or device's value."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    max_abs_difference: float | int | None
    first: ElementDifference | None
    finite: int


@dataclass(frozen=True)
class Verification:
    """The answer. `trials` counts the sets of inputs; if not `same`, the last one differs.

    `exact` is None if floats were compared; `in_floats` is the op without a form in the field, if
    that is the reason. `sizes` are the sizes of symbolic dimensions; the answer is of the last.
    `vacuous` are outputs that are zero for all inputs or, in floats, NaN or infinite everywhere;
    their agreement proves nothing.
    `before_repeats` is False if `before` does not agree with itself. `simplified` is True if
    XLA:CPU cannot run the programs without its simplifier, which changes rounding.
    """

    same: bool
    rule: Rule
    backend: Backend
    trials: int
    devices: int
    seconds: float
    outputs: tuple[ComparedOutput, ...]
    vacuous: tuple[int, ...] = ()
    before_repeats: bool = True
    simplified: bool = False
    steering: tuple[str, ...] = ()
    exact: Exactness | None = None
    in_floats: str = ""
    sizes: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[ComparedOutput, ...]:
        """The outputs that are not vacuous."""
        return tuple(o for o in self.outputs if o.index not in self.vacuous)

    @property
    def elements(self) -> int:
        """The number of elements of all outputs; an element on several devices counts once."""
        return sum(output.elements for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
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
            "exact": None if self.exact is None else self.exact.to_json(self.trials),
            "hints": list(self.steering),
            "before_repeats": self.before_repeats,
            "simplified": self.simplified,
            "seconds": round(self.seconds, 3),
        }


def verify_artifacts(
    before: Artifact, after: Artifact, options: Options | None = None
) -> Verification:
    """Runs both artifacts on the same random inputs and compares every output on every device.

    Raises ToolError if the artifacts cannot be run or compared, or if a run hangs; UnmappedError if
    an op has no form in exact arithmetic and `options.arithmetic` is `exact`.
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
    """Names the op that has no form in the field, and its place: `in_floats` of an answer."""
    place = error.diagnostic.place.render(error.input_name or "")
    return f"{error.diagnostic.message}{f' at {place}' if place else ''}"


def _at_two_sizes(before: Artifact, after: Artifact, options: Options) -> Verification:
    """Verifies artifacts with symbolic dimensions at two sets of sizes, up to a difference."""
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
    child: str = _CHILD,
) -> Verification:
    """Runs a plan in a child process, the module `child`, and returns the answer.

    `names` are the files of both sides. `started` is the start by `time.monotonic`. `platform` is
    the value of an input that is a platform index.
    """
    inputs = plan.signature.inputs
    first = count_platform_inputs(inputs)
    _check_fixed(options.fixed, len(inputs) - first)
    fixed = dict.fromkeys(range(first), float(platform))
    fixed |= {first + index: value for index, value in options.fixed.items()}
    request = FieldRequest(plan, fixed, options.seed, options.trials, together=True)
    answer = _run_in_field(names, request, options.timeout, child)
    outputs = compared_outputs(plan.signature.outputs, answer.outputs)
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
        exact=answer.exactness,
    )


def _run_in_field(
    names: Mapping[Side, str], request: FieldRequest, timeout: float, child: str
) -> FieldAnswer:
    """Runs programs in a child process on the same residues and compares their outputs."""
    devices = request.plan.devices
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        directory = Path(path)
        for name, content in request.plan.files.items():
            (directory / name).write_bytes(content)
        try:
            return ask_child(child, directory, request, devices, names, timeout, _EXACT_FLAGS)
        except ToolError as error:
            if not error.by_chance and len(request.plan.runs) == len(SIDES):
                raise
        # XLA's partitioner may have ended the process, so run without its program.
        request = replace(request, together=False)
        try:
            return ask_child(child, directory, request, devices, names, timeout, _EXACT_FLAGS)
        except ToolError:
            partial: FieldAnswer | None = read_message(directory / PARTIAL)
            if partial is None:
                raise
            return partial


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
    first = count_platform_inputs(plans[0].run.inputs)
    count = min(len(plan.run.inputs) for plan in plans) - first
    _check_fixed(options.fixed, count)
    fixed = {first + index: value for index, value in options.fixed.items()}
    request = VerificationRequest(tuple(plan.run for plan in plans), replace(options, fixed=fixed))
    devices = max(plan.run.replicas * plan.run.partitions for plan in plans)
    # XLA:CPU drops a narrowing before a widening, so a pass that moves an op would change values.
    flags = [] if options.as_deployed else ["--xla_allow_excess_precision=false"]
    names: dict[Side, str] = {side: artifact.name for side, artifact in artifacts.items()}
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        directory = Path(path)
        try:
            answers: tuple[RunAnswer, ...] = ask_child(
                _FLOATS_CHILD, directory, request, devices, names, options.timeout, flags
            )
        except ToolError as error:
            hints = _steering(plans[0].run.inputs, plans[0].steering, options.fixed)
            notes = [note(hint) for hint in hints]
            if error.diagnostic.message.startswith("XLA:CPU"):
                notes.append(note(_EXACT_RUNS))
            error.diagnostic = replace(error.diagnostic, notes=(*error.diagnostic.notes, *notes))
            raise
    shown = len(answers) - 1 if not answers[-1].same else 0
    answer, run = answers[shown], plans[shown].run
    return Verification(
        same=answer.same,
        rule=options.rule,
        backend=options.backend,
        trials=answer.trials,
        devices=run.replicas * run.partitions,
        seconds=time.monotonic() - started,
        outputs=compared_outputs(run.outputs, answer.outputs),
        vacuous=tuple(i for i, comparison in enumerate(answer.outputs) if comparison.shows_nothing),
        before_repeats=answer.before_repeats,
        simplified=answer.simplified,
        steering=() if answer.same else _steering(run.inputs, plans[shown].steering, options.fixed),
    )


def _with_hidden_constants(artifact: Artifact) -> Artifact:
    """Adds barriers after float constants, so that XLA keeps `x + 0.0`, which is not x for -0.0.

    XLA folds it while converting StableHLO, before any pass that could be disabled.
    """
    copy = artifact.copy()
    for holder in ops_named(copy.module.operation, _WITH_SCALARS):
        # Without a barrier, XLA moves a constant from outside into the region.
        block = holder.regions[0].blocks[0]
        own_constants(block, [op for op in captured_ops(block) if op.name in CONSTANTS])
    for constant in ops_named(copy.module.operation, CONSTANTS):
        value, holder = constant.results[0], constant.parent
        in_reducer = holder is not None and holder.name in _WITH_SCALARS
        if is_float(value.type) and not in_reducer:
            point = ir.InsertionPoint.after(constant)
            stand_in(value, barrier([value], point, constant.location).results[0])
    return copy


_EXACT_RUNS = (
    "exact arithmetic, the default without --floats and tolerances, replaces some ops by integer "
    "ops, perhaps this one"
)
_WITH_SCALARS = ops_with_any(Trait.REDUCTION | Trait.ACROSS_DEVICES) | full_names(
    "map scatter select_and_scatter sort"
)


def _steering(
    inputs: Sequence[SignatureValue], numbers: Sequence[int], fixed: Mapping[int, float]
) -> tuple[str, ...]:
    """Returns a hint for each random input that decides a trip count or a branch."""
    first = count_platform_inputs(inputs)
    steering = [(index - first, inputs[index].name) for index in numbers]
    return tuple(
        f"input {index}{f' ({name})' if name else ''}, an integer, decides how often a loop runs "
        f"or which branch does: --set {index}=VALUE gives it a realistic value"
        for index, name in steering
        if index not in fixed
    )


def compared_outputs(
    values: Sequence[SignatureValue], comparisons: Sequence[OutputComparison]
) -> tuple[ComparedOutput, ...]:
    """Returns the outputs with their comparisons."""
    return tuple(
        ComparedOutput(
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
        for index, (value, comparison) in enumerate(zip(values, comparisons, strict=True))
    )
