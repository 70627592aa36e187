"""Searches with twins of a program: the program with a few of its layers (`fewer_layers`).

A compiler needs a fraction of the time for a twin. Each candidate is compiled with four and with
two layers, and their difference gives what two further layers add:

    time of all layers = longer + (layers - 4) / 2 * (longer - shorter)

The best candidates are then compiled with all layers, so these figures only choose them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from stablehlo_tools.optimization.crew import CandidateModule, Crew
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions

DEPTHS = (4, 2)  # layers of the longer and of the shorter twin
_LEAST = 2 * sum(DEPTHS)  # layers of a program that has twins
_NEAR = 0.3  # of the memory: a candidate may need twice as much as the program
# An option of XLA:GPU: the percentage of the device's memory that its scheduler may use.
_LIMIT, _PERCENT = "xla_gpu_memory_limit_slop_factor", 95
_TIMES = ("total_ns", "contended_ns", "exposed_ns", "compute_ns", "work_ns", "floor_ns")
_SIZES = ("peak_bytes", "compiler_bytes", "collectives")


@dataclass(frozen=True)
class LongerTwin(CandidateModule):
    """A candidate's longer twin; the shorter one, which `passes` rewrite, is rarely needed."""

    passes: tuple[str, ...] = ()


class TwinCrew:
    """Does the jobs of a `Crew` on both twins of a program.

    Figures are for all `layers`. Predictions are of the longer twin: only their ratios count.
    """

    def __init__(self, longer: Crew, shorter: Crew, layers: int, memory: float = math.inf) -> None:
        self.layers = layers
        self._longer, self._shorter = longer, shorter
        self._more = (layers - DEPTHS[0]) / (DEPTHS[0] - DEPTHS[1])
        self._memory = memory
        self._options = (NO_OPTIONS, NO_OPTIONS)  # of the compiler, for the longer and the shorter

    def rewrite(self, module: CandidateModule | None, passes: str) -> LongerTwin:
        """Runs passes on the longer twin."""
        before = module.passes if isinstance(module, LongerTwin) else ()
        longer = self._longer.rewrite(module, passes)
        return LongerTwin(**vars(longer), passes=(*before, *filter(None, [passes])))

    def evaluate(self, module: CandidateModule | None) -> Figures:
        """Compiles both twins.

        XLA:GPU orders a program for little memory if its memory is short. So if the program needs a
        good part of the device's, twins get their share of it.
        """
        longer, shorter, of_all = self._evaluate_twins(module)
        if module is None and of_all.needed_bytes > _NEAR * self._memory:
            shares = [twin.needed_bytes / of_all.needed_bytes for twin in (longer, shorter)]
            one, other = (CompilerOptions.parse([f"{_LIMIT}={_PERCENT * s:.0f}"]) for s in shares)
            self._options = (one, other)
            _, _, of_all = self._evaluate_twins(None)
        return of_all

    def _evaluate_twins(self, module: CandidateModule | None) -> tuple[Figures, Figures, Figures]:
        """Returns the figures of both twins, compiled at the same time, and those of all layers."""

        def evaluate_shorter() -> Figures:
            shorter: CandidateModule | None = None
            for passes in module.passes if isinstance(module, LongerTwin) else ():
                shorter = self._shorter.rewrite(shorter, passes)
            return self._shorter.evaluate(shorter, self._options[1])

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(evaluate_shorter)
            longer, shorter = self._longer.evaluate(module, self._options[0]), asked.result()
        of_all: dict[str, float] = {}
        for name in (*_TIMES, *_SIZES):
            large, small = getattr(longer, name), getattr(shorter, name)
            # A layer adds to each figure, but by chance a schedule may have less.
            runs = math.inf not in (large, small)
            of_all[name] = large + self._more * max(0.0, large - small) if runs else math.inf
        rounded = {name: round(of_all[name]) for name in _SIZES}
        return longer, shorter, replace(longer, **of_all | rounded)

    def advise(self) -> tuple[str, ...]:
        """Returns the advice for the longer twin."""
        return self._longer.advise()

    def end(self) -> None:
        """Ends all workers at once."""
        self._longer.end()
        self._shorter.end()


def twin_crew(
    crew: Crew, crew_of: Callable[[str], Crew], memory: float = math.inf
) -> TwinCrew | None:
    """Returns a crew for the twins of a crew's program; None if fewer than `_LEAST` layers repeat.

    `crew_of` returns a crew for the program with a digest. `memory`: bytes of a device whose
    compiler heeds them, as XLA:GPU does. Raises ToolError if the process that
    leaves layers out dies, OutOfTimeError.
    """
    kept = [crew.keep_layers(depth, _LEAST) for depth in DEPTHS]
    digests = [digest for digest, _ in kept if digest is not None]
    if len(digests) < len(DEPTHS):
        return None
    longer, shorter = map(crew_of, digests)
    return TwinCrew(longer, shorter, kept[0][1], memory)
