"""Choosing what goes ahead and what ends late, by predicted time and within memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import Move
from stablehlo_tools.transforms.parts.pipeline_collectives.choices import Staged
from stablehlo_tools.transforms.parts.pipeline_collectives.prediction import Prediction
from stablehlo_tools.transforms.parts.pipeline_collectives.siblings import prefetch_groups
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import Survey

Judge = Callable[[Staged], Prediction | None]

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

    def most_bytes(self, found: Survey, whole: Staged, own: Prediction) -> float:
        """How much memory the program may need."""
        if self.limit is not None:
            return max(self.limit, own.peak_bytes)
        ahead = sum(found.collectives[number].bytes_out or 0 for number in whole.ahead)
        late = sum(found.collectives[number].bytes_in or 0 for number in whole.late)
        return own.peak_bytes + _SLACK * (self.distance + 1) * (ahead or late)


def possible(found: Survey) -> Staged:
    """Everything that may move."""
    return Staged(_numbers(found.ahead), _numbers(found.late))


def sensible(found: Survey, budget: Budget) -> Staged:
    """What `auto` considers.

    XLA:GPU lets reduce_scatters end late by itself, several as one, and other late ones were found
    to come between the gathers that fences place.
    """
    whole = possible(found)
    if not budget.is_held:
        return whole
    if whole.ahead:
        return Staged(whole.ahead)
    late = (n for n in whole.late if found.collectives[n].kind != _LATE_ITSELF)
    return Staged(whole.ahead, frozenset(late))


def best_choice(found: Survey, judge: Judge, budget: Budget) -> Staged:
    """The choice that is predicted to be fastest among those that the budget allows.

    `judge` predicts the program with a choice; None for one that the loop cannot have, or that no
    fences hold. Where fences hold it, a part of what could go ahead does only if all does not fit:
    they hold a gather best that has a whole iteration to hide in. Otherwise, of choices that are as
    good, the one that needs least memory.
    """
    whole = sensible(found, budget)
    own = judge(Staged()) if whole else None
    if own is None:
        return Staged()
    limit = budget.most_bytes(found, whole, own)
    fitting: list[tuple[Staged, Prediction]] = []
    for staged in _choices(found, whole):
        is_part = 0 < len(staged.ahead) < len(whole.ahead)
        if budget.is_held and fitting and is_part:
            break
        told = judge(staged)
        if told is not None and told.peak_bytes <= limit:
            fitting.append((staged, told))
    most = max((own.ns - told.ns for _, told in fitting), default=0.0)
    if most <= 0 or most < _GAIN * own.ns:
        return Staged()
    good = [(s, told) for s, told in fitting if own.ns - told.ns >= (1 - _AS_GOOD) * most]
    return min(good, key=lambda pair: (bool(pair[0].late), pair[1].peak_bytes))[0]


def _choices(found: Survey, whole: Staged) -> Iterator[Staged]:
    """All that is possible, only one kind, and the first groups that go ahead."""
    groups = prefetch_groups(found)
    counts = [2**n for n in range(len(groups).bit_length())]
    fewer = [frozenset[int]().union(*groups[:count]) for count in reversed(counts)]
    seen: set[Staged] = {Staged()}
    for ahead in (whole.ahead, frozenset[int](), *fewer):
        for late in (whole.late, frozenset[int]()):
            staged = Staged(ahead, late)
            if staged not in seen:
                seen.add(staged)
                yield staged


def _numbers(moves: Sequence[Move]) -> frozenset[int]:
    return frozenset(number for number, move in enumerate(moves) if move.ops)
