"""The windows of HLO's convolutions. Pure Python."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.targets.hlo.module import HloInstruction

_WINDOW = re.compile(r"window=\{([^}]*)\}")


@dataclass(frozen=True)
class Window:
    """One dimension of a convolution's window."""

    stride: int = 1
    low: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    in_size: int = 1
    width: int = 1
    out_size: int = 1

    def over(self, in_size: int, width: int, out_size: int) -> Window:
        """The window over an input of this size."""
        return Window(
            self.stride, self.low, self.lhs_dilation, self.rhs_dilation, in_size, width, out_size
        )


def windows(instruction: HloInstruction, count: int) -> list[Window]:
    """The window in each of `count` spatial dimensions, sizes not yet known."""
    found = _WINDOW.search(instruction.line, instruction.after_opcode)
    fields = dict(part.split("=") for part in found.group(1).split()) if found else {}
    parts = {name: text.split("x") for name, text in fields.items()}

    def entries(name: str, absent: str) -> Sequence[str]:
        return parts.get(name, [absent] * count)

    return [
        Window(int(stride), int(pad.split("_")[0]), int(lhs), int(rhs))
        for stride, pad, lhs, rhs in zip(
            entries("stride", "1"),
            entries("pad", "0_0"),
            entries("lhs_dilate", "1"),
            entries("rhs_dilate", "1"),
            strict=True,
        )
    ]


@functools.cache
def met(window: Window) -> int:
    """How often a position of the window meets an element, neither padding nor a gap.

    Source: `HloCostAnalysis::GetConvolutionFlops` counts the same.
    """
    total = 0
    last = (window.in_size - 1) * window.lhs_dilation
    for position in range(window.out_size):
        first = position * window.stride - window.low
        if window.lhs_dilation == 1 or window.rhs_dilation == 1:
            total += _meetings(first, last, window)
        else:
            reached = range(first, first + window.width * window.rhs_dilation, window.rhs_dilation)
            total += sum(0 <= at <= last and at % window.lhs_dilation == 0 for at in reached)
    return total


def _meetings(first: int, last: int, window: Window) -> int:
    """Of one position of the output, where one of the dilations is 1."""
    if window.lhs_dilation == 1:
        step = window.rhs_dilation
        low = max(0, -(first // step))  # the first element of the window that is not below 0
        high = min(window.width - 1, (last - first) // step)
        return max(0, high - low + 1)
    step = window.lhs_dilation
    low = max(0, first)
    high = min(last, first + window.width - 1)
    return max(0, high // step - (low - 1) // step) if high >= low else 0
