"""Choosing what goes ahead and what ends late, by predicted time and within memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import Move
from stablehlo_tools.transforms.parts.pipeline_collectives.choices import Choice
from stablehlo_tools.transforms.parts.pipeline_collectives.prediction import Prediction
from stablehlo_tools.transforms.parts.pipeline_collectives.siblings import prefetch_groups
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import LoopSurvey

Judge = Callable[[Choice], Prediction | None]

_GAIN = 0.002  # of the program's time: what saves less is not worth a longer program
_AS_GOOD = 0.01  # of what the best choice saves: so much less saved for less memory is as good
_SLACK = 1.1  # of what a choice may add: what else is alive with it
_LATE_ITSELF = "reduce_scatter"


@dataclass(frozen=True)
class Budget:
    """What a choice may use.

    `limit` in bytes; without one, what the collectives that go ahead make in `distance` iterations,
    and in the one that runs, may be added to what the program needs. `is_held`: fences hold XLA:GPU
    to the choice.
    """

    limit: float | None
    distance: int
    is_held: bool

    def most_bytes(self, surveyed: LoopSurvey, whole: Choice, own: Prediction) -> float:
        """How much memory the program may need."""
        if self.limit is not None:
            return max(self.limit, own.peak_bytes)
        ahead = sum(surveyed.collectives[number].bytes_out or 0 for number in whole.ahead)
        late = sum(surveyed.collectives[number].bytes_in or 0 for number in whole.late)
        return own.peak_bytes + _SLACK * (self.distance + 1) * (ahead or late)


def possible(surveyed: LoopSurvey) -> Choice:
    """Everything that may move."""
    return Choice(_numbers(surveyed.ahead), _numbers(surveyed.late))


def sensible(surveyed: LoopSurvey, budget: Budget) -> Choice:
    """What `auto` considers.

    XLA:GPU lets reduce_scatters end late by itself, several as one, and other late ones were found
    to come between the gathers that fences place.
    """
    whole = possible(surveyed)
    if not budget.is_held:
        return whole
    if whole.ahead:
        return Choice(whole.ahead)
    late = (n for n in whole.late if surveyed.collectives[n].kind != _LATE_ITSELF)
    return Choice(whole.ahead, frozenset(late))


def best_choice(surveyed: LoopSurvey, judge: Judge, budget: Budget) -> Choice:
    """The choice that is predicted to be fastest among those that the budget allows.

    `judge` predicts the program with a choice; None for one that the loop cannot have, or that no
    fences hold. Where fences hold it, a part of what could go ahead does only if all does not fit:
    they hold a gather best that has a whole iteration to hide in. Otherwise, of choices that are as
    good, the one that needs least memory.
    """
    whole = sensible(surveyed, budget)
    own = judge(Choice()) if whole else None
    if own is None:
        return Choice()
    limit = budget.most_bytes(surveyed, whole, own)
    fitting: list[tuple[Choice, Prediction]] = []
    for choice in _choices(surveyed, whole):
        is_part = 0 < len(choice.ahead) < len(whole.ahead)
        if budget.is_held and fitting and is_part:
            break
        told = judge(choice)
        if told is not None and told.peak_bytes <= limit:
            fitting.append((choice, told))
    most = max((own.ns - told.ns for _, told in fitting), default=0.0)
    if most <= 0 or most < _GAIN * own.ns:
        return Choice()
    good = [(s, told) for s, told in fitting if own.ns - told.ns >= (1 - _AS_GOOD) * most]
    return min(good, key=lambda pair: (bool(pair[0].late), pair[1].peak_bytes))[0]


def _choices(surveyed: LoopSurvey, whole: Choice) -> Iterator[Choice]:
    """All that is possible, only one kind, and the first groups that go ahead."""
    groups = prefetch_groups(surveyed)
    counts = [2**n for n in range(len(groups).bit_length())]
    fewer = [frozenset[int]().union(*groups[:count]) for count in reversed(counts)]
    seen: set[Choice] = {Choice()}
    for ahead in (whole.ahead, frozenset[int](), *fewer):
        for late in (whole.late, frozenset[int]()):
            choice = Choice(ahead, late)
            if choice not in seen:
                seen.add(choice)
                yield choice


def _numbers(moves: Sequence[Move]) -> frozenset[int]:
    return frozenset(number for number, move in enumerate(moves) if move.ops)
