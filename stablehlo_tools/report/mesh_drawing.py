"""Draws a mesh over the machine: a cell for each device, in boxes of the innermost network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from stablehlo_tools.cost.hardware import Hardware

_MOST = 256  # devices that are drawn
_ROW = 8  # devices of a row, on a machine without an inner network of its own
_WIDTH, _HEIGHT, _GAP, _LABEL = 44, 24, 10, 18  # pixels


def mesh_drawing(axes: Sequence[tuple[str, int]], hardware: Hardware) -> str:
    """Returns an SVG picture. A cell has the place of its device on each axis; neighbours on the
    last axis have one shade."""
    devices = math.prod(size for _, size in axes)
    inner = hardware.networks[0]
    box = min(inner.devices or devices, devices)
    columns = min(box, _ROW)
    drawn = min(devices, _MOST)
    rows = -(-min(box, drawn) // columns)
    boxes = -(-drawn // box)
    across = max(1, min(boxes, 4 * _ROW // columns // 2))
    wide, high = columns * _WIDTH + _GAP, rows * _HEIGHT + _GAP + _LABEL
    width, height = across * wide + _GAP, -(-boxes // across) * high + _GAP
    cells = "".join(_cells(axes, drawn, box, columns, across, (wide, high), inner.name))
    told = ", ".join(f"{name} {size}" for name, size in axes)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" style="max-width:100%" '
        f'aria-label="{html.escape(f"{devices} devices on the axes {told}")}" '
        f'font-size="11" fill="currentColor">{cells}</svg>'
    )


def mesh_rows(axes: Sequence[tuple[str, int]], hardware: Hardware) -> Iterator[tuple[str, ...]]:
    """Yields, for each axis, its name, its size, and the outermost network that it crosses."""
    inside = 1
    spans: dict[str, int] = {}
    for name, size in reversed(axes):
        inside *= size
        spans[name] = inside
    for name, size in axes:
        network = next(
            (each for each in hardware.networks if spans[name] <= (each.devices or math.inf)),
            hardware.networks[-1],
        )
        yield name, str(size), network.name, f"{network.bandwidth:.0f} GB/s"


def _cells(
    axes: Sequence[tuple[str, int]],
    drawn: int,
    box: int,
    columns: int,
    across: int,
    step: tuple[int, int],
    network: str,
) -> Iterator[str]:
    wide, high = step
    last = axes[-1][1]
    for device in range(drawn):
        number, inside = divmod(device, box)
        left = _GAP + number % across * wide
        top = _GAP + number // across * high
        if not inside:
            yield f'<text x="{left}" y="{top + 11}" opacity="0.7">{html.escape(network)}</text>'
        x, y = left + inside % columns * _WIDTH, top + _LABEL + inside // columns * _HEIGHT
        shade = 0.06 if device // last % 2 else 0.2
        place: list[str] = []
        rest = device
        for _, size in reversed(axes):
            rest, at = divmod(rest, size)
            place.insert(0, str(at))
        yield (
            f'<rect x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="3" '
            f'fill-opacity="{shade}" stroke="currentColor" stroke-opacity="0.3"/>'
            f'<text x="{x + _WIDTH // 2 - 1}" y="{y + 15}" text-anchor="middle">'
            f"{','.join(place)}</text>"
        )
