"""What the numbers of a schedule are: of a model, or microseconds and bytes of a program.

`schedule` is asked in times and amounts of anybody's choosing; a set of rank programs, and whatever
was timed for a device, are in units that are known, and are shown in the words of `report`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stablehlo_tools.diagnostics import duration, size

_NS = 1e3  # in a microsecond


def figure(value: float) -> str:
    """A time or an amount with five digits, or all before the point."""
    if abs(value) >= 10_000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.5g}"


def microseconds(value: float) -> str:
    """`6.53 ms` of microseconds."""
    return duration(value * _NS)


def _of_seconds(value: float) -> str:
    """`6.53 ms` of seconds."""
    return duration(value * 1e9)


def _moment(value: float) -> str:
    """`20 us`, `1.5 ms` of microseconds, in all its digits."""
    return f"{value:.10g} us" if value < _NS else f"{value / _NS:.10g} ms"


@dataclass(frozen=True)
class Units:
    """How times and amounts of memory are written: in tables, in a sentence, and on an axis, which
    has so many marks at most."""

    time: Callable[[float], str]
    amount: Callable[[float], str]
    said: Callable[[float], str]
    mark: Callable[[float], str]
    marks: int


OF_A_MODEL = Units(
    figure, figure, lambda value: f"{figure(value)} time units", lambda value: f"{value:.10g}", 40
)
OF_A_PROGRAM = Units(microseconds, size, microseconds, _moment, 12)
OF_SECONDS = replace(OF_A_PROGRAM, time=_of_seconds, said=_of_seconds)
