"""The child process: runs programs on residues, and compares what they leave bit for bit.

python -m stablehlo_tools.verify.exact.process DIRECTORY
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from stablehlo_tools.processes.child import answer_request
from stablehlo_tools.verify.comparison import BITWISE, OutputComparison, Shard, compare_output
from stablehlo_tools.verify.element_types import Array, Kind, element_type
from stablehlo_tools.verify.exact.branches import Branching
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.host_functions import Host, register, registered
from stablehlo_tools.verify.exact.inputs import fixed_input, make_input, style_of
from stablehlo_tools.verify.exact.programs import PARTIAL, FieldRun
from stablehlo_tools.verify.execution import ModuleProgram, Program
from stablehlo_tools.verify.job import Stage, value_of
from stablehlo_tools.verify.signatures import Value

# Integers need none of these, and they take most of the time.
_SKIPPED = (
    *("algsimp", "small-while-loop-hoisting", "reshape-mover", "transpose-folding"),
    *("constant_folding", "simplify-conditional"),
)

_SCALARS_WITHOUT_GAIN = 40  # that are tried before a program is taken for explored

Shards = list[list[Shard]]


def answer(directory: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """In the child: compares the programs of a request on its inputs."""
    return FieldComparison(directory, fields).run()


class FieldComparison:
    """Runs the programs of a request on one input after another, until one tells them apart."""

    def __init__(self, directory: Path, fields: dict[str, Any]) -> None:
        register()
        self.directory = directory
        self.field = Field(fields["prime"])
        self.runs = {name: FieldRun.of(run) for name, run in fields["runs"].items()}
        self.inputs: list[Value] = [value_of(value) for value in fields["inputs"]]
        self.outputs: list[Value] = [value_of(value) for value in fields["outputs"]]
        self.fixed: Mapping[str, float] = fields["fixed"]
        self.seed, self.trials = fields["seed"], fields["trials"]
        self.scalars: list[int] = fields["scalars"]
        self.together: bool = fields["together"]
        self.programs: dict[str, tuple[Program, Host]] = {}
        self.after = "after"
        self.wrong: dict[str, list[int]] = {}
        self.zero = [True] * len(self.outputs)
        self.count = 0

    def run(self) -> dict[str, Any]:
        together = ["before", "after", *(["before_partitioned"] if self.together else [])]
        self.compile([name for name in together if name in self.runs])
        outputs: list[OutputComparison] = []
        for trial in range(self.trials):
            outputs = self.compare(trial, None)
            if any(output.differing for output in outputs):
                return self.result(outputs)
        for scalar in self.tried_scalars():
            outputs = self.compare(0, scalar)
            if any(output.differing for output in outputs):
                return self.result(outputs)
        if "before_partitioned" in self.runs:
            partial = json.dumps(self.result(outputs))
            (self.directory / PARTIAL).write_text(partial, encoding="utf-8")
            for trial in range(min(self.trials, 2)):  # with valid indices, and with others
                inputs = self.make_inputs(trial, None)
                before = self.made("before", inputs, trial)
                partitioned = self.made("before_partitioned", inputs, trial)
                self.note_wrong("before", before, partitioned)
        return self.result(outputs)

    def result(self, outputs: Sequence[OutputComparison]) -> dict[str, Any]:
        """The answer, with the comparison of the last input."""
        sides = ("before", "before"), ("after", self.after)
        return {
            "outputs": [asdict(output) for output in outputs],
            "inputs": self.count,
            "zero": [i for i, zero in enumerate(self.zero) if zero],
            "branches": {side: self.choices(name) for side, name in sides},
            "not_entered": {side: self.missing(name) for side, name in sides},
            "one_sided": {side: self.one_sided(name) for side, name in sides},
            "wrongly_partitioned": self.wrong,
        }

    def compare(self, trial: int, scalar: int | None) -> list[OutputComparison]:
        inputs = self.make_inputs(trial, scalar)
        before = self.made("before", inputs, trial)
        after = self.made(self.after, inputs, trial)
        outputs = self.compare_outputs(before, after)
        untried = self.after == "after" and "after_unsharded" in self.runs
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
        """Scalars with which BEFORE enters a branch that no input has entered yet."""
        if not any(map(_is_integer_scalar, self.inputs)):
            return []
        found: list[int] = []
        idle, left = 0, len(self.missing("before"))
        for scalar in self.scalars:
            if not left or idle == _SCALARS_WITHOUT_GAIN:
                break
            self.made("before", self.make_inputs(0, scalar), 0)
            now = len(self.missing("before"))
            found += [scalar] if now < left else []
            idle, left = (0 if now < left else idle + 1), now
        return found

    def choices(self, name: str) -> int:
        """The number of branches and loops that a program may enter."""
        return sum(len(each.choices) for each in self.branchings(name))

    def missing(self, name: str) -> list[str]:
        """The branches and loops of a program that no input has entered yet, in words."""
        _, host = self.programs[name]
        return [text for each in self.branchings(name) for text in each.missing(host.seen)]

    def branchings(self, name: str) -> list[Branching]:
        """The branches and loops of a program."""
        return [each for each in self.runs[name].branchings if each.choices]

    def one_sided(self, name: str) -> list[int]:
        """The numbers of the marked comparisons without both outcomes."""
        _, host = self.programs[name]
        marked = [each for each in self.runs[name].branchings if not each.choices]
        return [int(number) for each in marked for number in each.missing(host.seen)]

    def compile(self, names: Sequence[str]) -> None:
        """Compiles programs at the same time, as XLA does most of it in one thread; or one after
        the other, so that the stage names the one that ends the process."""
        with ThreadPoolExecutor(len(names) if self.together else 1) as pool:
            for name, program in zip(names, pool.map(self.compile_program, names), strict=True):
                self.programs[name] = program

    def compile_program(self, name: str) -> tuple[Program, Host]:
        """A program that is ready to run, and its host."""
        Stage("compiling", name.partition("_")[0], "cpu").write(self.directory)
        described = self.runs[name]
        code = (self.directory / name).read_bytes()
        program = ModuleProgram(code, described.run, "before", skipped=_SKIPPED)
        return program, Host(self.field, described.host_functions)

    def made(self, name: str, inputs: Sequence[Sequence[Array]], trial: int) -> Shards:
        """Returns what a program makes of inputs."""
        if name not in self.programs:
            self.compile([name])
        Stage("running", name.partition("_")[0], "cpu", trial).write(self.directory)
        program, host = self.programs[name]
        with registered(host):
            return program(inputs)

    def note_wrong(self, side: str, right: Shards, partitioned: Shards) -> None:
        outputs = self.compare_outputs(right, partitioned)
        wrong = [number for number, output in enumerate(outputs) if output.differing]
        if wrong:
            self.wrong[side] = sorted({*self.wrong.get(side, ()), *wrong})

    def compare_outputs(self, before: Shards, after: Shards) -> list[OutputComparison]:
        """How each output compares; how far apart residues are says nothing."""
        comparisons = [
            compare_output(value.element_type, value.shape, before[i], after[i], BITWISE)
            for i, value in enumerate(self.runs["before"].run.outputs)
        ]
        return [replace(each, max_abs_difference=None) for each in comparisons]

    def make_inputs(self, trial: int, scalar: int | None) -> list[list[Array]]:
        run, style = self.runs["before"].run, style_of(trial)

        def make(i: int, instance: int) -> Array:
            key = (self.seed, trial, i, run.shared[i][instance])
            number = self.fixed.get(str(i))
            if number is None:
                return make_input(self.inputs[i], self.field, key, style, scalar)
            return fixed_input(self.inputs[i], self.field, number)

        numbers = range(len(self.inputs))
        return [[make(i, instance) for i in numbers] for instance in range(run.instances)]


def _is_integer_scalar(value: Value) -> bool:
    element = element_type(value.element)
    kinds = (Kind.SIGNED, Kind.UNSIGNED)
    return not value.shape and element is not None and element.kind in kinds


if __name__ == "__main__":
    answer_request(answer)
