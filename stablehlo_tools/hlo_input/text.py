"""HLO text as people have it: what its header states, and where each instruction stands.

Pure Python; linear in the text. The text itself is read by XLA's parser, in `converter`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.hlo_input.normalization import normalized

_HEADER = "HloModule"
_COMMENT = re.compile(r"\s*(?://[^\n]*\n|/\*.*?\*/|\n)", re.DOTALL)
_SCHEDULED = re.compile(r"\bis_scheduled=true\b")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_COMPUTATION = re.compile(r"(?:ENTRY\s+)?%?([\w.-]+)\s*(?:\(.*)?\{\s*(?:/\*.*\*/)?\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=]+)\s+=\s")
_ELIDED = re.compile(r"\bconstant\(\{\.\.\.\}\)")
_TILE = ":T("
_CONTROL = re.compile(r"\bcontrol-predecessors=\{")


def is_hlo_text(data: bytes) -> bool:
    """Whether a file's bytes are HLO text: its first word, after comments, is `HloModule`."""
    start = data[:65_536].decode(errors="replace")
    at = 0
    while (comment := _COMMENT.match(start, at)) is not None:
        at = comment.end()
    return start[at:].lstrip().startswith(_HEADER)


@dataclass(frozen=True)
class Computation:
    """A computation of the text, and the line of each of its instructions, from 1."""

    name: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class HloText:
    """HLO text and what it says of itself.

    `is_scheduled`: the order of the instructions in a computation is the order in which a device
    issues them. `replicas` and `partitions` are None where the header does not state them. `name`
    is the file's, for locations.
    """

    text: str
    name: str = "<hlo>"

    @cached_property
    def header(self) -> str:
        """The line that begins with `HloModule`."""
        at = self.text.index(_HEADER)
        return self.text[at:].partition("\n")[0]

    @property
    def is_scheduled(self) -> bool:
        """Whether the text is a schedule."""
        return _SCHEDULED.search(self.header) is not None

    @property
    def replicas(self) -> int | None:
        """How many replicas the header states."""
        return _stated(_REPLICAS, self.header)

    @property
    def partitions(self) -> int | None:
        """How many partitions the header states."""
        return _stated(_PARTITIONS, self.header)

    @property
    def is_of_tpu(self) -> bool:
        """Whether XLA:TPU made the text: layouts have tiles there alone."""
        return _TILE in self.text

    @cached_property
    def _normalized(self) -> tuple[str, tuple[int, ...]]:
        return normalized(self.text)

    @property
    def converted(self) -> str:
        """The text in the forms that XLA's converter takes."""
        return self._normalized[0]

    @property
    def origins(self) -> tuple[int, ...]:
        """The line of the text that each line of `converted` stands for, from 1."""
        return self._normalized[1]

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """The computations in the order of the text."""
        names: list[str] = []
        lines: list[list[int]] = []
        inside = False
        for number, line in zip(self.origins, self.converted.splitlines(), strict=True):
            if inside and line.strip().startswith("}"):
                inside = False
            elif inside and _INSTRUCTION.match(line):
                lines[-1].append(number)
            elif not inside and (opened := _COMPUTATION.match(line)) is not None:
                names.append(opened.group(1))
                lines.append([])
                inside = True
        pairs = zip(names, lines, strict=True)
        return tuple(Computation(name, tuple(numbers)) for name, numbers in pairs)

    def place_of(self, computation: int, instruction: int) -> tuple[str, int]:
        """The computation's name and the line of an instruction, both counted from 0 in the order
        of the text; an empty name and line 0: unknown."""
        if computation < len(self.computations):
            holder = self.computations[computation]
            if instruction < len(holder.lines):
                return holder.name, holder.lines[instruction]
        return "", 0

    def line_of_name(self, name: str) -> int:
        """The first line that defines an instruction of this name, 0 where none does."""
        match = re.search(rf"^\s*(?:ROOT\s+)?%?{re.escape(name)}\s+=\s", self.text, re.MULTILINE)
        return 0 if match is None else self.text.count("\n", 0, match.start()) + 1

    def elided_constant(self) -> int:
        """The line of the first constant whose elements the printer left out, 0: there is none."""
        return self._first(_ELIDED)

    def control_dependence(self) -> int:
        """The line of the first instruction with control predecessors, 0: there is none."""
        return self._first(_CONTROL)

    def _first(self, pattern: re.Pattern[str]) -> int:
        match = pattern.search(self.text)
        return 0 if match is None else self.text.count("\n", 0, match.start()) + 1


def _stated(pattern: re.Pattern[str], header: str) -> int | None:
    match = pattern.search(header)
    return None if match is None else int(match.group(1))
