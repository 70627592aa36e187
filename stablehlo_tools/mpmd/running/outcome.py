"""Runs a set one way or another and compares what it leaves with the original program.

A set sums the same terms in another order, so it rounds differently. How much that matters is the
program's own affair: it is run on random inputs, again on these moved by one rounding, and a set
may differ by a few times what that changes.

Where a program computes with floats of 16 bits or less, inputs all moved by such a rounding would
hide an update. Finer ones are moved just as far as makes some coarse values round the other way, of
coarse ones a few are moved, and XLA is asked once to round coarse values where it likes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.manifest import Entry, Manifest
from stablehlo_tools.mpmd.rank_set import RankSet, argument_paths, result_paths
from stablehlo_tools.mpmd.running.child import (
    ask,
    cut_pieces,
    element_of,
    inputs_of,
    join_pieces,
    outputs_of,
    read_arrays,
    type_of,
    value_of,
    write_arrays,
)
from stablehlo_tools.mpmd.running.interpreter import run_in_interpreter
from stablehlo_tools.mpmd.running.processes import run_processes
from stablehlo_tools.mpmd.running.sequential import Played, Run, run_sequentially
from stablehlo_tools.verify.comparison import BITWISE, OutputComparison, Rule, Shard, compare_output
from stablehlo_tools.verify.element_types import Array, ElementType, Kind, element_type, real_part
from stablehlo_tools.verify.job import Request
from stablehlo_tools.verify.plan import Plan, cpu_index, make_plan, no_input
from stablehlo_tools.verify.random_inputs import put_in_range, random_array, random_words
from stablehlo_tools.verify.signatures import Value

RunnerName = Literal["sequential", "interpreter", "processes"]
_RUNNERS: Mapping[RunnerName, Callable[[RankSet, Sequence[Sequence[Array]], Path, float], Run]] = {
    "sequential": run_sequentially,
    "interpreter": run_in_interpreter,
    "processes": run_processes,
}
MOVED = 2  # runs on moved inputs
FACTOR = 16  # a set may differ by so many times what the moved inputs change,
FACTOR_COARSE = 2  # or where an output is of a coarse type
_LEAST, _LEAST_COARSE = 32, 2  # roundings of an output's largest element that are always allowed
_COARSE = 16  # bits of a mantissa: float types with fewer are coarse
_FINEST = 52  # bits of the finest type's mantissa
_FEW = 64  # one in so many coarse values is moved
_JOB = "original"


def run_set(ranks: RankSet, original: Artifact | None, options: Options) -> Outcome:
    """Runs a set on random inputs, and the original program on the same, if there is one.

    Raises ToolError for what cannot be run, for ranks that wait for each other for ever, and for
    an original that the set was not made of.
    """
    started = time.monotonic()
    inputs, plan = make_inputs(ranks.manifest, original, options.seed, options.fixed)
    pieces = cut_pieces(ranks.manifest, of_manifest(ranks.manifest, original, inputs))
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as root:
        expected: Expected | None = None
        if original is not None and plan is not None:
            room = Path(root) / "original"
            room.mkdir()
            expected = run_original(room, plan, original, inputs, options.seed, options.timeout)
        room = Path(root) / "set"
        room.mkdir()
        run = _RUNNERS[options.how](ranks, pieces, room, options.timeout)
    results = join_pieces(ranks.manifest, run.results)
    outputs = tuple(
        Output(entry.path, entry.type)
        if expected is None
        else _compared(entry.path, entry.type, expected, i, results[i], options.rule)
        for i, entry in enumerate(ranks.manifest.outputs)
    )
    seconds = time.monotonic() - started
    return Outcome(options.how, ranks.ranks, outputs, run.played, run.functions, seconds)


@dataclass(frozen=True)
class Options:
    """How to run; `timeout` is in seconds, for each of the two programs.

    `rule` None lets the original say how far off a set may be, by its moved inputs. `fixed`
    gives inputs, by number, one value in every element instead of random ones.
    """

    how: RunnerName = "sequential"
    seed: int = 0
    timeout: float = 600.0
    rule: Rule | None = None
    fixed: Mapping[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class Outcome:
    """What came of running a set."""

    how: RunnerName
    ranks: int
    outputs: tuple[Output, ...]
    played: tuple[Played, ...]
    functions: int
    seconds: float

    @property
    def same(self) -> bool:
        """Whether no element differs from the original by more than rounding."""
        return not any(o.comparison is not None and o.comparison.differing for o in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {**asdict(self), "same": self.same, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class Output:
    """An output of the original program; without one to compare with, `comparison` is None.

    `allowed` is the absolute difference that counts as rounding; None where a rule was given.
    """

    path: str
    type: str
    comparison: OutputComparison | None = None
    allowed: float | None = None


def _compared(
    path: str, type_: str, expected: Expected, number: int, actual: Array, rule: Rule | None
) -> Output:
    value = value_of(type_, path)
    element, index = element_of(value), (slice(None),) * len(value.shape)
    allowed = expected.allowed[number] if rule is None else None
    by = Rule(atol=allowed) if rule is None else rule
    before, after = (Shard(0, index, a) for a in (expected.outputs[number], actual))
    comparison = compare_output(element, value.shape, [before], [after], by)
    if comparison.max_abs_difference is None or not comparison.differing:
        comparison = _with_largest(comparison, before.data, after.data)
    return Output(path, type_, comparison, allowed)


def _with_largest(comparison: OutputComparison, before: Array, after: Array) -> OutputComparison:
    """The comparison with the largest difference, where it is over differing elements only."""
    precise = np.complex128 if before.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        apart = np.abs(before.astype(precise) - after.astype(precise))
    finite = apart[np.isfinite(apart)]
    largest = float(finite.max()) if finite.size else None
    return OutputComparison(
        comparison.elements, comparison.differing, largest, comparison.first, comparison.finite
    )


@dataclass(frozen=True)
class Expected:
    """What the original makes of the inputs; `allowed` is how far each output may be off."""

    outputs: tuple[Array, ...]
    values: tuple[Value, ...]
    allowed: tuple[float, ...]


def make_inputs(
    manifest: Manifest, original: Artifact | None, seed: int, fixed: Mapping[int, float]
) -> tuple[list[Array], Plan | None]:
    """Random inputs for the original, in its order, and how it is run.

    `fixed` gives inputs, by number, one value in every element. Raises ToolError where the original
    and the manifest do not speak of the same inputs and outputs.
    """
    if original is None:
        plan = None
        values = [value_of(entry.type, entry.path) for entry in manifest.inputs]
    else:
        with naming(original.name):
            plan = make_plan({"before": original, "after": original}, "cpu")
            if plan.run.instances != 1:
                raise ToolError("each device has a value of its own for each input of this program")
            values = list(plan.run.inputs)
            _check("input", values, _listed(manifest, original, len(values)))
            _check("output", plan.run.outputs, list(manifest.outputs))
            _check_paths("input", argument_paths(original), manifest.inputs)
            _check_paths("output", result_paths(original), manifest.outputs)
    first = 0 if original is not None else _platforms(manifest)  # which nobody counts
    count = len(values) - first
    wrong = next((index for index in fixed if index >= count), None)
    if wrong is not None:
        raise no_input(wrong, fixed[wrong], count)
    made = [_input(value, (seed, 0, i, 0), fixed.get(i - first)) for i, value in enumerate(values)]
    for number in range(first):
        made[number] = np.zeros_like(made[number])
    return made, plan


def of_manifest(manifest: Manifest, original: Artifact | None, inputs: list[Array]) -> list[Array]:
    """The inputs that the manifest lists: an original may have some that its module has not, and
    its module the index of the platform in front of them."""
    if original is None:
        return inputs
    platform = np.asarray(cpu_index({"before": original}), np.int32)
    front = [platform] * _platforms(manifest)
    if len(front) + len(inputs) == len(manifest.inputs):
        return [*front, *inputs]
    return [*front, *(inputs[i] for i in _kept(original))]


def _platforms(manifest: Manifest) -> int:
    """How many inputs say which platform it is: one, of a program for several, in front."""
    return int(bool(manifest.inputs) and not manifest.inputs[0].path)


def run_original(
    directory: Path,
    plan: Plan,
    program: Artifact,
    inputs: Sequence[Array],
    seed: int,
    timeout: float,
) -> Expected:
    """Runs the original on the inputs, and on inputs moved a little.

    `directory` is empty, and for files between.
    """
    run = plan.run
    job = directory / _JOB
    job.mkdir()
    (job / run.program("before")).write_bytes(plan.programs["before"])
    Request((run,), BITWISE, 1, seed, False, {}, False).write(job)
    types = [type_of(value) for value in run.inputs]
    has_coarse = _has_coarse(program.module)
    finest = _COARSE if has_coarse else _FINEST
    for number in range(1 + MOVED):
        moved = [
            array if number == 0 else _moved(array, value, finest, (seed, number, i))
            for i, (array, value) in enumerate(zip(inputs, run.inputs, strict=True))
        ]
        write_arrays(directory / inputs_of(number), moved, types)
    devices = run.replicas * run.partitions
    numbers = list(range(1 + MOVED))
    with naming(program.name):
        for loose in (False, True) if has_coarse else (False,):  # as a process is started
            wanted = numbers if not has_coarse else numbers[-1:] if loose else numbers[:-1]
            request = {"job": _JOB, "numbers": wanted, "loose": loose}
            what = "running the program"
            ask("reference_process", directory, request, devices, timeout, what, loose=loose)
    outputs = [read_arrays(directory / outputs_of(number)) for number in numbers]
    allowed = [
        _allowed(value, outputs[0][i], [other[i] for other in outputs[1:]])
        for i, value in enumerate(run.outputs)
    ]
    return Expected(tuple(outputs[0]), run.outputs, tuple(allowed))


def _listed(manifest: Manifest, original: Artifact, count: int) -> list[Entry | None]:
    """The entry of each input; None for one that the module of the original does not have."""
    listed = manifest.inputs[_platforms(manifest) :]
    if len(listed) == count:
        return list(listed)
    kept = _kept(original)
    if len(listed) != len(kept):
        raise ToolError(
            f"this takes {count} inputs, and the set was made of a program that takes "
            f"{len(listed)}: {manifest.source}"
        )
    entries = dict(zip(kept, listed, strict=True))
    return [entries.get(i) for i in range(count)]


def _kept(original: Artifact) -> list[int]:
    return [] if original.exported is None else list(original.exported.module_kept_var_idx)


def _check(what: str, values: Sequence[Value], entries: Sequence[Entry | None]) -> None:
    if len(values) != len(entries):
        raise ToolError(f"there are {len(values)} {what}s, and the manifest has {len(entries)}")
    for number, (value, entry) in enumerate(zip(values, entries, strict=True)):
        if entry is None or (what == "input" and not entry.pieces):
            continue
        if type_of(value) != entry.type:
            raise ToolError(
                f"{what} {number} is {type_of(value)}, and the manifest has {entry.path} as "
                f"{entry.type}: is this the program that the set was made of?"
            )


def _check_paths(what: str, paths: Sequence[str], entries: Sequence[Entry]) -> None:
    """Holds the names against each other where both programs have some of pytrees; the index of a
    platform, in front, has none and is not counted."""
    named = [path for path in paths if path]
    listed = [entry for entry in entries if entry.path]
    for number, (path, entry) in enumerate(zip(named, listed, strict=False)):
        if path != entry.path and path.startswith("[") and entry.path.startswith("["):
            raise ToolError(
                f"{what} {number} is {path}, and the manifest has {entry.path}: is this the "
                "program that the set was made of?"
            )


def _input(value: Value, key: tuple[int, ...], fixed: float | None) -> Array:
    if value.role == "key":
        return random_words(value.shape, key)
    if value.role != "data":
        return np.zeros(value.shape, element_of(value).dtype)
    if fixed is not None:
        return np.full(value.shape, fixed).astype(element_of(value).dtype)
    element = element_of(value)
    return put_in_range(random_array(element, value.shape, key), element, value.sign, value.below)


def _moved(array: Array, value: Value, finest: int, key: tuple[int, ...]) -> Array:
    """Floats, each a rounding up or down, to `finest` bits at most; of coarse ones a few."""
    element = element_of(value)
    if value.role != "data" or not element.is_inexact:
        return array
    rng = np.random.default_rng(key)
    precise = np.complex128 if element.kind is Kind.COMPLEX else np.float64
    bits = _mantissa(element)
    steps = (rng.integers(2, size=array.shape) * 2 - 1) * 2.0 ** -min(bits, finest)
    if bits < _COARSE:
        steps = np.where(rng.integers(_FEW, size=array.shape) == 0, steps, 0.0)
    with np.errstate(all="ignore"):
        return (array.astype(precise) * (1 + steps)).astype(element.dtype)


def _allowed(value: Value, base: Array, others: Sequence[Array]) -> float:
    element = element_of(value)
    if not element.is_inexact or not base.size:
        return 0.0
    precise = np.complex128 if element.kind is Kind.COMPLEX else np.float64
    with np.errstate(all="ignore"):
        size = _largest(np.abs(base.astype(precise)))
        changes = [_largest(np.abs(o.astype(precise) - base.astype(precise))) for o in others]
    bits = _mantissa(element)
    factor, least = (FACTOR, _LEAST) if bits >= _COARSE else (FACTOR_COARSE, _LEAST_COARSE)
    return max(factor * max(changes), least * 2.0**-bits * size)


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _mantissa(element: ElementType) -> int:
    """Bits of the mantissa of a float type, or of the parts of a complex one."""
    return int(ml_dtypes.finfo(real_part(element).dtype).nmant)


def _has_coarse(module: ir.Module) -> bool:
    """Whether a program computes with coarse floats."""
    seen: set[ir.Type] = set()
    is_coarse = False

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal is_coarse
        for result in op.results:
            type_ = result.type
            if type_ in seen or not isinstance(type_, ir.RankedTensorType):
                continue
            seen.add(type_)
            element = element_type(str(type_.element_type))
            if element is not None and element.is_inexact and _mantissa(element) < _COARSE:
                is_coarse = True
                return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return is_coarse
