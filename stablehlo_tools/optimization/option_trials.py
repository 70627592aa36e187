"""Compiler options worth trying with an artifact, and the gain of each by itself.

An option belongs to a compilation and not to a program, so the time of an answer includes none.
Each is tried alone, on the export and on the answer. Then others join the best one on the answer,
as long as that makes it faster: options may only gain together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.crew import CandidateModule, Crew, OutOfTimeError
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compiler_options import CompilerOptions

_WORTH = 0.999  # an option gains if its time is below this share of the time without it


@dataclass(frozen=True)
class Proposal:
    """Options that belong together, and their effect in words."""

    options: CompilerOptions
    does: str

    def __or__(self, other: Proposal) -> Proposal:
        """Returns both together."""
        return Proposal(self.options | other.options, f"{self.does}; {other.does}")


@dataclass(frozen=True)
class OptionTrial:
    """The figures of the answer (`after`) and of the export (`before`) with a proposal.

    None if it was not tried; `refused` says why.
    """

    proposal: Proposal
    before: Figures | None
    after: Figures | None
    refused: str = ""

    def to_json(self, before: Figures, after: Figures) -> dict[str, Any]:
        """Returns plain data; ratios are to the time of the same program without the options."""
        sides = {"after": (self.after, after), "before": (self.before, before)}
        return {
            "options": dict(self.proposal.options.values),
            "does": self.proposal.does,
            **{
                side: figures and {**figures.shown(), "ratio": figures.ratio_to(without)}
                for side, (figures, without) in sides.items()
            },
            "refused": self.refused or None,
        }


def gaining(
    trials: Sequence[OptionTrial], after: Figures, limit: float
) -> list[tuple[float, OptionTrial]]:
    """Returns the trials that make the answer faster and stay within `limit` bytes, the best first,
    with the ratio of the times."""
    found: list[tuple[float, OptionTrial]] = []
    for trial in trials:
        ratio = None if trial.after is None else trial.after.ratio_to(after)
        fits = trial.after is not None and (
            trial.after.needed_bytes <= max(limit, after.needed_bytes)
        )
        if ratio is not None and ratio < _WORTH and fits:
            found.append((ratio, trial))
    return sorted(found, key=lambda each: each[0])


def try_options(
    crew: Crew,
    target: Target,
    given: CompilerOptions,
    answer: CandidateModule | None,
    limit: float,
    workers: int,
    stopped: Callable[[], bool],
) -> tuple[OptionTrial, ...]:
    """Tries each proposal on the answer, then on the export; `answer` is None if it is the export.
    Then tries joined proposals on the answer, within `limit` bytes.

    Proposals with an option in `given` are skipped. Proposals cut short by the crew's deadline or
    by `stopped` count as not tried."""
    names = {name for name, _ in given.values}
    worth = [p for p in PROPOSALS[target] if not names & {name for name, _ in p.options.values}]

    def try_proposal(proposal: Proposal, *, alone: bool = True) -> OptionTrial:
        try:
            if stopped():
                raise OutOfTimeError
            after = crew.evaluate(answer, proposal.options)
            on_export = alone or answer is None
            before = crew.evaluate(None, proposal.options) if on_export else None
        except OutOfTimeError:
            return OptionTrial(proposal, None, None, "no time was left for it")
        except ToolError as error:
            return OptionTrial(proposal, None, None, error.diagnostic.message)
        return OptionTrial(proposal, before, after)

    def try_all(proposals: Sequence[Proposal], *, alone: bool) -> list[OptionTrial]:
        asked = [pool.submit(try_proposal, each, alone=alone) for each in proposals]
        while wait(asked, timeout=_LISTENING).not_done:
            if stopped():
                crew.end()  # also ends the compilations in progress
                break
        return [each.result() for each in asked]

    with ThreadPoolExecutor(workers) as pool:
        trials = try_all(worth, alone=True)
        try:
            now = crew.evaluate(answer)
        except (OutOfTimeError, ToolError):
            return tuple(trials)
        tried = trials
        while gains := gaining(tried, now, limit):
            best = gains[0][1]
            now = best.after or now
            taken = set(best.proposal.options.values)
            left = [each for each in worth if not taken.issuperset(each.options.values)]
            tried = try_all([best.proposal | each for each in left], alone=False)
            trials += tried
        return tuple(trials)


_LISTENING = 0.2  # seconds between two calls of `stopped`


def _proposal(does: str, *texts: str) -> Proposal:
    return Proposal(CompilerOptions.parse(texts), does)


_THRESHOLDS = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
)

# Each gained on a program at full size. Of XLA:TPU's, those that were measured (async all_to_all,
# decomposed einsums, fused async collectives, compute beside them) gained 0.4 % at most.
PROPOSALS = {
    Target.GPU: (
        _proposal(
            "two collectives in the scheduler's flight, on one stream",
            "xla_gpu_experimental_parallel_collective_overlap_limit=2",
        ),
        _proposal(
            "collectives within a node have their own slot and stream",
            "xla_gpu_collective_domain_assignment=scale_up_fabric",
        ),
        _proposal(
            "collectives are combined up to 256 MiB", *(f"{name}={2**28}" for name in _THRESHOLDS)
        ),
        _proposal(
            "loops run two iterations at a time", "xla_gpu_enable_while_loop_double_buffering=true"
        ),
    ),
    Target.TPU: (),
}
