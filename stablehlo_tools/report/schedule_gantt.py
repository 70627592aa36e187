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

from stablehlo_tools.schedules.table import Action, ActionPair, Step
from stablehlo_tools.schedules.table_simulator import Timeline

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


_SHADES = {  # background and text, one pair for each chunk, from chunk 0
    "F": ((25, _WHITE), (74, _BLACK), (117, _BLACK), (153, _BLACK)),
    "B": ((166, _BLACK), (214, _BLACK), (222, _BLACK), (230, _BLACK)),
    "I": ((125, _WHITE), (169, _BLACK), (211, _BLACK), (225, _BLACK)),
    "W": ((28, _WHITE), (71, _BLACK), (114, _BLACK), (157, _BLACK)),
    "P": ((61, _WHITE), (104, _BLACK), (147, _BLACK), (189, _BLACK)),
    ">": ((240, _WHITE),),
    "<": ((240, _WHITE),),
    "^": ((240, _WHITE),),
    MIXED: ((245, _BLACK),),
}


def paint_text(text: str, style: Style) -> str:
    """Returns the text with terminal colours; dim if the style has no phase."""
    shades = _SHADES.get(style.letter)
    if shades is None:
        return f"{_DIM}{text}{_RESET}"
    background, foreground = shades[style.chunk % len(shades)]
    return f"\x1b[48;5;{background}m\x1b[38;5;{foreground}m{text}{_RESET}"


def letter_of(step: Step) -> str:
    """Returns the letter of a step: a key of NAMES."""
    if isinstance(step, ActionPair):
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


def timed_steps(timeline: Timeline, rank: int) -> Iterator[tuple[Step, float, float]]:
    """Yields the steps of a rank with nonzero time, with start and end."""
    rows = timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank]
    for step, start, end in zip(*rows, strict=True):
        if step is not None and end > start:
            yield step, start, end


def letters_of(timeline: Timeline) -> list[str]:
    """Returns the letters of the phases with nonzero time, in the order of the legend."""
    ranks = range(timeline.table.ranks)
    letters = {letter_of(step) for rank in ranks for step, _, _ in timed_steps(timeline, rank)}
    return [letter for letter in NAMES if letter in letters]


def axis_step(least: float) -> float:
    """Returns the distance of axis marks: 1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** (len(str(int(least))) - 1) if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(
        power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - _ROUNDING)
    )


_PARTLY_IDLE, _MOSTLY_IDLE = 0.1, 0.5  # of a block's time


class GanttCell(NamedTuple):
    """One column of a rank's row."""

    character: str
    style: Style


_IDLE_CELL = GanttCell(IDLE, Style())


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
        steps = [step for row in self._rows for step in row]
        shortest = min(end - start for _, start, end in steps)
        times = {time for _, *times in steps for time in times}
        for divisor in _DIVISORS:
            unit = shortest / divisor
            columns = min(int(self.columns * unit / makespan + _CLOSE), _WIDEST_UNIT)
            if not columns:
                break
            if all(abs(time / unit - round(time / unit)) < _CLOSE for time in times):
                return columns / unit
        return self.columns / makespan

    @cached_property
    def in_blocks(self) -> bool:
        """True if too many steps are too short to be drawn."""
        most = _HIDDEN * sum(map(len, self._rows))
        # A column shows one step at most. In long schedules this bound decides, without a search.
        without = sum(max(0, len(row) - self.width) for row in self._rows)
        return without > most or self.hidden > most

    @cached_property
    def width(self) -> int:
        """The number of columns in use."""
        return round(self.timeline.makespan * self.scale)

    @cached_property
    def hidden(self) -> int:
        """The number of steps that are too short for a column."""
        steps = (step for row in self._rows for step in row)
        return sum(self._column(start) == self._column(end) for _, start, end in steps)

    def row(self, rank: int) -> list[GanttCell]:
        """Returns the columns of a rank."""
        if self.in_blocks:
            return self._blocks(rank)
        cells = [_IDLE_CELL] * self.width
        for step, start, end in self._rows[rank]:
            begin, after = self._column(start), self._column(end)
            style = Style(letter_of(step), chunk_of(self.timeline, rank, step))
            # The letter, lower case for odd chunks; the number if it fits; a filling.
            letter = style.letter.lower() if style.chunk % 2 else style.letter
            text = letter + microbatch_of(step)
            text = text if len(text) <= after - begin else letter
            filled = text.ljust(after - begin, FILLINGS[style.letter])[: after - begin]
            cells[begin:after] = [GanttCell(character, style) for character in filled]
        return cells

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
    def _rows(self) -> list[list[tuple[Step, float, float]]]:
        """The steps of each rank with nonzero time."""
        return [list(timed_steps(self.timeline, rank)) for rank in range(self.timeline.table.ranks)]

    def _column(self, time: float) -> int:
        return round(time * self.scale)

    def _blocks(self, rank: int) -> list[GanttCell]:
        block = self.timeline.makespan / self.width
        busy: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(self.width)]
        for step, start, end in self._rows[rank]:
            letter = letter_of(step)
            first, last = int(start / block), min(int(end / block), self.width - 1)
            for column in range(first, last + 1):
                begin, after = column * block, (column + 1) * block
                busy[column][letter] += max(0.0, min(end, after) - max(start, begin))
        return [_block(times, block) for times in busy]


def shown(cells: Sequence[GanttCell], colour: bool) -> str:
    """Returns the row as text, with one colour sequence for each run of a style."""
    if not colour:
        return "".join(cell.character for cell in cells)
    return "".join(
        paint_text("".join(cell.character for cell in run), style)
        for style, run in groupby(cells, key=lambda cell: cell.style)
    )


def _block(times: Mapping[str, float], block: float) -> GanttCell:
    idle = 1 - sum(time for letter, time in times.items() if letter in _PHASES) / block
    if idle > _MOSTLY_IDLE:
        return _IDLE_CELL
    letter, most = max(times.items(), key=lambda item: item[1])
    shown_as = letter if most >= _MOSTLY * sum(times.values()) else MIXED
    return GanttCell(shown_as.lower() if idle > _PARTLY_IDLE else shown_as, Style(shown_as))
