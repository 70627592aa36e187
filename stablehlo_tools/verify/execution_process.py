"""The child process: runs two programs on the same random inputs and compares what they leave.

    python -m stablehlo_tools.verify.execution_process DIRECTORY

A process of its own because the number of virtual devices is fixed when JAX starts, and because
XLA and the interpreter end the process they run in when a collective waits too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.processes.child import answer_request
from stablehlo_tools.verify.comparison import (
    OutputComparison,
    Shard,
    compare_output,
)
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.execution import Program, load_program
from stablehlo_tools.verify.job import SIDES, Request, Run, RunAnswer, Side, Stage
from stablehlo_tools.verify.random_inputs import (
    Specials,
    made_valid,
    put_about_zero,
    random_array,
    random_words,
)
from stablehlo_tools.verify.signatures import Value


def answer(directory: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """In the child: runs and compares what the request names, up to the first run that differs."""
    request = Request.of(fields)
    worker = _Worker(directory, request)
    answers: list[RunAnswer] = []
    for run in request.runs:
        answers.append(worker.answer(run))
        if not answers[-1].same:
            break
    return {"runs": [asdict(each) for each in answers]}


@dataclass
class _Worker:
    directory: Path
    request: Request

    def answer(self, run: Run) -> RunAnswer:
        """How both programs compare over the trials.

        XLA:CPU compiles a program several times as fast with fusion, which rounds in other places
        before and after a pass. So what is the same without any allowance for that is the same;
        what is not is compiled again without it.
        """
        if fused := self._fused(run):
            answer = self._over_trials(run, fused)
            if answer.same:
                return answer
        del fused  # two programs with their memory
        programs, simplified = self._programs(run)
        answer = self._over_trials(run, programs)
        return replace(answer, simplified=simplified)

    def _over_trials(self, run: Run, programs: Mapping[Side, Program]) -> RunAnswer:
        """Compares the programs until a trial differs."""
        seen: tuple[OutputComparison, ...] = ()
        for trial in range(self.request.trials):
            inputs = make_inputs(self.request, run, trial)

            def ran(side: Side, trial: int = trial, given: Instances = inputs) -> Shards:
                self._enter(Stage("running", side, run.backend, trial))
                return programs[side](given)

            before, after = ran("before"), ran("after")
            outputs = self._compared(run, before, after)
            if any(output.differing for output in outputs):
                again = self._compared(run, before, ran("before"))
                repeats = not any(output.differing for output in again)
                return RunAnswer(outputs, trial + 1, repeats)
            seen = tuple(map(_over_trials, seen, outputs)) if seen else outputs
        return RunAnswer(seen, self.request.trials)

    def _fused(self, run: Run) -> dict[Side, Program] | None:
        """Both programs compiled with fusion, where that is another way than the one that counts,
        and where XLA:CPU takes them so."""
        if self.request.as_deployed or run.backend != "cpu":
            return None
        try:
            return self._both(run, bindings.SIMPLIFYING_PASSES)
        except Exception:  # XLA's own types; what it says counts when it is said without fusion
            return None

    def _programs(self, run: Run) -> tuple[dict[Side, Program], bool]:
        """Both programs, compiled alike, and whether XLA's simplifier had to run for that.

        It is left out where it can be, because what it does changes rounding; a few programs have
        no form that XLA:CPU can run without it.
        """
        if self.request.as_deployed:
            return self._both(run, ()), False
        skipped = bindings.REROUNDING_PASSES
        try:
            return self._both(run, skipped), False
        except Exception:  # XLA's own types; what it says counts when the second attempt fails
            kept = [name for name in skipped if name not in bindings.INDISPENSABLE_PASSES]
            return self._both(run, kept), True

    def _both(self, run: Run, skipped: Sequence[str]) -> dict[Side, Program]:
        return {side: self._loaded(run, side, skipped) for side in SIDES}

    def _loaded(self, run: Run, side: Side, skipped: Sequence[str]) -> Program:
        self._enter(Stage("compiling", side, run.backend))
        return load_program(self.directory, run, side, skipped=skipped)

    def _compared(self, run: Run, before: Shards, after: Shards) -> tuple[OutputComparison, ...]:
        return tuple(
            OutputComparison(0)
            if value.role == "nothing"
            else compare_output(
                value.element_type, value.shape, before[i], after[i], self.request.rule
            )
            for i, value in enumerate(run.outputs)
        )

    def _enter(self, stage: Stage) -> None:
        stage.write(self.directory)


Instances = Sequence[Sequence[Array]]
Shards = list[list[Shard]]


def _over_trials(seen: OutputComparison, new: OutputComparison) -> OutputComparison:
    return replace(new, finite=max(new.finite, seen.finite))


def make_inputs(request: Request, run: Run, trial: int) -> Instances:
    """The inputs of a trial, `[instance][input]`; the first trial keeps integers in [0, 8).

    Inputs are in the range that the program wants, but for every other trial from the second on:
    an op that wants no negative number may stand in a branch, or behind a select, and what the
    program does with negative ones is seen there alone. Special values, where asked for, are all
    kinds in every other trial, and tame ones in the rest.
    """
    return [
        [
            _input(value, (request.seed, trial, i, run.shared[i][instance]), request, trial)
            for i, value in enumerate(run.inputs)
        ]
        for instance in range(run.instances)
    ]


def _input(value: Value, key: tuple[int, ...], request: Request, trial: int) -> Array:
    if value.role == "key":
        return random_words(value.shape, key)
    if value.role == "nothing":
        return np.zeros(value.shape, np.bool_)
    if value.role == "platform":  # built into the program, and ignored
        return np.zeros(value.shape, value.element_type.dtype)
    if str(key[2]) in request.fixed:
        return np.full(value.shape, request.fixed[str(key[2])]).astype(value.element_type.dtype)
    specials = Specials.NONE
    if request.specials:
        specials = Specials.TAME if trial % 2 else Specials.ALL
    wide = trial > 0 and specials is not Specials.TAME
    element = value.element_type
    values = random_array(element, value.shape, key, wide=wide, specials=specials)
    if specials is not Specials.NONE:
        return values
    if trial % 2:
        return put_about_zero(values, element, value.below)
    return made_valid(values, element, 0 if wide else value.below)


if __name__ == "__main__":
    answer_request(answer)
