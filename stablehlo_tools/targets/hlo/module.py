"""Scheduled HLO text as a module: its computations, and the source lines of its instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.hlo_input.hlo_text import HloText
from stablehlo_tools.hlo_input.instructions import HloInstruction, parse_computations

type Path = tuple[int, ...]  # of a part of a value: indices in nested tuples

_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?:[^}]*?source_line=(\d+))?')
_OF_ARGUMENT = re.compile(r"\(?[A-Za-z_]\w*(\.\w+)*\[")  # `batch['x']`, `(flat[2]:flat[0])`
_FAR = 64  # instructions: more distant ones do not indicate an origin
_TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\s*\n((?:\d+ .*\n)*)", re.MULTILINE
)
_ALIASING = re.compile(r", output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class HloModule:
    """A scheduled module.

    `grid` has its replicas and partitions. `donated` maps each output that reuses the buffer of an
    input, by its index in the result (nested tuples as further numbers), to the parameter's number
    and the index in it.
    """

    def __init__(
        self,
        computations: dict[str, HloComputation],
        entry: str,
        source: HloText,
        tables: dict[str, dict[str, str]],
    ) -> None:
        self.computations = computations
        self.entry = computations[entry]
        start = source.header.find("input_output_alias={")
        # Only the brace that ends the list follows a space: `{ {0}: (2, {}, may-alias) }`.
        end = source.header.find(" }", start)
        self.donated = parse_aliases(source.header[start:end] if start >= 0 else "")
        self.grid = ProcessGrid(source.replicas or 1, source.partitions or 1)
        self._tables = tables

    def computation(self, name: str, caller: HloInstruction) -> HloComputation:
        """Returns a computation that `caller` calls. Raises ToolError if the text lacks it."""
        if name not in self.computations:
            raise caller.error(f"the text has no computation {name!r}")
        return self.computations[name]

    def called_computation(self, instruction: HloInstruction, attribute: str) -> HloComputation:
        """Returns the computation that an attribute names. Raises ToolError if there is none."""
        names = instruction.callees_by_attribute().get(attribute)
        if not names:
            raise instruction.error(f"no attribute {attribute}")
        return self.computation(names[0], instruction)

    def expand(
        self, caller: HloInstruction, opens: Callable[[HloInstruction], bool]
    ) -> Iterator[tuple[HloInstruction, HloComputation]]:
        """The instructions that one calls, each with its computation; for those that `opens`
        accepts, the instructions that they call."""
        for name in caller.calls:
            computation = self.computation(name, caller)
            for inner in computation.instructions:
                if opens(inner):
                    yield from self.expand(inner, opens)
                else:
                    yield inner, computation

    def place(self, instruction: HloInstruction) -> str:
        """Returns `file.py:line` of the user's program; "" if the metadata has none."""
        frame = _FRAME.search(instruction.line, instruction.after_opcode)
        if frame:
            location = self._field("StackFrames", frame[1], "file_location_id")
            file = self._field("FileLocations", location, "file_name_id")
            name = self._tables.get("FileNames", {}).get(file, "").strip('"')
            line = self._field("FileLocations", location, "line")
            return _short_place(name, line) if name else ""
        source = _SOURCE.search(instruction.line, instruction.after_opcode)
        return _short_place(source.group(1), source.group(2) or "") if source else ""

    def _field(self, table: str, row: str, name: str) -> str:
        return dict(_FIELD.findall(self._tables.get(table, {}).get(row, ""))).get(name, "")

    def origin(self, instruction: HloInstruction) -> str:
        """Returns the place of an instruction, or that of a neighbour as `near file.py:line`.

        Instructions that the partitioner added or the combiner merged have no place. They get their
        argument, else the place of the nearest producer of an operand, else that of the nearest
        user. Returns "" if none has a place.
        """
        own = self.place(instruction) or _argument(instruction)
        computation = self._holders.get(instruction.name)
        if own or computation is None:
            return own
        for around in (computation.operands_of, computation.users_of):
            for other in _nearest(instruction, around):
                place = self.place(other) or _argument(other)
                if place:
                    return f"near {place}"
        caller = self._callers.get(computation.name)
        place = "" if caller is None else self.origin(caller)
        return f"near {place}" if place and not place.startswith("near ") else place

    @cached_property
    def _holders(self) -> dict[str, HloComputation]:
        """The computation that contains each instruction, by the instruction's name."""
        return {each.name: c for c in self.computations.values() for each in c.instructions}

    @cached_property
    def _callers(self) -> dict[str, HloInstruction]:
        """The instruction that calls each computation, by name."""
        return {
            called: each
            for computation in self.computations.values()
            for each in computation.instructions
            for called in each.calls
        }


def _argument(instruction: HloInstruction) -> str:
    """Returns the argument that the metadata names instead of a path of calls: `weights['up']`."""
    name = instruction.op_name
    return name.strip("()") if "/" not in name and _OF_ARGUMENT.match(name) else ""


def _nearest(
    instruction: HloInstruction, around: Callable[[HloInstruction], list[HloInstruction]]
) -> Iterator[HloInstruction]:
    """Yields the instructions on one side, the nearest first, at most _FAR of them."""
    seen, level = {instruction.name}, [instruction]
    while level and len(seen) < _FAR:
        level = [other for each in level for other in around(each)]
        level = [other for other in dict.fromkeys(level) if other.name not in seen]
        seen.update(other.name for other in level)
        yield from level


@dataclass(frozen=True)
class HloComputation:
    """Instructions in issue order."""

    name: str
    instructions: tuple[HloInstruction, ...]

    @cached_property
    def by_name(self) -> dict[str, HloInstruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> tuple[HloInstruction, ...]:
        """The parameters in the order of their numbers."""
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda i: int(i.literal)))

    @cached_property
    def root(self) -> HloInstruction:
        """The instruction whose result the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def users(self) -> dict[str, list[HloInstruction]]:
        """The instructions that read each one."""
        users: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def operands_of(self, instruction: HloInstruction) -> list[HloInstruction]:
        """The instructions whose results one reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    def users_of(self, instruction: HloInstruction) -> list[HloInstruction]:
        """The instructions that read the result of one."""
        return self.users.get(instruction.name, [])


def _short_place(file: str, line: str) -> str:
    """Returns `file.py:line`, without the folders."""
    return f"{file.rpartition('/')[2]}:{line}" if line else file.rpartition("/")[2]


def parse_module(text: str) -> HloModule:
    """Parses scheduled HLO text. Raises ToolError if it is not a scheduled module."""
    source = HloText(text)
    if not (text.lstrip().startswith("HloModule") and source.is_scheduled):
        raise ToolError("not the text of a scheduled HLO module")
    found, entry = parse_computations(text)
    if not found.get(entry):
        raise ToolError("the HLO text has no ENTRY computation")
    computations = {
        name: HloComputation(name, tuple(_merge_launches(each)))
        for name, each in found.items()
        if each
    }
    tables = {
        table: dict(row.split(" ", 1) for row in lines.splitlines())
        for table, lines in _TABLE.findall(text)
    }
    return HloModule(computations, entry, source, tables)


def _merge_launches(instructions: list[HloInstruction]) -> Iterator[HloInstruction]:
    """Yields the instructions, with the two steps of a SparseCore's start merged at its launch.

    XLA:TPU first loads a program and passes its operands later, here of a call of @f:

        %p = (…) custom-call-start(), called_computations={%f}
        %u = (…) custom-call-update(%p, %x)    ==>    %u = (…) custom-call-start(%x), …
        %y = custom-call-done(%u)
    """
    loaded = {i.name: i for i in instructions if i.opcode.endswith("-start") and not i.operands}
    updates = [i for i in instructions if i.opcode.endswith("-update")] if loaded else []
    program_of = {i.name: loaded[i.operands[0]] for i in updates if i.operands[0] in loaded}
    programs = {program.name for program in program_of.values()}
    for instruction in instructions:
        if instruction.name in program_of:
            # Replaces the update: its result and operands, with the program's attributes.
            program = program_of[instruction.name]
            result = instruction.line[: instruction.after_opcode].rpartition(" ")[0]
            operands = ", ".join(f"%{name}" for name in instruction.operands[1:])
            head = f"{result} {program.opcode}("
            rest = program.line[program.after_opcode :].partition(")")[2]
            line = f"{head}{operands}){_ALIASING.sub('', rest)}"
            yield HloInstruction(instruction.name, program.opcode, line, len(head))
        elif instruction.name not in programs:
            yield instruction


def parse_aliases(text: str) -> dict[Path, tuple[int, Path]]:
    """Parses `{0}: (2, {}, may-alias)`: maps parts of a result to an operand and a part of it."""
    return {_path(output): (int(n), _path(inside)) for output, n, inside in _ALIAS.findall(text)}


def _path(text: str) -> Path:
    return tuple(int(part) for part in text.split(",") if part.strip())
