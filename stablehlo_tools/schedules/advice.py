"""Which of several timed schedules to use, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.schedules.generators.catalogue import AUTO

_SAME = 5e-4  # makespans that differ by no more than this share of one count as equal


class Candidate(NamedTuple):
    """A schedule of so many chunks a rank, and its figures.

    activations: the most alive on a rank, in its whole share of the model for one microbatch.
    memory: the most bytes held by a rank. splits: whether weight gradients run by themselves.
    """

    name: str
    chunks: int
    makespan: float
    bubble: float
    bubble_of_span: float
    activations: float
    memory: float
    messages: int
    fits: bool
    splits: bool

    @property
    def label(self) -> str:
        """`zb-v`, or `looped-bfs with 4 chunks`."""
        return self.name if self.chunks == 1 else f"{self.name} with {self.chunks} chunks"


def advice(candidates: Sequence[Candidate], limit: float | None) -> str:
    """Which of the candidates to use, and why; they come best first."""
    if not candidates:
        return "no named schedule exists for this setting"
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.memory)
        return f"none fits {limit:g}: the smallest is {least.label}, which holds {least.memory:g}"
    best = fitting[0]
    fit = "" if limit is None else " that fits"
    others = [each for each in fitting if each.name not in (best.name, AUTO)]
    searched = any(candidate.name == AUTO for candidate in candidates)
    if not others:
        return f"use {best.label}: it is the only one{fit}"
    nothing = "; the search (auto) finds nothing better" if searched and best.name != AUTO else ""
    return (
        f"use {best.label}: {_ahead(best, others[0], fit)}{nothing}{_unsplit(best, fitting, fit)}"
    )


def _ahead(best: Candidate, second: Candidate, fit: str) -> str:
    faster = second.makespan / best.makespan - 1 if best.makespan else 0.0
    if faster > _SAME:
        return f"{100 * faster:.1f} % faster than the next{fit}, {second.label}"
    if second.memory > best.memory * (1 + _SAME):
        return f"as fast as {second.label}, with {best.memory:g} held where that holds more"
    return f"as fast as {second.label}, and holds as much"


def _unsplit(best: Candidate, fitting: Sequence[Candidate], fit: str) -> str:
    """What to use where weight gradients cannot run by themselves."""
    if not best.splits:
        return ""
    whole = next((candidate for candidate in fitting if not candidate.splits), None)
    if whole is None:
        return f"; without split weight gradients there is none{fit}"
    slower = whole.makespan / best.makespan - 1 if best.makespan else 0.0
    return f"; without split weight gradients {whole.label}, {100 * slower:.1f} % slower"
