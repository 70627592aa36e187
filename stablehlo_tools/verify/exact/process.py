"""The child process: runs programs on residues, and compares their outputs bit for bit.

python -m stablehlo_tools.verify.exact.process DIRECTORY
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from stablehlo_tools.processes.child import answer_request, write_message
from stablehlo_tools.verify.comparison import BITWISE, OutputComparison
from stablehlo_tools.verify.element_types import Array, ElementKind, element_type
from stablehlo_tools.verify.exact.entered_branches import Branching
from stablehlo_tools.verify.exact.host_functions import Host, register, register_host
from stablehlo_tools.verify.exact.inputs import IntegerStyle, fixed_input, make_input
from stablehlo_tools.verify.exact.programs import PARTIAL, Exactness, FieldAnswer, FieldRequest
from stablehlo_tools.verify.execution import (
    ExecutableProgram,
    Instances,
    ModuleProgram,
    Shards,
    compare_outputs,
    make_instances,
)
from stablehlo_tools.verify.verification_job import JobStage, Side

# XLA's passes that integers do not need, and that take most of the time.
_SKIPPED = (
    *("algsimp", "small-while-loop-hoisting", "reshape-mover", "transpose-folding"),
    *("constant_folding", "simplify-conditional"),
)

_SCALARS_WITHOUT_GAIN = 40  # scalars in a row that enter no new branch, after which the search ends


def answer(directory: Path, request: FieldRequest) -> FieldAnswer:
    """Compares the programs of a request on its inputs, in the child."""
    return FieldComparison(directory, request).run()


class FieldComparison:
    """Runs the programs of a request on one input after another, until outputs differ."""

    def __init__(self, directory: Path, request: FieldRequest) -> None:
        register()
        self.directory = directory
        self.request = request
        self.plan = request.plan
        self.programs: dict[str, tuple[ExecutableProgram, Host]] = {}
        self.after = "after"
        self.wrong: dict[Side, set[int]] = {}
        self.zero = [True] * len(self.plan.signature.outputs)
        self.count = 0

    def run(self) -> FieldAnswer:
        together = ["before", "after", *(["before_partitioned"] if self.request.together else [])]
        self.compile([name for name in together if name in self.plan.runs])
        outputs: tuple[OutputComparison, ...] = ()
        for trial, scalar in self.attempts():
            outputs = self.compare(trial, scalar)
            if any(output.differing for output in outputs):
                return self.result(outputs)
        if "before_partitioned" in self.plan.runs:
            write_message(self.directory / PARTIAL, self.result(outputs))
            for trial in range(min(self.request.trials, 2)):  # with valid indices, and with others
                inputs = self.make_inputs(trial, None)
                before = self.made("before", inputs, trial)
                partitioned = self.made("before_partitioned", inputs, trial)
                self.note_wrong("before", before, partitioned)
        return self.result(outputs)

    def attempts(self) -> Iterator[tuple[int, int | None]]:
        """Yields the trials, then trial 0 with each scalar that makes BEFORE enter a new branch."""
        for trial in range(self.request.trials):
            yield trial, None
        for scalar in self.tried_scalars():
            yield 0, scalar

    def result(self, outputs: tuple[OutputComparison, ...]) -> FieldAnswer:
        """Returns the answer, with the comparison of the last input."""
        sides: tuple[tuple[Side, str], ...] = (("before", "before"), ("after", self.after))
        return FieldAnswer(
            outputs,
            self.count,
            tuple(i for i, zero in enumerate(self.zero) if zero),
            Exactness(
                self.plan.field.prime,
                self.plan.degree,
                {side: sum(len(each.choices) for each in self.branchings(n)) for side, n in sides},
                {side: tuple(self.missing(name)) for side, name in sides},
                {side: tuple(self.one_sided(name)) for side, name in sides},
                {side: tuple(sorted(wrong)) for side, wrong in self.wrong.items()},
            ),
        )

    def compare(self, trial: int, scalar: int | None) -> tuple[OutputComparison, ...]:
        inputs = self.make_inputs(trial, scalar)
        before = self.made("before", inputs, trial)
        after = self.made(self.after, inputs, trial)
        outputs = self.compare_outputs(before, after)
        # If AFTER agrees without its shardings, XLA's partitioner made the difference.
        untried = self.after == "after" and "after_unsharded" in self.plan.runs
        if untried and any(o.differing for o in outputs):
            unsharded = self.made("after_unsharded", inputs, trial)
            again = self.compare_outputs(before, unsharded)
            if not any(o.differing for o in again):
                self.note_wrong("after", unsharded, after)
                self.after, outputs = "after_unsharded", again
        self.count += 1
        for number, shards in enumerate(before):
            self.zero[number] = self.zero[number] and not any(np.any(s.data) for s in shards)
        return outputs

    def tried_scalars(self) -> Sequence[int]:
        kinds = (ElementKind.SIGNED, ElementKind.UNSIGNED)
        inputs = self.plan.signature.inputs
        scalar_types = [element_type(value.element) for value in inputs if not value.shape]
        if not any(element is not None and element.kind in kinds for element in scalar_types):
            return []
        found: list[int] = []
        idle, left = 0, len(self.missing("before"))
        for scalar in self.plan.scalars:
            if not left or idle == _SCALARS_WITHOUT_GAIN:
                break
            self.made("before", self.make_inputs(0, scalar), 0)
            now = len(self.missing("before"))
            found += [scalar] if now < left else []
            idle, left = (0 if now < left else idle + 1), now
        return found

    def missing(self, name: str) -> list[str]:
        """Describes the branches and loops of a program that no input has entered yet."""
        _, host = self.programs[name]
        return [text for each in self.branchings(name) for text in each.missing(host.seen)]

    def branchings(self, name: str) -> list[Branching]:
        """Returns the branches and loops of a program."""
        return [each for each in self.plan.runs[name].branchings if each.choices]

    def one_sided(self, name: str) -> list[int]:
        """Returns the numbers of the marked comparisons without both outcomes."""
        _, host = self.programs[name]
        marked = [each for each in self.plan.runs[name].branchings if not each.choices]
        return [int(number) for each in marked for number in each.missing(host.seen)]

    def compile(self, names: Sequence[str]) -> None:
        """Compiles programs concurrently, because XLA mostly uses one thread for each.

        Without `together`, compiles one after the other, so that the stage names the program that
        ends the process."""
        with ThreadPoolExecutor(len(names) if self.request.together else 1) as pool:
            for name, program in zip(names, pool.map(self.compile_program, names), strict=True):
                self.programs[name] = program

    def compile_program(self, name: str) -> tuple[ExecutableProgram, Host]:
        """Compiles a program; returns it with its host."""
        JobStage("compiling", name.partition("_")[0], "cpu").write(self.directory)
        described = self.plan.runs[name]
        program = ModuleProgram(described.run, "before", skipped=_SKIPPED)
        return program, Host(self.plan.field, described.host_functions)

    def made(self, name: str, inputs: Instances, trial: int) -> Shards:
        """Runs a program on inputs and returns its outputs; compiles it first if necessary."""
        if name not in self.programs:
            self.compile([name])
        JobStage("running", name.partition("_")[0], "cpu", trial).write(self.directory)
        program, host = self.programs[name]
        with register_host(host):
            return program(inputs)

    def note_wrong(self, side: Side, right: Shards, partitioned: Shards) -> None:
        outputs = self.compare_outputs(right, partitioned)
        wrong = {number for number, output in enumerate(outputs) if output.differing}
        if wrong:
            self.wrong[side] = self.wrong.get(side, set()) | wrong

    def compare_outputs(self, before: Shards, after: Shards) -> tuple[OutputComparison, ...]:
        """Compares each output, without distances, which are meaningless for residues."""
        outputs = self.plan.runs["before"].run.outputs
        comparisons = compare_outputs(outputs, before, after, BITWISE)
        return tuple(replace(each, max_abs_difference=None) for each in comparisons)

    def make_inputs(self, trial: int, scalar: int | None) -> Instances:
        field, inputs = self.plan.field, self.plan.signature.inputs
        style = list(IntegerStyle)[trial % len(IntegerStyle)]

        def make(i: int, key: tuple[int, ...]) -> Array:
            number = self.request.fixed.get(i)
            if number is None:
                return make_input(inputs[i], field, key, style, scalar)
            return fixed_input(inputs[i], field, number)

        return make_instances(self.plan.runs["before"].run, self.request.seed, trial, make)


if __name__ == "__main__":
    answer_request(answer)
