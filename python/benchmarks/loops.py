"""What passes make of the loops of the zoo, read back from the XLA compilers.

    python python/benchmarks/loops.py [PROGRAM ...] [--target gpu tpu cpu] [--direction auto ...]
                                      [--small] [--waits] [--markdown]

Each program, of full size on 64 devices, is compiled with default flags after
`partition,create-reduce-scatter` (before) and after these and `pipeline-collectives`, once for each
direction; `--direction hold` is `hold-collectives` instead.
The schedules are read back into the simulator of `inspect --target`; XLA:CPU runs collectives
synchronously, there only memory is compared. No device is needed. 32 layers (mamba: 64) take two
hours or so on two cores; --small has 8.

    total, compute    ms of a run
    exposed           ms in which a device does not compute; in loops: of these, in loop bodies
    of before         the exposed time as a part of that before
    bare              all_gathers in loop bodies with nothing between start and done, of how many
    GiB, grown        peak memory as the compiler counts it, and what it has grown by
    layer             GiB of the weights that a loop gathers in an iteration: what it may grow by

--waits lists what is exposed, the longest first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from loops_compiled import Compiled, compiled
from models.zoo import MODELS

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import loops_of

EXPLICIT = "partition,create-reduce-scatter"
PLANNED_FOR = {"gpu": "h100", "tpu": "tpu-v5e", "cpu": "h100"}
DIRECTIONS = ("auto", "prefetch", "delay")
FIGURES = ("total", "compute", "exposed", "of before", "in loops", "bare", "GiB", "grown", "layer")
COLUMNS = ("program", "target", "direction", *FIGURES, "")
HOLD = "hold"
_PLAIN = "{:28s} {:6s} {:9s}" + " {:>9s}" * len(FIGURES) + "  {}"
_SMALL = 8  # layers
_BARRIER, _WHILE = "stablehlo.optimization_barrier", "stablehlo.while"
_GIB = 2.0**30
_LONGEST = 120  # letters of a compiler's refusal
_WORTH_TELLING = 50_000.0  # ns that a device waits


def _decoder(**options: Any) -> Callable[..., Any]:
    return lambda **sizes: MODELS["decoder-2d-scan-step"].full(**options, **sizes)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "decoder-fsdp-forward": _decoder(fsdp=64, model=1, training=False),
    "decoder-fsdp-remat-step": _decoder(fsdp=64, model=1, remat=True),
    "decoder-fsdp-step": _decoder(fsdp=64, model=1),
    "decoder-2d-step": _decoder(),
    "mamba-step": MODELS["mamba-scan-step"].full,
}


def main() -> None:
    """Prints the table that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--target", nargs="+", choices=list(PLANNED_FOR), default=["gpu", "tpu"])
    directions = [*DIRECTIONS, HOLD]
    parser.add_argument("--direction", nargs="+", choices=directions, default=list(DIRECTIONS))
    parser.add_argument("--small", action="store_true", help=f"{_SMALL} layers")
    parser.add_argument("--waits", action="store_true", help="list what is exposed")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    unknown = set(arguments.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    table = _Table(arguments.markdown, arguments.waits)
    for name in arguments.programs or list(PROGRAMS):
        program = explicit(name, small=arguments.small)
        for target in arguments.target:
            table.compare(name, program, target, arguments.direction)


def explicit(name: str, *, small: bool) -> Artifact:
    """A program with its collectives written out."""
    sizes = {"layers": _SMALL} if small else {}
    program = artifact.from_exported(PROGRAMS[name](**sizes), name)
    run_pipeline(program, Pipeline.parse(EXPLICIT))
    return program


def gathered_in_an_iteration(program: Artifact) -> float:
    """Bytes on a device of the weights that one iteration of a loop gathers; the most of any."""
    draft = copy_module(program.module)
    inline_all_calls(draft)
    effects = Effects(functions_by_name(draft))
    return max((_gathered(LoopBody(loop, effects)) for loop in loops_of(draft)), default=0.0)


def _gathered(body: LoopBody) -> float:
    """Of all_gathers of what comes from the program's arguments, not of saved activations."""
    gathers = [found for found in body.collectives if found.kind == "all_gather"]
    weights = [found for found in gathers if _is_given(body, list(found.op.operands))]
    return sum(found.bytes_out or 0 for found in weights)


def _is_given(body: LoopBody, pending: list[ir.Value]) -> bool:
    """Whether values follow, but for indices, from arguments of the program alone."""
    while pending:
        value = pending.pop()
        number = body.argument_number(value)
        maker = producer(value)
        if ir.ShapedType(value.type).rank == 0:
            continue
        if number is not None:
            if number not in body.invariant:
                return False
            pending.append(body.loop.operands[number])
        elif maker is not None and maker.name == _BARRIER:
            pending.append(maker.operands[ir.OpResult(value).result_number])
        elif maker is not None:
            if maker.name not in FORMATTING and not body.is_indexed(value):
                return False
            if maker.name == _WHILE:
                return False
            pending += maker.operands
    return True


class _Table:
    """Rows as they are measured; what has been compiled is not compiled again."""

    def __init__(self, markdown: bool, waits: bool) -> None:
        self._form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if markdown else _PLAIN
        self._waits = waits
        self._print(COLUMNS)
        if markdown:
            self._print([*["---"] * 3, *["---:"] * len(FIGURES), "---"])

    def compare(self, name: str, program: Artifact, target: str, directions: Sequence[str]) -> None:
        """The rows of a program and a target."""
        layer = gathered_in_an_iteration(program)
        known: dict[str, Compiled] = {}
        before = self._row([name, target, "before"], program, known, None, layer)
        if before is None:
            return
        for direction in directions:
            steps = f"pipeline-collectives{{direction={direction} hardware={PLANNED_FOR[target]}}}"
            steps = "hold-collectives" if direction == HOLD else steps
            rewritten = program.copy()
            try:
                run_pipeline(rewritten, Pipeline.parse(steps))
            except ToolError as error:
                self._refused([name, target, direction], error)
                continue
            self._row([name, target, direction], rewritten, known, before, layer)

    def _row(
        self,
        head: Sequence[str],
        program: Artifact,
        known: dict[str, Compiled],
        before: Compiled | None,
        layer: float,
    ) -> Compiled | None:
        text, target = str(program.module), head[1]
        is_known = text in known
        try:
            if not is_known:
                hardware = None if target == "cpu" else PLANNED_FOR[target]
                known[text] = compiled(program, target, hardware)
        except ToolError as error:
            self._refused(head, error)
            return None
        same = "left as it is" if known[text] is before else ("as above" if is_known else "")
        self._print([*head, *_figures(known[text], before, layer), same])
        if self._waits and not is_known:
            for wait in known[text].waits:
                if wait.ns >= _WORTH_TELLING:
                    print(f"    {wait}", flush=True)
        return known[text]

    def _refused(self, head: Sequence[str], error: ToolError) -> None:
        said = " ".join(error.diagnostic.message.split()).partition(". ")[0]
        said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"
        self._print([*head, *[""] * len(FIGURES), said])

    def _print(self, cells: Sequence[str]) -> None:
        print(self._form.format(*cells), flush=True)


def _figures(now: Compiled, before: Compiled | None, layer: float) -> list[str]:
    grown = "" if before is None else f"{(now.peak - before.peak) / _GIB:+.2f}"
    memory = [f"{now.peak / _GIB:.2f}", grown, f"{layer / _GIB:.2f}"]
    if now.total is None:
        return [*[""] * (len(FIGURES) - len(memory)), *memory]
    part = f"{now.exposed / before.exposed:.2f}" if before is not None and before.exposed else ""
    times = [_ms(now.total), _ms(now.compute), _ms(now.exposed), part, _ms(now.exposed_in_loops)]
    return [*times, f"{now.bare} of {now.gathers}", *memory]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}"


if __name__ == "__main__":
    main()
