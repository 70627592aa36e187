"""HLO text as computations of instructions: `%name = shape opcode(operands), attributes`.

An instruction stores its line and the position of its operands. Everything else is parsed on first
use, so a text of 100,000 instructions costs one pass over its lines. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.hlo_input.shapes import Array, Shape, arrays, closing_bracket, parse_shape

TAG = "stablehlo_tools_id"  # the frontend attribute that carries the ids of the program's ops
TAG_MARK = "#id"  # precedes an id in an op_name, which carries the ids as well

COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s({]+)\s*(\(.*)?\{\s*(?:/\*.*\*/)?\s*$")
_NAME = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=]+)\s+=\s")
_OPCODE = re.compile(r"\s([a-z][a-z0-9-]*)\(")
_OPERAND = re.compile(r"%([^\s,()#]+)")
_CALLED = re.compile(
    r"[ {](calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,{}]+)"
)
_BRANCHES = re.compile(r" (?:branch_computations|called_computations)=\{([^}]*)\}")
_TAGGED_IDS = re.compile(TAG + r'="([\d,]*)"')
_OP_NAME = re.compile(r' ?op_name="((?:[^"\\]|\\.)*)"')
_MARKED_ID = re.compile(TAG_MARK + r"(\d+)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|mesh\[[^\]]*\][^{]* \{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|[^\s,]*)"
)
_NUMBERS = re.compile(r"-?\d+")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CHAIN = re.compile(r'chain_id="([^"]*)"')


@dataclass(frozen=True)
class HloInstruction:
    """One instruction, on line `number` (from 1). Its operands begin at column `after_opcode`."""

    name: str
    opcode: str
    line: str
    after_opcode: int
    number: int = 0

    @cached_property
    def operands(self) -> list[str]:
        """The names of the operands."""
        if self.opcode in ("constant", "parameter"):
            return []
        return _OPERAND.findall(self.line, self.after_opcode, self.end_of_operands)

    @cached_property
    def end_of_operands(self) -> int:
        """The position of the bracket after the operands; the line's end if they go on."""
        end = closing_bracket(self.line, self.after_opcode - 1)
        return len(self.line) if end is None else end

    @property
    def literal(self) -> str:
        """The text of the operands: the number of a parameter, the value of a constant."""
        return self.line[self.after_opcode : self.end_of_operands]

    @property
    def attributes(self) -> str:
        """The text after the operands, from the comma on."""
        return self.line[self.end_of_operands + 1 :].rstrip()

    @property
    def printed_name(self) -> str:
        """The name as printed, with or without `%`."""
        return self.line.partition("=")[0].split()[-1]

    @property
    def is_root(self) -> bool:
        """True if it is the result of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def shape(self) -> str:
        """The result's shape, as printed."""
        return self.line[: self.after_opcode - len(self.opcode) - 1].partition("=")[2].strip()

    @cached_property
    def result(self) -> Shape:
        """The shape of the result."""
        return parse_shape(self.shape)

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        return arrays(self.result)

    def callees_by_attribute(self) -> dict[str, list[str]]:
        """Returns the computations that it calls, by the attribute that names them."""
        called: dict[str, list[str]] = {}
        for key, name in _CALLED.findall(self.line, self.after_opcode):
            called.setdefault(key, []).append(name)
        for names in _BRANCHES.findall(self.line, self.after_opcode):
            called["branches"] = [name.strip().lstrip("%") for name in names.split(",")]
        return called

    @property
    def calls(self) -> list[str]:
        """The computations that it calls, by any attribute."""
        return [name for names in self.callees_by_attribute().values() for name in names]

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional: indexed ones, or the true one and the false one."""
        called = self.callees_by_attribute()
        return called.get("branches") or [
            *called.get("true_computation", []),
            *called.get("false_computation", []),
        ]

    @property
    def tagged_ids(self) -> tuple[int, ...]:
        """The ids in its tag."""
        return tuple(int(i) for i in (self._find(_TAGGED_IDS) or "").split(",") if i)

    @property
    def marked_ids(self) -> tuple[int, ...]:
        """The ids marked in its op_name."""
        return tuple(map(int, _MARKED_ID.findall(self._find(_OP_NAME) or "")))

    @property
    def op_name(self) -> str:
        """The op_name of the metadata, without the marks of the tagging."""
        name = _MARKED_ID.sub("", self._find(_OP_NAME) or "").replace("\\'", "'")
        return name if re.search(r"\w", name) else ""

    @property
    def groups(self) -> str:
        """The replica groups or the source-target pairs, as printed."""
        return self._find(_GROUPS) or ""

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self._find(_TARGET) or ""

    @property
    def chain(self) -> str | None:
        """The `chain_id` of XLA:TPU's collective fusions; None if it belongs to no chain."""
        return self._find(_CHAIN)

    @property
    def trips(self) -> int | None:
        """The iterations of a `while`, if XLA states them."""
        trips = self._find(_TRIPS)
        return None if trips is None else int(trips)

    def attribute(self, name: str) -> str:
        """Returns an attribute's value as printed, up to the comma after it; "" if absent."""
        return self._find(re.compile(rf", {name}=(\{{[^}}]*\}}|[^,\s]*)")) or ""

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns the numbers in an attribute: `dimensions={0,2}`, `index=1`."""
        return tuple(int(number) for number in _NUMBERS.findall(self.attribute(name)))

    def error(self, message: str) -> ToolError:
        """Returns an error that names the instruction."""
        return ToolError(f"HLO instruction {self.name} ({self.opcode}): {message}")

    def _find(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.search(self.line, self.after_opcode)
        return None if found is None else found[1]


def parse_instruction(line: str, number: int = 0) -> HloInstruction | None:
    """Parses the instruction that begins on a line; None if none does."""
    name = _NAME.match(line)
    opcode = _OPCODE.search(line, name.end() - 1) if name else None
    if name is None or opcode is None:
        return None
    return HloInstruction(name[1], opcode[1], line, opcode.end(), number)


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields each line with its number, from 1; a broken instruction as one line.

    XLA prints the metadata of a Pallas kernel as JSON in lines of their own.
    """
    first, parts = 1, [""]
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(('"', "}}")):
            parts.append(line)
            continue
        yield first, "".join(parts)
        first, parts = number, [line]
    yield first, "".join(parts)


def parse_computations(text: str) -> tuple[dict[str, list[HloInstruction]], str]:
    """Returns the instructions of each computation, in the order of the text, and the entry's name.

    The name is empty if the text has no ENTRY, or prints it without its parameters: such text
    prints the names of operands without `%`, which `operands` does not read.
    """
    computations: dict[str, list[HloInstruction]] = {}
    current: list[HloInstruction] | None = None
    entry = ""
    for number, line in _whole_lines(text):
        if opened := COMPUTATION.match(line):
            current = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] and opened[3] else entry
        elif line[:1] == "}":
            current = None
        elif current is not None and (instruction := parse_instruction(line, number)):
            current.append(instruction)
    return computations, entry
