"""Runs a set, and compares its outputs with those of its origin.

In exact arithmetic the two are equal bit for bit (`set_in_field`). In floats a set may differ by
rounding, because it adds the same terms in another order. A rule defines the tolerance.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, naming, size
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.origin_inputs import make_inputs
from stablehlo_tools.mpmd.running.processes import run_processes
from stablehlo_tools.mpmd.running.rank_child import (
    ask,
    cut_pieces,
    element_of,
    inputs_of,
    join_pieces,
    outputs_of,
    read_arrays,
    type_of,
    write_arrays,
)
from stablehlo_tools.mpmd.running.sequential import Played, SetRun, run_sequentially
from stablehlo_tools.mpmd.running.set_in_field import verify_in_field
from stablehlo_tools.verify import Options, Verification
from stablehlo_tools.verify.comparison import compare_output, whole
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.run_plan import BackendPlan
from stablehlo_tools.verify.twin import estimated_bytes
from stablehlo_tools.verify.verification import compared_outputs, reason_for_floats

RunnerName = Literal["sequential", "processes"]
_RUNNERS: Mapping[
    RunnerName, Callable[[RankSet, Sequence[Sequence[Array]], Path, float], SetRun]
] = {"sequential": run_sequentially, "processes": run_processes}
_COPIES = 4  # of the original's bytes: its own and the set's, in elements of twice the size


@dataclass(frozen=True)
class SetOptions(Options):
    """Describes how to run and compare; `timeout` is in seconds, for each of the two programs in
    floats.

    Only `sequential` runs in exact arithmetic.
    """

    how: RunnerName = "sequential"

    @property
    def asks_for_floats(self) -> bool:
        """True if an option is set that only applies to floats."""
        return self.how != "sequential" or super().asks_for_floats


@dataclass(frozen=True)
class SetOutcome:
    """The result of a run: the paths and types of its `outputs`, and the comparison of `values`.

    `values` is None without an original. In exact arithmetic `played` is empty.
    """

    how: RunnerName
    ranks: int
    outputs: tuple[ManifestEntry, ...]
    values: Verification | None
    seconds: float
    played: tuple[Played, ...] = ()
    functions: int = 0

    @property
    def same(self) -> bool:
        """True if no element differs from the original."""
        return self.values is None or self.values.same

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as plain data."""
        return {
            "how": self.how,
            "ranks": self.ranks,
            "outputs": [{"path": entry.path, "type": entry.type} for entry in self.outputs],
            "values": None if self.values is None else self.values.to_json(),
            "played": [asdict(rank) for rank in self.played],
            "functions": self.functions,
            "seconds": round(self.seconds, 3),
            "same": self.same,
        }


def run_set(ranks: RankSet, original: Artifact | None, options: SetOptions) -> SetOutcome:
    """Runs a set on random inputs, and the original program on the same inputs, if there is one.

    Raises ToolError for programs that cannot be run, for ranks that deadlock, and for an original
    that the set was not made from.
    """
    started = time.monotonic()
    why = ""
    if original is not None:
        _check_size(original)
    if original is not None and not options.asks_for_floats:
        try:
            values = verify_in_field(ranks, original, options)
            outputs, seconds = ranks.manifest.outputs, time.monotonic() - started
            return SetOutcome(options.how, ranks.ranks, outputs, values, seconds)
        except UnmappedError as error:
            if options.arithmetic == "exact":
                raise
            why = reason_for_floats(error)
    return _run_in_floats(ranks, original, options, started, why)


def _check_size(original: Artifact) -> None:
    needed = _COPIES * estimated_bytes(original.module)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        error = ToolError(
            f"running it and the set needs about {size(needed)}, but this machine has "
            f"{size(memory)}; export the step at smaller sizes, and compare the set of that one"
        )
        error.input_name = original.name
        raise error


def _run_in_floats(
    ranks: RankSet, original: Artifact | None, options: SetOptions, started: float, why: str
) -> SetOutcome:
    manifest = ranks.manifest
    inputs = make_inputs(manifest, original, options.seed, options.fixed)
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as root:
        expected: list[Array] = []
        if original is not None and inputs.plan is not None:
            room = Path(root) / "original"
            room.mkdir()
            with naming(original.name):
                expected = _run_original(room, inputs.plan, inputs.arrays, options.timeout)
        room = Path(root) / "set"
        room.mkdir()
        pieces = cut_pieces(manifest, inputs.of_set)
        run = _RUNNERS[options.how](ranks, pieces, room, options.timeout)
    results = join_pieces(manifest, run.results)
    seconds = time.monotonic() - started
    values = None
    if inputs.plan is not None:
        values = _compare_results(manifest, inputs.plan, expected, results, options, seconds, why)
    return SetOutcome(
        options.how, ranks.ranks, manifest.outputs, values, seconds, run.played, run.functions
    )


def _run_original(
    directory: Path, plan: BackendPlan, inputs: Sequence[Array], timeout: float
) -> list[Array]:
    """Returns the outputs of the original in floats. `directory` is for temporary files."""
    run = plan.run
    write_arrays(directory / inputs_of(0), inputs, [type_of(value) for value in run.inputs])
    devices = run.replicas * run.partitions
    ask("reference_process", directory, run, devices, timeout, "running the program")
    return read_arrays(directory / outputs_of(0))


def _compare_results(
    manifest: Manifest,
    plan: BackendPlan,
    expected: Sequence[Array],
    results: Sequence[Array],
    options: SetOptions,
    seconds: float,
    why: str,
) -> Verification:
    values = plan.run.outputs
    outputs = [
        compare_output(element_of(value), value.shape, [whole(one)], [whole(other)], options.rule)
        for value, one, other in zip(values, expected, results, strict=True)
    ]
    return Verification(
        same=not any(output.differing for output in outputs),
        rule=options.rule,
        backend="cpu",
        trials=1,
        devices=manifest.devices * len(manifest.ranks),
        seconds=seconds,
        outputs=compared_outputs(values, outputs),
        vacuous=tuple(i for i, output in enumerate(outputs) if output.shows_nothing),
        in_floats=why,
    )
