"""Formats the numbers of a schedule: in a model's units, or microseconds and bytes of a program.

The times and amounts of `schedule` may be in any unit. Sets of rank programs, and schedules timed
for a device, have known units and use the formats of `report`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stablehlo_tools.diagnostics import duration, size

_NS = 1e3  # in a microsecond


def figure(value: float) -> str:
    """Formats a time or an amount with five digits, or all digits before the point."""
    if abs(value) >= 10_000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.5g}"


def microseconds(value: float) -> str:
    """Formats microseconds: `6.53 ms`."""
    return duration(value * _NS)


def _of_seconds(value: float) -> str:
    """Formats seconds: `6.53 ms`."""
    return duration(value * 1e9)


def _moment(value: float) -> str:
    """Formats microseconds with all digits: `20 us`, `1.5 ms`."""
    return f"{value:.10g} us" if value < _NS else f"{value / _NS:.10g} ms"


@dataclass(frozen=True)
class FigureUnits:
    """Formatters of times and memory: in tables, in a sentence (`said`) and on an axis (`mark`).

    An axis has at most `marks` marks.
    """

    time: Callable[[float], str]
    amount: Callable[[float], str]
    said: Callable[[float], str]
    mark: Callable[[float], str]
    marks: int


OF_A_MODEL = FigureUnits(
    figure, figure, lambda value: f"{figure(value)} time units", lambda value: f"{value:.10g}", 40
)
OF_A_PROGRAM = FigureUnits(microseconds, size, microseconds, _moment, 12)
OF_SECONDS = replace(OF_A_PROGRAM, time=_of_seconds, said=_of_seconds)
