"""What passes make of whole programs, by the target's compiler and by the model of it.

    python python/benchmarks/passes_compiled.py [PIPELINE ...] [--target gpu tpu] [--programs P ...]

PIPELINE: passes as `opt -p` takes them, each pipeline by itself behind `partition` and
`create-reduce-scatter`. Programs are models of the zoo, at full size on 64 devices, or files of
artifacts; those whose collectives are explicit are not partitioned. No device is needed.

The first row of a program is it as partitioned: ms and those exposed as the compiler scheduled it,
the same as the model expects it, how far that is off, and the most memory by the compiler's own
figure and as expected. Each further row is a pipeline: its ms, what that is of the first row's, and
the ratio that the model expects. The last rows are the medians of the errors, of the time, of what
is exposed of it and of the memory, and each pipeline's geometric mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import ZOO
from optimize import named

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.chips import DEFAULT_HARDWARE
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

_DAY = 86400.0
_ROW = "{:44s} {:6s} {:>9s} {:>9s} {:>9s} {:>9s} {:>8s} {:>8s} {:>8s} {:>8s}"
_HEADS = ("program", "target", "ms", "exposed", "expected", "exposed", "error", "exposed")
_MEMORY = ("GiB", "expected")


@dataclass(frozen=True)
class Run:
    """A program in ms: as scheduled by the compiler, and as the model expects it."""

    ns: float
    exposed: float
    expected: float
    expected_exposed: float
    peak: float  # GiB, the compiler's own figure
    expected_peak: float

    @property
    def error(self) -> float:
        """Of the time."""
        return self.expected / self.ns - 1

    @property
    def exposed_error(self) -> float:
        """Of what is exposed, against the time."""
        return (self.expected_exposed - self.exposed) / self.ns


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("pipelines", nargs="*", metavar="PIPELINE")
    parser.add_argument("--target", nargs="+", choices=("gpu", "tpu"), default=["gpu"])
    parser.add_argument("--programs", nargs="+", metavar="P", default=list(ZOO))
    arguments = parser.parse_args()
    print(_ROW.format(*_HEADS, *_MEMORY), flush=True)
    for target in arguments.target:
        errors: list[Run] = []
        ratios: dict[str, list[float]] = {text: [] for text in arguments.pipelines}
        for name in arguments.programs:
            try:
                for pipeline, run, before in rows(name, target, arguments.pipelines):
                    print(row(pipeline or Path(name).stem, target, run, before))
                    if pipeline:
                        ratios[pipeline].append(run.ns / before.ns)
                    else:
                        errors.append(run)
            except ToolError as error:
                print(f"{Path(name).stem:44s} {target:6s} {str(error).splitlines()[0]}")
            sys.stdout.flush()
        for line in summary(errors, ratios):
            print(line, flush=True)


def rows(name: str, target: str, pipelines: Sequence[str]) -> Iterator[tuple[str, Run, Run]]:
    """Each pipeline, "" for none, with its run and that of the program without it."""
    given = named(name, full=True)
    hardware = load_hardware(DEFAULT_HARDWARE[target])
    if left_to_the_partitioner(given.module) is not None:
        steps = f"partition{{hardware={DEFAULT_HARDWARE[target]}}},create-reduce-scatter"
        given = transform(given, steps)
    before = measured(given, target, hardware)
    yield "", before, before
    for pipeline in pipelines:
        yield pipeline, measured(transform(given, pipeline), target, hardware), before


def measured(program: Artifact, target: str, hardware: Hardware) -> Run:
    """Compiles a program, and asks the model. Raises ToolError where it does not fit."""
    told = expected_run(program.module, hardware)
    made = compile_artifact(program, target, _DAY)
    found = simulate(hlo_task_graph(made.text, hardware, made.topology.devices))
    times = (found.total_ns, found.exposed_ns, told.total_ns, told.exposed_ns)
    sizes = (made.memory.peak_bytes or made.memory.total_bytes, told.peak_bytes)
    return Run(*(ns / 1e6 for ns in times), *(size / 2**30 for size in sizes))


def row(name: str, target: str, run: Run, before: Run) -> str:
    """A line of the table."""
    times = [f"{ms:.2f}" for ms in (run.ns, run.exposed, run.expected, run.expected_exposed)]
    if run is before:
        off = [f"{each:+.1%}" for each in (run.error, run.exposed_error)]
    else:
        off = [f"{run.ns / before.ns:.3f}", f"{run.expected / before.expected:.3f}"]
        name = f"  {name}"
    sizes = [f"{gib:.2f}" for gib in (run.peak, run.expected_peak)]
    return _ROW.format(name[:44], target, *times, *off, *sizes)


def summary(errors: Sequence[Run], ratios: dict[str, list[float]]) -> Iterator[str]:
    """The medians of the errors, and the geometric means of the ratios."""
    if errors:
        time = statistics.median(abs(run.error) for run in errors)
        exposed = statistics.median(abs(run.exposed_error) for run in errors)
        peak = statistics.median(abs(run.expected_peak / run.peak - 1) for run in errors)
        said = f"{time:.1%} of the time, exposed {exposed:.1%} of it, {peak:.1%} of the memory"
        yield f"median error of {len(errors)}: {said}"
    for pipeline, each in ratios.items():
        if each:
            mean = math.exp(statistics.fmean(map(math.log, each)))
            yield f"{pipeline}: geometric mean {mean:.3f}, most {max(each):.3f}"


if __name__ == "__main__":
    main()
