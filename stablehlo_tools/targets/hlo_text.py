"""HLO text: the instructions that are, finish or may contain a collective, and their identity.

Pure Python; linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stablehlo_tools.dialect.collectives import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.traits import COLLECTIVES as DIALECT_COLLECTIVES
from stablehlo_tools.dialect.traits import short_names

TAG = "stablehlo_tools_id"  # the frontend attribute that carries the ids of the program's ops
TAG_MARK = "#id"  # what precedes an id in an op_name; the second carrier of the identity

ASYNC_MARKER = 'custom_call_target="AsyncCollective'

COLLECTIVES = frozenset(
    name.replace("_", "-") for name in (*short_names(DIALECT_COLLECTIVES), RAGGED_ALL_TO_ALL)
)
TRANSFERS = frozenset({"send", "recv"})
SYNCHRONOUS = COLLECTIVES | {"infeed", "outfeed"}
WRAPPERS = frozenset({"async", "call", "fusion", "custom-call"})
DESCENDED = frozenset({"while", "conditional", "call", "fusion"})

COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) ?\(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = ")
OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
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


type Combined = Mapping[str, tuple[int, ...]]  # ids by instruction name
type Computations = dict[str, list[Instruction]]


@dataclass(frozen=True)
class Instruction:
    """One instruction that is a collective, finishes one, or may contain one."""

    name: str
    opcode: str
    line: str
    after_opcode: int  # where the operands begin in the line

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return _OPERAND.findall(self.line, self.after_opcode, self._end_of_operands())

    def _end_of_operands(self) -> int:
        end = self.line.find(")", self.after_opcode)
        if self.line.find("(", self.after_opcode, end) < 0:
            return end if end >= 0 else len(self.line)
        depth = 0
        for index in range(self.after_opcode - 1, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[index], 0)
            if depth == 0:
                return index
        return len(self.line)

    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by the attribute that names them."""
        called: dict[str, list[str]] = {}
        for key, name in _CALLED.findall(self.line, self.after_opcode):
            called.setdefault(key, []).append(name)
        for names in _BRANCHES.findall(self.line, self.after_opcode):
            called["branches"] = [name.strip().lstrip("%") for name in names.split(",")]
        return called

    def branches(self) -> list[str]:
        """The computations of a conditional: indexed ones, or the true one and the false one."""
        called = self.called()
        return called.get("branches") or [
            *called.get("true_computation", []),
            *called.get("false_computation", []),
        ]

    def tagged_ids(self) -> tuple[int, ...]:
        """The ids in its tag."""
        tags = _TAGGED_IDS.search(self.line, self.after_opcode)
        return tuple(int(i) for i in tags.group(1).split(",") if i) if tags else ()

    def marked_ids(self) -> tuple[int, ...]:
        """The ids marked in its op_name."""
        name = _OP_NAME.search(self.line, self.after_opcode)
        return tuple(map(int, _MARKED_ID.findall(name.group(1)))) if name else ()

    def op_name(self) -> str:
        """The op_name of the metadata, without the marks of the tagging."""
        op_name = _OP_NAME.search(self.line, self.after_opcode)
        name = _MARKED_ID.sub("", op_name.group(1)).replace("\\'", "'") if op_name else ""
        return name if re.search(r"\w", name) else ""

    def shape(self) -> str:
        """The result's shape, as printed."""
        start = self.line.index(" = ") + 3
        return self.line[start : self.after_opcode - len(self.opcode) - 2]

    def groups(self) -> str:
        """The replica groups or the source-target pairs, as printed."""
        groups = _GROUPS.search(self.line, self.after_opcode)
        return groups.group(1) if groups else ""


class Identities:
    """Which ops of the program an instruction stands for.

    Its tag says so; where XLA dropped the tag, the dumps may (`combined`, by instruction name), or
    the op_name. The latter counts only for ids that no tag has: what the partitioner adds around
    a collective inherits that one's op_name.
    """

    def __init__(self, computations: Computations, combined: Combined) -> None:
        self.combined = combined
        self.tagged = {
            id_
            for instructions in computations.values()
            for instruction in instructions
            if instruction.opcode not in DESCENDED  # a fusion has the tags of what it absorbed
            for id_ in instruction.tagged_ids()
        }

    def of(self, instruction: Instruction) -> tuple[tuple[int, ...], bool]:
        """The ids, and whether there may be others that are lost."""
        ids = instruction.tagged_ids() or self.combined.get(instruction.name, ())
        if ids:
            return ids, False
        marked = dict.fromkeys(i for i in instruction.marked_ids() if i not in self.tagged)
        return tuple(marked), bool(marked) and len(instruction.operands) > 1


def parse_computations(text: str) -> tuple[Computations, str]:
    """The instructions that matter here, by computation, and the entry computation's name."""
    computations: Computations = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if not line or line[0] == "}":
            current = None
        elif line[0] not in " \t":
            header = COMPUTATION.match(line)
            if header:
                current = computations.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current.append(instruction)
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return computations, entry


def _parse_instruction(line: str) -> Instruction | None:
    name = _INSTRUCTION.match(line)
    opcode = OPCODE.search(line, name.end() - 1) if name else None
    if name is None or opcode is None or not _matters(opcode.group(1), line):
        return None
    return Instruction(name.group(1), opcode.group(1), line, opcode.end())


def _matters(opcode: str, line: str) -> bool:
    if opcode in SYNCHRONOUS or opcode in TRANSFERS or opcode in DESCENDED:
        return True
    if opcode == "custom-call":
        return TAG in line or "has_side_effect=true" in line or ASYNC_MARKER in line
    base, _, suffix = opcode.rpartition("-")
    if suffix not in ("start", "update", "done"):
        return False
    return base in COLLECTIVES or base in TRANSFERS or base in WRAPPERS
