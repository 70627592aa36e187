"""What `optimize` makes of programs, and how far that is from the best possible.

    python python/benchmarks/optimize.py [PROGRAM ...] [--target gpu tpu] [--budget SECONDS]
    python python/benchmarks/optimize.py --brute-force [PROGRAM ...]

PROGRAM: a model of the zoo, at full size on 64 devices, or the file of an artifact; without one,
the zoo. No device is needed. The default budget takes ten minutes for each program and target.

    before, after   ms of a run, as the target's compiler schedules it; * does not fit the device
    ratio           after / before, where both fit or none; the last row is the geometric mean
    model           what the model expected of `after` against `before`
    seconds         of the search and the proof

--brute-force: every sequence of up to four passes is compiled, of small programs; sequences that
come out alike once. The last column is how far the search is from the best of them.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, ZOO

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.crew import CandidateModule, Crew, OptimizedProgram
from stablehlo_tools.optimization.optimizer import OptimizationRequest, Optimum, optimize
from stablehlo_tools.optimization.road import Circumstances, road
from stablehlo_tools.optimization.store import AnswerStore

SMALL = (
    "decoder-fsdp-forward",
    "decoder-tp-forward",
    "decoder-tp-step",
    "llama-scan",
    "moe-forward",
    "moe-shard-map-forward",
    "mamba-forward",
    "convnet-forward",
    "permute-loop",
    "expert-exchange",
)
COLUMNS = ("program", "target", "before", "after", "ratio", "model", "seconds", "pipeline")
_PLAIN = "{:40s} {:6s} {:>9s} {:>9s} {:>6s} {:>6s} {:>7s}  {}"
_LENGTH = 4  # passes of the sequences that are all compiled
_DAY = 86400.0


def main() -> None:
    """Prints the table that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--target", nargs="+", choices=("gpu", "tpu"), default=["gpu"])
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="600 by default")
    parser.add_argument("--brute-force", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.brute_force:
        for name in arguments.programs or SMALL:
            for target in arguments.target:
                compare_with_all(named(name, full=False), target)
        return
    table(arguments.programs or list(ZOO), arguments.target, arguments.budget, arguments.markdown)


def named(name: str, *, full: bool) -> Artifact:
    """A file, or a model by its name."""
    if Path(name).is_file():
        return artifact.load(name)
    built = MODELS[name].full() if full else MODELS[name].build()
    if isinstance(built, str):
        return artifact.parse(built.encode(), name)
    return artifact.from_exported(built, name)


def table(
    names: Sequence[str], targets: Sequence[str], budget: float | None, markdown: bool
) -> None:
    """Prints a row for each program and target as it is found, and the means."""
    form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if markdown else _PLAIN
    print(form.format(*COLUMNS))
    if markdown:
        print(form.format(*["---"] * len(COLUMNS)))
    ratios: dict[str, list[float]] = {target: [] for target in targets}
    for name in names:
        for target in targets:
            try:
                optimum = optimize(
                    named(name, full=True), OptimizationRequest(target, budget=budget)
                )
            except ToolError as error:
                print(form.format(Path(name).name, target, *[""] * 5, error), flush=True)
                continue
            ratios[target] += [optimum.ratio] if optimum.ratio is not None else []
            print(form.format(Path(name).name, target, *_cells(optimum)), flush=True)
    for target, of in ratios.items():
        if of:
            mean = math.exp(sum(map(math.log, of)) / len(of))
            print(form.format("geometric mean", target, "", "", f"{mean:.3f}", "", "", ""))


def _cells(optimum: Optimum) -> Iterator[str]:
    before = optimum.before
    for figures in (before, optimum.after):
        fits = "" if optimum.fits(figures) else "*"
        yield (f"{figures.total_ns / 1e6:.2f}" if figures.runs else "never") + fits
    yield "" if optimum.ratio is None else f"{optimum.ratio:.3f}"
    expected = [t.expected_ns for t in optimum.trials if str(t.candidate) == optimum.pipeline]
    model = expected[0] if expected and expected[0] is not None else before.total_ns
    yield f"{model / before.total_ns:.3f}" if before.runs else ""
    yield f"{optimum.seconds:.0f}"
    yield optimum.pipeline or "the export"


def compare_with_all(program: Artifact, target: str) -> None:
    """Compiles what every sequence of passes makes of a program, and searches."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory)
        request = OptimizationRequest(target, cache=cache)
        machine, _ = request.machine()
        store = AnswerStore(cache)
        form = ArtifactForm.JAX_EXPORT if program.exported is not None else ArtifactForm.BYTECODE
        digest = store.keep_blob(artifact.encode(program, form))
        crew = Crew(1, store, OptimizedProgram(digest, program.name), machine, began + _DAY)
        texts = [
            text for choices in road(Circumstances(machine.hardware)).values() for text in choices
        ]
        best, name, compiled = math.inf, "", 0
        for sequence, module in _all_modules(crew, texts):
            try:
                total = crew.evaluate(module).total_ns
            except ToolError:
                continue
            compiled += 1
            if total < best:
                best, name = total, ",".join(sequence)
        crew.end()
        took = time.monotonic() - began
        optimum = optimize(program, request)
    print(
        f"{program.name} {target}: export {optimum.before.total_ns / 1e6:.3f} ms; best of "
        f"{compiled} modules {best / 1e6:.3f} ms in {took:.0f} s ({name or 'the export'}); "
        f"search {optimum.after.total_ns / 1e6:.3f} ms in {optimum.seconds:.0f} s "
        f"({optimum.pipeline or 'the export'}): {optimum.after.total_ns / best:.3f}",
        flush=True,
    )


def _all_modules(
    crew: Crew, texts: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], CandidateModule]]:
    """What sequences of passes make of the program, each module once, shortest sequence first."""
    root = crew.rewrite(None, "")
    seen = {root.digest}
    last: list[tuple[tuple[str, ...], CandidateModule]] = [((), root)]
    yield last[0]
    for _ in range(_LENGTH):
        longer: list[tuple[tuple[str, ...], CandidateModule]] = []
        for sequence, module in last:
            for text in texts:
                try:
                    rewritten = crew.rewrite(module, text)
                except ToolError:
                    continue
                if rewritten.digest not in seen:
                    seen.add(rewritten.digest)
                    longer.append(((*sequence, text), rewritten))
        yield from longer
        last = longer


if __name__ == "__main__":
    main()
