"""The child process: runs two programs on the same random inputs and compares their outputs.

    python -m stablehlo_tools.verify.execution_process DIRECTORY

It is a separate process because JAX fixes the number of virtual devices when it starts. Also, XLA
and the interpreter end their process if a collective waits too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.processes.child import answer_request
from stablehlo_tools.verify.comparison import OutputComparison
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.execution import (
    ExecutableProgram,
    Instances,
    Shards,
    compare_outputs,
    load_program,
    load_without_rerounding,
    make_instances,
)
from stablehlo_tools.verify.random_inputs import (
    Specials,
    made_valid,
    put_about_zero,
    random_array,
    random_words,
)
from stablehlo_tools.verify.verification_job import (
    SIDES,
    BackendRun,
    JobStage,
    RunAnswer,
    Side,
    VerificationRequest,
)


def answer(directory: Path, request: VerificationRequest) -> tuple[RunAnswer, ...]:
    """Runs and compares the programs of a request, in the child, up to the first that differ."""
    worker = _Worker(directory, request)
    answers: list[RunAnswer] = []
    for run in request.runs:
        answers.append(worker.answer(run))
        if not answers[-1].same:
            break
    return tuple(answers)


@dataclass
class _Worker:
    directory: Path
    request: VerificationRequest

    def answer(self, run: BackendRun) -> RunAnswer:
        """Compares both programs over the trials.

        XLA:CPU compiles several times as fast with fusion, but fusion rounds in other places before
        and after a pass. If the results are the same with fusion, that is the answer. If not, the
        programs are compiled again without it.
        """
        if self.request.options.as_deployed:
            return self._over_trials(run, self._load(run, ()))
        if run.backend == "cpu":
            try:
                fused = self._load(run, bindings.SIMPLIFYING_PASSES)
            except Exception:  # XLA's own types; only errors without fusion are reported
                fused = None
            if fused is not None:
                answer = self._over_trials(run, fused)
                if answer.same:
                    return answer
            del fused  # frees the memory of two programs
        programs, simplified = load_without_rerounding(lambda skipped: self._load(run, skipped))
        return replace(self._over_trials(run, programs), simplified=simplified)

    def _load(self, run: BackendRun, skipped: Sequence[str]) -> dict[Side, ExecutableProgram]:
        programs: dict[Side, ExecutableProgram] = {}
        for side in SIDES:
            JobStage("compiling", side, run.backend).write(self.directory)
            programs[side] = load_program(run, side, skipped=skipped)
        return programs

    def _over_trials(
        self, run: BackendRun, programs: Mapping[Side, ExecutableProgram]
    ) -> RunAnswer:
        """Compares the programs until a trial differs."""
        rule = self.request.options.rule
        seen: tuple[OutputComparison, ...] = ()
        for trial in range(self.request.options.trials):
            inputs = make_inputs(self.request, run, trial)

            def ran(side: Side, trial: int = trial, given: Instances = inputs) -> Shards:
                JobStage("running", side, run.backend, trial).write(self.directory)
                return programs[side](given)

            before, after = ran("before"), ran("after")
            outputs = compare_outputs(run.outputs, before, after, rule)
            if any(output.differing for output in outputs):
                again = compare_outputs(run.outputs, before, ran("before"), rule)
                repeats = not any(output.differing for output in again)
                return RunAnswer(outputs, trial + 1, repeats)
            seen = tuple(
                replace(new, finite=max(new.finite, old.finite))
                for new, old in zip(outputs, seen or outputs, strict=True)
            )
        return RunAnswer(seen, self.request.options.trials)


def make_inputs(request: VerificationRequest, run: BackendRun, trial: int) -> Instances:
    """Returns the inputs of a trial, `[instance][input]`; the first trial keeps integers in [0, 8).

    Inputs are in the range that the program expects, except in every other trial from the second
    on. An op that expects no negative number may be in a branch, or before a select. Only negative
    inputs show how the program treats them. Special values, if enabled, are of all kinds in every
    other trial, and tame in the rest.
    """
    specials = Specials.NONE
    if request.options.specials:
        specials = Specials.TAME if trial % 2 else Specials.ALL
    wide = trial > 0 and specials is not Specials.TAME

    def make(number: int, key: tuple[int, ...]) -> Array:
        value = run.inputs[number]
        if value.role == "key":
            return random_words(value.shape, key)
        if value.role == "nothing":
            return np.zeros(value.shape, np.bool_)
        element = value.element_type
        if value.role == "platform":  # a constant of the program by now, so this is ignored
            return np.zeros(value.shape, element.dtype)
        if number in request.options.fixed:
            return np.full(value.shape, request.options.fixed[number]).astype(element.dtype)
        values = random_array(element, value.shape, key, wide=wide, specials=specials)
        if specials is not Specials.NONE:
            return values
        # Odd trials also have negative floats and indices; even ones are valid for most programs.
        if trial % 2:
            return put_about_zero(values, element, value.below)
        return made_valid(values, element, 0 if wide else value.below)

    return make_instances(run, request.options.seed, trial, make)


if __name__ == "__main__":
    answer_request(answer)
