"""Scheduled HLO text as a module: computations, instructions, their shapes, operands, attributes.

What an attribute holds is read when it is asked for, so a text of 100,000 instructions takes no
more than a pass over its lines. Shapes are as HLO text prints them,
`f32[8,128]{1,0:T(8,128)(2,1)S(1)}`, and tuples of such. Pure Python.

Source of the shapes: openxla.org/xla/shapes and openxla.org/xla/tiled_layout.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import MEAN_RUNS, parsed_mean_runs
from stablehlo_tools.targets import hlo_text

DEVICE_MEMORY = 0  # the memory space of a layout that names none
HOST_MEMORY = 5
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILES = re.compile(r"T((?:\([^)]*\))+)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")
_COMMENT = re.compile(r"/\*.*?\*/")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r"(\w+)=(\d+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_NUMBERS = re.compile(r"-?\d+")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MEAN_RUNS = re.compile(rf'{MEAN_RUNS}="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?:[^}]*?source_line=(\d+))?')
_OF_ARGUMENT = re.compile(r"\(?[A-Za-z_]\w*(\.\w+)*\[")  # `batch['x']`, `(flat[2]:flat[0])`
_FAR = 64  # instructions: what is further away says nothing
_TABLE_ROW = re.compile(r"(\d+) (.*)$")
_ALIASING = re.compile(r", output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class HloModule:
    """A scheduled module.

    `grid` is what it runs as. `donated` are the outputs that lie in the memory of an input: from
    the index of the output in the result, nested tuples as further numbers, to the parameter's
    number and the index in it.
    """

    def __init__(
        self, computations: dict[str, Computation], entry: str, header: str, tables: _Tables
    ) -> None:
        self.computations = computations
        self.entry = computations[entry]
        self.donated = {
            _index(output): (int(number), _index(inside))
            for output, number, inside in _ALIAS.findall(_aliases(header))
        }
        self.grid = ProcessGrid(_count(header, "replica_count"), _count(header, "num_partitions"))
        self._tables = tables

    def computation(self, name: str, caller: HloInstruction) -> Computation:
        """A computation that an instruction calls. Raises ToolError where the text lacks it."""
        if name not in self.computations:
            raise caller.error(f"the text has no computation {name!r}")
        return self.computations[name]

    def called(self, instruction: HloInstruction, attribute: str) -> Computation:
        """The computation that an attribute names. Raises ToolError where there is none."""
        names = instruction.called().get(attribute)
        if not names:
            raise instruction.error(f"no attribute {attribute}")
        return self.computation(names[0], instruction)

    def place(self, instruction: HloInstruction) -> str:
        """`file.py:line` of the user's program, or nothing where the metadata has none."""
        frame = _FRAME.search(instruction.line, instruction.after_opcode)
        if frame:
            return self._tables.place(int(frame.group(1)))
        source = _SOURCE.search(instruction.line, instruction.after_opcode)
        return _short_place(source.group(1), source.group(2) or "") if source else ""

    def origin(self, instruction: HloInstruction) -> str:
        """The place of an instruction; of one that the partitioner added or the combiner made of
        several, the argument that it is of, or the place of the nearest that it takes something of,
        or else that takes its result: `near file.py:line`. Empty where none has one."""
        own = self.place(instruction) or _argument(instruction)
        computation = self._holders.get(instruction.name)
        if own or computation is None:
            return own
        for around in (_operands_of, _users_of):
            for other in _nearest(instruction, computation, around):
                place = self.place(other) or _argument(other)
                if place:
                    return f"near {place}"
        caller = self._callers.get(computation.name)
        place = "" if caller is None else self.origin(caller)
        return f"near {place}" if place and not place.startswith("near ") else place

    @cached_property
    def _holders(self) -> dict[str, Computation]:
        """The computation that each instruction, by name, stands in."""
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
    """`weights['up']`: the argument that the metadata names instead of a path of calls."""
    name = instruction.op_name()
    return name.strip("()") if "/" not in name and _OF_ARGUMENT.match(name) else ""


def _operands_of(instruction: HloInstruction, computation: Computation) -> list[HloInstruction]:
    named = computation.by_name
    return [named[name] for name in instruction.operands if name in named]


def _users_of(instruction: HloInstruction, computation: Computation) -> list[HloInstruction]:
    return computation.users.get(instruction.name, [])


def _nearest(
    instruction: HloInstruction,
    computation: Computation,
    around: Callable[[HloInstruction, Computation], list[HloInstruction]],
) -> Iterator[HloInstruction]:
    """The instructions on one side, the nearest first, as far as _FAR of them."""
    seen, level = {instruction.name}, [instruction]
    while level and len(seen) < _FAR:
        level = [other for each in level for other in around(each, computation)]
        level = [other for other in dict.fromkeys(level) if other.name not in seen]
        seen.update(other.name for other in level)
        yield from level


@dataclass(frozen=True)
class Computation:
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
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def users(self) -> dict[str, list[HloInstruction]]:
        """The instructions that read each one."""
        users: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users


class HloInstruction(hlo_text.Instruction):
    """One instruction with all that its line says."""

    @cached_property
    def operands(self) -> list[str]:  # type: ignore[override]
        """The names of the operands."""
        return [] if self.opcode in ("constant", "parameter") else super().operands

    @cached_property
    def result(self) -> Shape:
        """The shape of the result."""
        return parse_shape(self.shape())

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        return arrays(self.result)

    @property
    def root(self) -> bool:
        """Whether it is the result of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def literal(self) -> str:
        """What stands for operands: the number of a parameter, the value of a constant."""
        return self.line[self.after_opcode : self._end_of_operands()]

    def attribute(self, name: str) -> str:
        """The value of an attribute as printed, up to the comma after it; empty where absent."""
        return self._matched(rf", {name}=(\{{[^}}]*\}}|[^,\s]*)")

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers in an attribute: `dimensions={0,2}`, `index=1`."""
        return tuple(int(number) for number in _NUMBERS.findall(self.attribute(name)))

    @property
    def calls(self) -> list[str]:
        """The computations that it calls, whatever the attribute that names them."""
        return [name for names in self.called().values() for name in names]

    @property
    def target(self) -> str:
        """The target of a custom call."""
        target = _TARGET.search(self.line, self.after_opcode)
        return target.group(1) if target else ""

    @property
    def chain(self) -> str | None:
        """The chain of collective fusions of XLA:TPU that it is of."""
        chain = _CHAIN.search(self.line, self.after_opcode)
        return chain.group(1) if chain else None

    @property
    def cycles(self) -> int | None:
        """What XLA:TPU estimates that it takes, in clock cycles."""
        cycles = _CYCLES.search(self.line, self.after_opcode)
        return int(cycles.group(1)) if cycles else None

    @property
    def trips(self) -> int | None:
        """How often a `while` runs, where XLA wrote it down."""
        trips = _TRIPS.search(self.line, self.after_opcode)
        return int(trips.group(1)) if trips else None

    @property
    def mean_runs(self) -> float | None:
        """How often a `while` or a branch runs in the mean, where the program said so."""
        trips = _MEAN_RUNS.search(self.line, self.after_opcode)
        return parsed_mean_runs(trips.group(1)) if trips else None

    def error(self, message: str) -> ToolError:
        """An error that names the instruction."""
        return ToolError(f"HLO instruction {self.name} ({self.opcode}): {message}")

    def _matched(self, pattern: str) -> str:
        attribute = re.compile(pattern).search(self.line, self.after_opcode)
        return attribute.group(1) if attribute else ""


@dataclass(frozen=True)
class _Tables:
    """The rows of each table by number."""

    rows: dict[str, dict[int, str]]

    def place(self, frame: int) -> str:
        """`file.py:line` of a stack_frame_id, or nothing where the tables lack it."""
        location = self._field("StackFrames", frame, "file_location_id")
        if location is None:
            return ""
        file = self._field("FileLocations", location, "file_name_id")
        line = self._field("FileLocations", location, "line")
        name = self.rows["FileNames"].get(file or 0, "").strip('"')
        return _short_place(name, str(line)) if name else ""

    def _field(self, table: str, row: int, name: str) -> int | None:
        number = dict(_FIELD.findall(self.rows[table].get(row, ""))).get(name)
        return None if number is None else int(number)


def _short_place(file: str, line: str) -> str:
    """`file.py:line`, the folders left out."""
    return f"{file.rpartition('/')[2]}:{line}" if line else file.rpartition("/")[2]


def parse_module(text: str) -> HloModule:
    """Raises ToolError for text that is no scheduled module."""
    header = text.lstrip()[:1_000_000].partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ToolError("not the text of a scheduled HLO module")
    computations: dict[str, Computation] = {}
    rows: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    table: dict[int, str] = {}
    current: list[HloInstruction] | None = None
    name = entry = ""
    for line in text.splitlines():
        if line[:1] in (" ", "\t"):
            instruction = _instruction(line) if current is not None else None
            if current is not None and instruction is not None:
                current.append(instruction)
        elif line[:1] == "}":
            if current:
                computations[name] = Computation(name, tuple(_launched(current)))
            current = None
        elif opening := hlo_text.COMPUTATION.match(line):
            name, current = opening.group(2), []
            entry = name if opening.group(1) else entry
        elif row := _TABLE_ROW.match(line):
            table[int(row.group(1))] = row.group(2)
        else:
            table = rows.get(line.strip(), {})
    if entry not in computations:
        raise ToolError("the HLO text has no ENTRY computation")
    return HloModule(computations, entry, header, _Tables(rows))


def _instruction(line: str) -> HloInstruction | None:
    name = _INSTRUCTION.match(line)
    opcode = hlo_text.OPCODE.search(line, name.end() - 1) if name else None
    if name is None or opcode is None:
        return None
    return HloInstruction(name.group(2), opcode.group(1), line, opcode.end())


def _launched(instructions: list[HloInstruction]) -> Iterator[HloInstruction]:
    """The instructions, with the two steps of a SparseCore's start as one where it is launched.

    XLA:TPU first loads a program and hands it its operands later; with `start` of calls @f:

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
            yield _launch(program_of[instruction.name], instruction)
        elif instruction.name not in programs:
            yield instruction


def _launch(program: HloInstruction, update: HloInstruction) -> HloInstruction:
    """The start at the place of the update: its result and operands, the program's attributes."""
    result = update.line[: update.after_opcode].rpartition(" ")[0]
    operands = ", ".join(f"%{name}" for name in update.operands[1:])
    head = f"{result} {program.opcode}("
    attributes = _ALIASING.sub("", program.line[program.after_opcode :].partition(")")[2])
    line = f"{head}{operands}){attributes}"
    return HloInstruction(update.name, program.opcode, line, len(head))


def _count(header: str, name: str) -> int:
    count = re.search(rf", {name}=(\d+)", header)
    return int(count.group(1)) if count else 1


def _aliases(header: str) -> str:
    start = header.find("input_output_alias={")
    end = header.find(" }", start)
    return header[start:end] if start >= 0 else ""


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_STABLEHLO_TYPES = {
    "pred": "i1",
    **{f"s{bits}": f"i{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"ui{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    "c64": "complex<f32>",
    "c128": "complex<f64>",
}


@dataclass(frozen=True)
class Array:
    """An array: its element type in HLO's spelling, where it lies and how.

    `minor_to_major` is empty where the text has no layout. `tiles` are those of a TPU's layout.
    """

    element_type: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = DEVICE_MEMORY

    @cached_property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @cached_property
    def bits(self) -> int:
        """The bits of an element; none of a token."""
        bits = _BITS.search(self.element_type)
        return 8 if self.element_type == "pred" else int(bits.group()) if bits else 0

    @cached_property
    def bytes(self) -> int:
        """The bytes of all elements, close together."""
        return -(-self.elements * self.bits // 8)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The dimensions from major to minor, the last filled up to whole tiles."""
        dims = [self.dims[d] for d in reversed(self.minor_to_major)] or list(self.dims)
        tile = self.tiles[0] if self.tiles else ()
        dims = [1] * (len(tile) - len(dims)) + dims
        for place, size in enumerate(reversed(tile), 1):
            dims[-place] = -(-dims[-place] // size) * size
        return tuple(dims)

    @cached_property
    def padded_bytes(self) -> int:
        """The bytes that it takes in memory."""
        return -(-math.prod(self.padded) * self.bits // 8)


@dataclass(frozen=True, slots=True)
class TupleShape:
    """A tuple of shapes."""

    elements: tuple[Shape, ...]


type Shape = Array | TupleShape


@functools.cache
def parse_shape(text: str) -> Shape:
    """Raises ValueError for text that is no shape."""
    if text.startswith("("):
        return TupleShape(tuple(parse_shape(element) for element in split_tuple(text)))
    array = _ARRAY.match(text)
    if array is None:
        raise ValueError(f"not a shape: {text!r}")
    element_type, dims, order, rest = array.groups()
    tiles = _TILES.search(rest or "")
    space = _SPACE.search(rest or "")
    return Array(
        element_type,
        tuple(int(re.sub(r"\D", "", size)) for size in dims.split(",") if size),
        tuple(int(d) for d in (order or "").split(",") if d),
        _tiles(tiles.group(1)) if tiles else (),
        int(space.group(1)) if space else DEVICE_MEMORY,
    )


def _tiles(text: str) -> tuple[tuple[int, ...], ...]:
    """`(8,128)(2,1)`; a `*`, which merges a dimension with the next, counts as 1."""
    return tuple(
        tuple(int(size) if size.strip().isdigit() else 1 for size in tile.split(","))
        for tile in text.strip("()").split(")(")
    )


def split_tuple(shape: str) -> list[str]:
    """The elements of a tuple shape as printed; the shape itself where it is none."""
    if not shape.startswith("("):
        return [shape]
    elements: list[str] = []
    depth, start = 0, 1
    for index, character in enumerate(shape):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if (character == "," and depth == 1) or depth == 0:
            element = _COMMENT.sub("", shape[start:index]).strip()
            if element:
                elements.append(element)
            start = index + 1
    return elements


def arrays(shape: Shape) -> tuple[Array, ...]:
    """The arrays in a shape, tuples flattened."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(array for element in shape.elements for array in arrays(element))


def stablehlo_type(element_type: str) -> str:
    """HLO's `s32` as StableHLO's `i32`, `f8e4m3fn` as `f8E4M3FN`."""
    if element_type in _STABLEHLO_TYPES:
        return _STABLEHLO_TYPES[element_type]
    small_float = element_type[0] == "f" and "e" in element_type
    return "f" + element_type[1:].upper() if small_float else element_type
