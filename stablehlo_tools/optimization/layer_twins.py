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

    def __init__(self, longer: Crew, shorter: Crew, layers: int) -> None:
        self.layers = layers
        self._longer, self._shorter = longer, shorter
        self._more = (layers - DEPTHS[0]) / (DEPTHS[0] - DEPTHS[1])

    def rewrite(self, module: CandidateModule | None, passes: str) -> LongerTwin:
        """Runs passes on the longer twin."""
        before = module.passes if isinstance(module, LongerTwin) else ()
        longer = self._longer.rewrite(module, passes)
        return LongerTwin(**vars(longer), passes=(*before, *filter(None, [passes])))

    def evaluate(
        self, module: CandidateModule | None, more: CompilerOptions = NO_OPTIONS
    ) -> Figures:
        """Compiles both twins, at the same time."""

        def evaluate_shorter() -> Figures:
            shorter: CandidateModule | None = None
            for passes in module.passes if isinstance(module, LongerTwin) else ():
                shorter = self._shorter.rewrite(shorter, passes)
            return self._shorter.evaluate(shorter, more)

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(evaluate_shorter)
            longer, shorter = self._longer.evaluate(module, more), asked.result()
        of_all: dict[str, float] = {}
        for name in (*_TIMES, *_SIZES):
            large, small = getattr(longer, name), getattr(shorter, name)
            # A layer adds to each figure, but by chance a schedule may have less.
            runs = math.inf not in (large, small)
            of_all[name] = large + self._more * max(0.0, large - small) if runs else math.inf
        return replace(longer, **of_all | {name: round(of_all[name]) for name in _SIZES})

    def advise(self) -> tuple[str, ...]:
        """Returns the advice for the longer twin."""
        return self._longer.advise()

    def end(self) -> None:
        """Ends all workers at once."""
        self._longer.end()
        self._shorter.end()


def twin_crew(crew: Crew, crew_of: Callable[[str], Crew]) -> TwinCrew | None:
    """Returns a crew for the twins of a crew's program; None if fewer than `_LEAST` layers repeat.

    `crew_of` returns a crew for the program with a digest. Raises ToolError if the process that
    leaves layers out dies, OutOfTimeError.
    """
    kept = [crew.keep_layers(depth, _LEAST) for depth in DEPTHS]
    digests = [digest for digest, _ in kept if digest is not None]
    if len(digests) < len(DEPTHS):
        return None
    longer, shorter = map(crew_of, digests)
    return TwinCrew(longer, shorter, kept[0][1])
