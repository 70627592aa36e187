"""Renders a timed schedule as text, ranks down and time across, and defines the colours.

If nearly all steps are at least a column long, every step is drawn: its letter, the microbatch if
there is room, and a filling for its phase. Otherwise each column is a block of time and shows the
phase of its work.

In a terminal each phase has a hue and each chunk a shade. The hues are from the 256 colours common
to terminals and are distinct for the colour-blind. Letters carry the same information without
colours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Action, Pair, Step

MIXED = "M"
_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_BLACK, _WHITE = 16, 231
NAMES = {
    "F": "forward",
    "B": "backward, both gradients",
    "I": "input gradient",
    "W": "weight gradient",
    "P": "forward and backward at once",
    ">": "send",
    "<": "receive",
    "^": "waits for a copy to the host",
}
_ROUNDING = 1e-6
IDLE = "."
FILLINGS = {"F": "-", "B": "=", "I": "+", "W": "~", "P": "#", ">": ">", "<": "<", "^": "^"}
_PHASES = frozenset("FBIWP")
_WIDEST_UNIT = 6  # most columns for the shortest step
_DIVISORS = range(1, 13)  # of the shortest step, to find a unit that divides all times
_CLOSE = 1e-6
_BETWEEN_MARKS = 8  # least columns between marks of the axis
_HIDDEN = 0.02  # most of all steps that may have no column
_MOSTLY = 0.9  # least share of a block's busy time for a single phase to be shown


class Style(NamedTuple):
    """The look of a column: the letter of a phase (or ""), and the number of the chunk."""

    letter: str = ""
    chunk: int = 0


class _Shade(NamedTuple):
    back: int
    text: int


_SHADES = {  # one for each chunk, from chunk 0
    "F": (_Shade(25, _WHITE), _Shade(74, _BLACK), _Shade(117, _BLACK), _Shade(153, _BLACK)),
    "B": (_Shade(166, _BLACK), _Shade(214, _BLACK), _Shade(222, _BLACK), _Shade(230, _BLACK)),
    "I": (_Shade(125, _WHITE), _Shade(169, _BLACK), _Shade(211, _BLACK), _Shade(225, _BLACK)),
    "W": (_Shade(28, _WHITE), _Shade(71, _BLACK), _Shade(114, _BLACK), _Shade(157, _BLACK)),
    "P": (_Shade(61, _WHITE), _Shade(104, _BLACK), _Shade(147, _BLACK), _Shade(189, _BLACK)),
    ">": (_Shade(240, _WHITE),),
    "<": (_Shade(240, _WHITE),),
    "^": (_Shade(240, _WHITE),),
    MIXED: (_Shade(245, _BLACK),),
}


def painted(text: str, style: Style) -> str:
    """Returns the text with terminal colours; dim if the style has no phase."""
    shades = _SHADES.get(style.letter)
    if shades is None:
        return f"{_DIM}{text}{_RESET}"
    shade = shades[style.chunk % len(shades)]
    return f"\x1b[48;5;{shade.back}m\x1b[38;5;{shade.text}m{text}{_RESET}"


def letter_of(step: Step) -> str:
    """Returns the letter of a step: a key of NAMES."""
    if isinstance(step, Pair):
        return "P"
    if step.kind.is_compute:
        return step.kind.value
    if step.kind.is_copy:
        return "^"
    return ">" if step.kind.is_send else "<"


def chunk_of(timeline: Timeline, rank: int, step: Step) -> int:
    """Returns the chunk of a step: its stage's index on the rank; for a pair, the forward's."""
    stage = step.stage if isinstance(step, Action) else step.forward.stage
    held = timeline.table.placement.held[rank]
    return held.index(stage) if stage in held else 0


def microbatch_of(step: Step) -> str:
    """Returns the microbatch of a step, or the two of a pair, as text."""
    if isinstance(step, Action):
        return str(step.microbatch)
    return f"{step.forward.microbatch}/{step.backward.microbatch}"


def axis_step(least: float) -> float:
    """Returns the distance of axis marks: 1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** (len(str(int(least))) - 1) if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(
        power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - _ROUNDING)
    )


_PARTLY_IDLE, _MOSTLY_IDLE = 0.1, 0.5  # of a block's time


class Cell(NamedTuple):
    """One column of a rank's row."""

    character: str
    style: Style


_IDLE_CELL = Cell(IDLE, Style())


@dataclass(frozen=True)
class Gantt:
    """A chart of a timeline, at most `columns` wide."""

    timeline: Timeline
    columns: int

    @cached_property
    def scale(self) -> float:
        """Columns per unit of time; if it fits, so that each step has whole columns."""
        makespan = self.timeline.makespan
        if not makespan:
            return 0.0
        exact = self._columns_of_unit()
        return exact or self.columns / makespan

    @cached_property
    def in_blocks(self) -> bool:
        """True if too many steps are too short to be drawn."""
        most = _HIDDEN * len(self._lengths)
        # A column shows one step at most. In long schedules this bound decides, without a search.
        without = sum(max(0, steps - self.width) for steps in self._steps_of_ranks)
        return without > most or self.hidden > most

    @cached_property
    def width(self) -> int:
        """The number of columns in use."""
        return round(self.timeline.makespan * self.scale)

    @cached_property
    def hidden(self) -> int:
        """The number of steps that are too short for a column."""
        steps = (step for rank in range(self.timeline.table.ranks) for step in self._steps(rank))
        return sum(self._column(start) == self._column(end) for _, start, end in steps)

    @cached_property
    def letters(self) -> str:
        """The letters of the phases with nonzero time, in the order of the legend."""
        letters = {
            letter_of(step)
            for rank in range(self.timeline.table.ranks)
            for step, _, _ in self._steps(rank)
        }
        return "".join(letter for letter in NAMES if letter in letters)

    def row(self, rank: int) -> list[Cell]:
        """Returns the columns of a rank."""
        return self._blocks(rank) if self.in_blocks else self._drawn(rank)

    def axis(self, begin: int, end: int) -> str:
        """Returns the axis over the columns `begin` to `end`: times at their columns."""
        if not self.width:
            return "0"
        step = axis_step(_BETWEEN_MARKS / self.scale)
        text = ""
        first, last = (int(column / self.scale / step) for column in (begin, end))
        for tick in range(first, last + 1):
            label, column = f"{tick * step:.10g}", self._column(tick * step) - begin
            if 0 <= column <= end - begin - len(label):
                text = text.ljust(column) + label
        return text

    @cached_property
    def _steps_of_ranks(self) -> list[int]:
        return [sum(1 for _ in self._steps(rank)) for rank in range(self.timeline.table.ranks)]

    @cached_property
    def _lengths(self) -> list[float]:
        ranks = range(self.timeline.table.ranks)
        return [end - start for rank in ranks for _, start, end in self._steps(rank)]

    @cached_property
    def _times(self) -> set[float]:
        """The times at which steps start or end."""
        ranks = range(self.timeline.table.ranks)
        return {time for rank in ranks for _, *times in self._steps(rank) for time in times}

    def _columns_of_unit(self) -> float:
        """Returns columns per unit of time so that steps fill whole columns; 0 if none does."""
        shortest, makespan = min(self._lengths), self.timeline.makespan
        for divisor in _DIVISORS:
            unit = shortest / divisor
            columns = min(int(self.columns * unit / makespan + _CLOSE), _WIDEST_UNIT)
            if not columns:
                return 0.0
            if all(abs(time / unit - round(time / unit)) < _CLOSE for time in self._times):
                return columns / unit
        return 0.0

    def _steps(self, rank: int) -> Iterator[tuple[Step, float, float]]:
        """Yields the steps of a rank with nonzero time."""
        timeline = self.timeline
        rows = timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank]
        for step, start, end in zip(*rows, strict=True):
            if step is not None and end > start:
                yield step, start, end

    def _column(self, time: float) -> int:
        return round(time * self.scale)

    def _drawn(self, rank: int) -> list[Cell]:
        cells = [_IDLE_CELL] * self.width
        for step, start, end in self._steps(rank):
            begin, after = self._column(start), self._column(end)
            style = Style(letter_of(step), chunk_of(self.timeline, rank, step))
            text = _label(step, style, after - begin)
            cells[begin:after] = [Cell(character, style) for character in text]
        return cells

    def _blocks(self, rank: int) -> list[Cell]:
        block = self.timeline.makespan / self.width
        busy: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(self.width)]
        for step, start, end in self._steps(rank):
            letter = letter_of(step)
            first, last = int(start / block), min(int(end / block), self.width - 1)
            for column in range(first, last + 1):
                begin, after = column * block, (column + 1) * block
                busy[column][letter] += max(0.0, min(end, after) - max(start, begin))
        return [_block(times, block) for times in busy]


def shown(cells: Sequence[Cell], colour: bool) -> str:
    """Returns the row as text, with one colour sequence for each run of a style."""
    if not colour:
        return "".join(cell.character for cell in cells)
    return "".join(
        painted("".join(cell.character for cell in run), style)
        for style, run in groupby(cells, key=lambda cell: cell.style)
    )


def _label(step: Step, style: Style, width: int) -> str:
    """Returns letter, number if it fits, and filling; lower case for odd chunks."""
    letter = style.letter.lower() if style.chunk % 2 else style.letter
    text = letter + microbatch_of(step)
    return (text if len(text) <= width else letter).ljust(width, FILLINGS[style.letter])[:width]


def _block(times: Mapping[str, float], block: float) -> Cell:
    idle = 1 - sum(time for letter, time in times.items() if letter in _PHASES) / block
    if idle > _MOSTLY_IDLE:
        return _IDLE_CELL
    busy = sum(times.values())
    letter, most = max(times.items(), key=lambda item: item[1])
    shown_as = letter if most >= _MOSTLY * busy else MIXED
    return Cell(shown_as.lower() if idle > _PARTLY_IDLE else shown_as, Style(shown_as))
