"""Times and sizes as people read them, three digits."""

from __future__ import annotations

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def duration(ns: float) -> str:
    """`12.4 ms` of nanoseconds."""
    return _scaled(ns, _TIMES)


def size(count: float) -> str:
    """`1.53 GiB` of bytes."""
    return _scaled(count, _SIZES)


def share(part: float, whole: float) -> str:
    """`31 %`; a dash where there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _scaled(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    factor, unit = next(
        ((factor, unit) for factor, unit in units if amount >= factor * 0.9995), units[-1]
    )
    value = amount / factor
    digits = 0 if value >= 99.95 or not value else 1 if value >= 9.995 else 2
    if factor == 1.0 and value == int(value):
        digits = 0
    return f"{value:.{digits}f} {unit}"
