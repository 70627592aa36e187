"""The child process: runs two programs on the same random inputs and compares what they leave.

    python -m stablehlo_tools.verify.execution_process DIRECTORY

A process of its own because the number of virtual devices is fixed when JAX starts, and because
XLA and the interpreter end the process they run in when a collective waits too long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stablehlo_tools.diagnostics import first_line
from stablehlo_tools.verify.comparison import OutputComparison, Shard, compare_output
from stablehlo_tools.verify.element_types import Array, element_type
from stablehlo_tools.verify.execution import Program, load_program
from stablehlo_tools.verify.job import SIDES, Answer, Request, Run, RunAnswer, Side, Stage
from stablehlo_tools.verify.random_inputs import random_array, random_words
from stablehlo_tools.verify.signatures import Value


def main(directory: Path) -> None:
    """Answers the request that lies in `directory`."""
    request = Request.read(directory)
    worker = _Worker(directory, request)
    answers: list[RunAnswer] = []
    try:
        for run in request.runs:
            answers.append(worker.answer(run))
            if not answers[-1].same:
                break
        Answer(tuple(answers)).write(directory)
    except Exception as error:  # whatever XLA, JAX or the interpreter has to say about a program
        message = first_line(str(error) or type(error).__name__)
        Answer(error=message, stage=worker.stage).write(directory)


@dataclass
class _Worker:
    directory: Path
    request: Request
    stage: Stage | None = None

    def answer(self, run: Run) -> RunAnswer:
        """Compiles both programs, then compares them until a trial differs."""
        programs = {side: self._loaded(run, side) for side in SIDES}
        seen: tuple[OutputComparison, ...] = ()
        for trial in range(self.request.trials):
            inputs = make_inputs(self.request, run, trial)

            def ran(side: Side, trial: int = trial, inputs: Instances = inputs) -> Shards:
                self._enter(Stage("running", side, run.backend, trial))
                return programs[side](inputs)

            before = ran("before")
            found = _compared(self.request, before, ran("after"))
            if any(output.differing for output in found):
                again = _compared(self.request, before, ran("before"))
                repeats = not any(output.differing for output in again)
                return RunAnswer(found, trial + 1, repeats)
            seen = tuple(
                replace(new, all_nan=new.all_nan and (not seen or seen[i].all_nan))
                for i, new in enumerate(found)
            )
        return RunAnswer(seen, self.request.trials)

    def _loaded(self, run: Run, side: Side) -> Program:
        self._enter(Stage("compiling", side, run.backend))
        path = self.directory / run.program(side)
        return load_program(path, run.forms[side], self.request, run)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        stage.write(self.directory)


Instances = Sequence[Sequence[Array]]
Shards = list[list[Shard]]


def make_inputs(request: Request, run: Run, trial: int) -> Instances:
    """The inputs of a trial, `[instance][input]`; the first trial keeps integers in [0, 8)."""
    return [
        [
            _input(value, (request.seed, trial, i, instance), request, trial)
            for i, value in enumerate(request.inputs)
        ]
        for instance in range(run.instances)
    ]


def _input(value: Value, key: tuple[int, ...], request: Request, trial: int) -> Array:
    if value.role == "key":
        return random_words(value.shape, key)
    element = element_type(value.element if value.role == "data" else "i32")
    assert element is not None
    if value.role != "data":  # the platform is built into the program; float0 has no values
        return random_array(element, (), (0,)) * 0
    return random_array(element, value.shape, key, wide=trial > 0, specials=request.specials)


def _compared(request: Request, before: Shards, after: Shards) -> tuple[OutputComparison, ...]:
    return tuple(
        OutputComparison(0)
        if value.role == "nothing"
        else compare_output(_known(value), value.shape, before[i], after[i], request.rule)
        for i, value in enumerate(request.outputs)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
