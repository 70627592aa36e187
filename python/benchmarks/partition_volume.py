"""How many bytes each device sends: XLA's partitioner against `partition,create-reduce-scatter`.

    python python/benchmarks/partition_volume.py [MODEL ...] [--target cpu tpu] [--markdown]
    python python/benchmarks/partition_volume.py --full [PROGRAM ...] [--target gpu tpu]

Both programs, the export as it is and the partitioned one, go through the same compiler, and the
bytes are read from the two schedules (communicated_bytes.py). A ratio above 1 says that XLA's own
partitioner moves less. No device is needed.

--full: models of the zoo at the size of published ones, on 64 devices, and files of artifacts; for
each target the times of a run as its compiler schedules it, what of them is exposed, the bytes that
a device sends and the memory that the compiler counts, of the export and after the pipeline. A row
takes one to five minutes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from communicated_bytes import volume
from models.zoo import MODELS, ZOO
from optimize import named

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.chips import DEFAULT_HARDWARE
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

PIPELINE = "partition,create-reduce-scatter"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COLUMNS = ("model", "target", "partitioner", *KINDS, "total", "ratio")


def main() -> None:
    """Prints a table: two rows for each model and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all of the zoo by default")
    targets = ("cpu", "gpu", "tpu")
    parser.add_argument("--target", nargs="+", choices=targets)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--full", action="store_true", help="programs of the size of real ones")
    arguments = parser.parse_args()
    if arguments.full:
        full(arguments.models or list(ZOO), arguments.target or ["gpu", "tpu"], arguments.markdown)
        return
    form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if arguments.markdown else _PLAIN
    print(form.format(*COLUMNS))
    if arguments.markdown:
        print(form.format(*["---", "---", "---", *["---:"] * (len(COLUMNS) - 3)]))
    for name in arguments.models or ZOO:
        for target in arguments.target or ["cpu", "tpu"]:
            for row in rows(name, target):
                print(form.format(*row), flush=True)


@dataclass(frozen=True)
class Run:
    """One run of a program as a compiler schedules it: ms, bytes sent and held by a device."""

    total: float
    exposed: float
    sent: int
    held: int

    @staticmethod
    def of(program: Artifact, target: str) -> Run:
        """Compiles a program, and times its schedule on the hardware that stands for a target."""
        hardware = load_hardware(DEFAULT_HARDWARE[target])
        made = compile_artifact(program, target, _HOUR)
        devices = made.topology.devices
        simulation = simulate(hlo_task_graph(made.text, hardware, devices))
        return Run(
            simulation.total_ns / 1e6,
            simulation.exposed_ns / 1e6,
            volume(made.schedule, devices).total(),
            made.memory.total_bytes,
        )

    def cells(self, before: Run | None = None) -> Iterator[str]:
        """Total, exposed, GiB sent and held; ratios to what it was before."""
        for of in (
            lambda run: run.total,
            lambda run: run.exposed,
            lambda run: run.sent / 2**30,
            lambda run: run.held / 2**30,
        ):
            mine, other = of(self), of(before) if before else 0.0
            yield f"{mine / other:.3f}" if other else "-" if before else f"{mine:.2f}"


def full(names: Sequence[str], targets: Sequence[str], markdown: bool) -> None:
    """Prints, for each program and target, the export and ratios to it; geometric means last."""
    columns = ("program", "target", "ms", "exposed", "GiB sent", "GiB held")
    columns += ("ms ratio", "exposed", "sent", "held")
    form = "| " + " | ".join(["{}"] * len(columns)) + " |" if markdown else _FULL
    print(form.format(*columns))
    if markdown:
        print(form.format(*["---"] * 2, *["---:"] * (len(columns) - 2)))
    ratios: dict[str, list[float]] = {target: [] for target in targets}
    for name in names:
        for target in targets:
            try:
                before, after = (Run.of(each, target) for each in _both(name))
            except ToolError as error:
                print(form.format(Path(name).stem, target, *[""] * 7, str(error)), flush=True)
                continue
            ratios[target].append(after.total / before.total)
            cells = (*before.cells(), *after.cells(before))
            print(form.format(Path(name).stem, target, *cells), flush=True)
    for target, of in ratios.items():
        if of:
            mean = f"{geometric_mean(of):.3f}"
            print(form.format("geometric mean", target, *[""] * 4, mean, *[""] * 3))


def _both(name: str) -> tuple[Artifact, Artifact]:
    """A program by its name or file, as it is and after the pipeline."""
    program = named(name, full=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program, transforming.transform(program, PIPELINE)


_FULL = "{:36s} {:6s} {:>9s} {:>9s} {:>9s} {:>9s} {:>9s} {:>8s} {:>6s} {:>6s}"
_HOUR = 3600.0
_PLAIN = "{:26s} {:4s} {:8s}" + " {:>14s}" * len(KINDS) + " {:>12s} {:>6s}"


def rows(name: str, target: str) -> list[list[str]]:
    """What XLA moves and what the pipeline moves, in bytes per device and run."""
    model = MODELS[name]
    exported = model.build()
    assert not isinstance(exported, str)
    before = artifact.from_exported(exported, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = transforming.transform(before, PIPELINE)
    xla, ours = (_volume(program, target, model.devices) for program in (before, after))
    ratio = f"{ours.total() / xla.total():.3f}" if xla.total() else "-"
    return [
        [name, target, "XLA", *(f"{xla[kind]:,}" for kind in KINDS), f"{xla.total():,}", ""],
        ["", "", "Shardy", *(f"{ours[kind]:,}" for kind in KINDS), f"{ours.total():,}", ratio],
    ]


def _volume(program: Artifact, target: str, devices: int) -> Counter[str]:
    return volume(compile_artifact(program, target).schedule, devices)


if __name__ == "__main__":
    main()
