"""Runs a set one way or another and compares what it leaves with the original program."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.arrays import cut_pieces, element_of, join_pieces, value_of
from stablehlo_tools.mpmd.running.events import Played
from stablehlo_tools.mpmd.running.interpreter import run_in_interpreter
from stablehlo_tools.mpmd.running.original import (
    Expected,
    make_inputs,
    of_manifest,
    run_original,
)
from stablehlo_tools.mpmd.running.processes import run_processes
from stablehlo_tools.mpmd.running.sequential import Run, run_sequentially
from stablehlo_tools.verify.comparison import OutputComparison, Rule, Shard, compare_output
from stablehlo_tools.verify.element_types import Array

RunnerName = Literal["sequential", "interpreter", "processes"]
_RUNNERS: Mapping[RunnerName, Callable[[RankSet, Sequence[Sequence[Array]], Path, float], Run]] = {
    "sequential": run_sequentially,
    "interpreter": run_in_interpreter,
    "processes": run_processes,
}


@dataclass(frozen=True)
class Options:
    """How to run; `timeout` is in seconds, for each of the two programs.

    `rule` None lets the original say how far off a set may be, see `running.original`. `fixed`
    gives inputs, by number, one value in every element instead of random ones.
    """

    how: RunnerName = "sequential"
    seed: int = 0
    timeout: float = 600.0
    rule: Rule | None = None
    fixed: Mapping[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class Output:
    """An output of the original program; without one to compare with, `comparison` is None.

    `allowed` is the absolute difference that counts as rounding; None where a rule was given.
    """

    path: str
    type: str
    comparison: OutputComparison | None = None
    allowed: float | None = None


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
