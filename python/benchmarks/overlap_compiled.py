"""What `schedule-overlap` gains or loses in the schedules that XLA:GPU and XLA:TPU make of the zoo.

    python python/benchmarks/overlap_compiled.py [MODEL ...] [--target gpu tpu]
                                                 [--steps PIPELINE] [--markdown]

Each model at full size, on 64 devices, is compiled with default flags after
`partition,create-reduce-scatter` (before) and after these and the pass (after); both schedules are
read back into the simulator of `inspect --target`. The pass plans for the device that is compiled
for. No device is needed; the whole zoo takes two hours or so on two cores.

    before, after   ms of a run
    floor           ms that no order of the compiled program before the pass is below
    gap             of `before` above the floor
    closed          the part of that gap that `after` closes, negative where it is slower
    GiB, then       the most alive at any time, before and after

--steps: what to measure in place of `schedule-overlap`, such as
`split-batch{parts=2},schedule-overlap`. What comes out as it went in is not compiled again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import ZOO

from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.overlap.bounds import floor
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

EXPLICIT = "partition,create-reduce-scatter"
HARDWARE = {"gpu": "h100", "tpu": "tpu-v5e"}
TIMEOUT = 1800.0  # seconds, of one compilation
FIGURES = ("before", "after", "ratio", "floor", "gap", "closed", "GiB", "then")
COLUMNS = ("model", "target", *FIGURES, "")
_PLAIN = "{:26s} {:6s}" + " {:>9s}" * 2 + " {:>6s} {:>9s}" + " {:>6s}" * 4 + "  {}"
_GIB = 2.0**30
_LEFT = "left as it is"
_LONGEST = 200  # letters of a compiler's refusal


@dataclass(frozen=True)
class Times:
    """What the simulator says of a compiled program."""

    total: float  # ns
    floor: float  # ns
    peak: float  # bytes


def main() -> None:
    """Prints the table that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all of the zoo by default")
    parser.add_argument("--target", nargs="+", choices=list(HARDWARE), default=list(HARDWARE))
    parser.add_argument("--steps", metavar="PIPELINE", help="schedule-overlap by default")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    compare(arguments.models or list(ZOO), arguments.target, arguments.steps, arguments.markdown)


def compare(
    models: Sequence[str], targets: Sequence[str], steps: str | None, markdown: bool
) -> None:
    """Prints a row for each model and target, as it is measured."""
    form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if markdown else _PLAIN
    print(form.format(*COLUMNS))
    if markdown:
        print(form.format("---", "---", *["---:"] * len(FIGURES), "---"))
    for name in models:
        program = artifact.from_exported(ZOO[name].full(), name)
        run_pipeline(program, Pipeline.parse(EXPLICIT))
        for target in targets:
            print(form.format(name, target, *row(program, target, steps)), flush=True)


def row(program: Artifact, target: str, steps: str | None) -> list[str]:
    """The figures of a program with explicit collectives, and what was done to it."""
    try:
        before = times(program, target)
    except ToolError as error:
        return [*[""] * len(FIGURES), _first_sentence(error)]
    rewritten = program.copy()
    try:
        reported = run_pipeline(rewritten, Pipeline.parse(steps or _scheduling(target)))
        changed = str(rewritten.module) != str(program.module)
        after = times(rewritten, target) if changed else before
    except ToolError as error:
        return [*_figures(before, None), _first_sentence(error)]
    return [*_figures(before, after), "rewritten" if changed else _why_left(reported)]


def times(program: Artifact, target: str) -> Times:
    """Of the schedule that a compiler makes. Raises ToolError as `compile_artifact` does."""
    compiled = compile_artifact(program, target, TIMEOUT)
    hardware = load_hardware(HARDWARE[target])
    graph = hlo_task_graph(compiled.text, hardware, compiled.topology.devices)
    return Times(simulate(graph).total_ns, floor(graph).ns, memory_profile(graph).peak_bytes)


def _scheduling(target: str) -> str:
    return f"schedule-overlap{{hardware={HARDWARE[target]} explain}}"


def _figures(before: Times, after: Times | None) -> list[str]:
    """All columns of figures; blank where there is no `after`, or no gap to close."""
    gap = before.total - before.floor
    above, held = f"{gap / before.floor:.1%}", f"{before.peak / _GIB:.1f}"
    if after is None:
        return [_ms(before.total), "", "", _ms(before.floor), above, "", held, ""]
    gained = before.total - after.total
    closed = f"{gained / gap:.0%}" if gap > 0 else ""
    ratio, then = f"{after.total / before.total:.3f}", f"{after.peak / _GIB:.1f}"
    totals = _ms(before.total), _ms(after.total)
    return [*totals, ratio, _ms(before.floor), above, closed, held, then]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f}"


def _why_left(reported: Diagnostics) -> str:
    """The reasons that `explain` gave for the blocks, each once."""
    reasons = [said.message.partition(f"{_LEFT}: ")[2] for said in reported.collected]
    return "; ".join([_LEFT, *dict.fromkeys(reason for reason in reasons if reason)])


def _first_sentence(error: ToolError) -> str:
    said = " ".join(error.diagnostic.message.split()).partition(". ")[0]
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


if __name__ == "__main__":
    main()
