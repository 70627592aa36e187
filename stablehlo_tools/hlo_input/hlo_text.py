"""HLO text as XLA prints it, and rewritten to the forms that XLA's converter accepts.

This module reads the header and the lines of the instructions. XLA's parser, in `converter`, reads
the text itself, but does not accept all that XLA prints. So the text is rewritten first, line by
line. Scheduled text has collectives with several operands, made by XLA's combiners. StableHLO has
no such permute or reduce_scatter, and the converter rejects all asynchronous ones. Each becomes one
collective per operand, in the same place:

    %s = ((f32[4], f32[8]), (f32[8], f32[16])) all-gather-start(%a, %b), ...
    %d = (f32[8], f32[16]) all-gather-done(%s)
      ==>
    %s.part0 = ((f32[4]), f32[8]) all-gather-start(%a), ...
    %s.part1 = ((f32[8]), f32[16]) all-gather-start(%b), ...
    %d.part0 = f32[8] all-gather-done(%s.part0)
    %d.part1 = f32[16] all-gather-done(%s.part1)
    %d = (f32[8], f32[16]) tuple(%d.part0, %d.part1)

An all-to-all of tuples sends operand i to member i; it becomes an all-to-all of a concatenation.
`output_to_operand_aliasing` of collectives is dropped, because XLA prints but does not parse it.
XLA:TPU mixes precisions. An operand with another precision than the result gets a convert, and a
reduction gets the precision of its computation. An all_reduce gets a copy of its computation in its
own precision.

Pure Python; linear in the text. An instruction that spans several lines is not rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from stablehlo_tools.hlo_input.async_forms import COLLECTIVES
from stablehlo_tools.hlo_input.instructions import (
    COMPUTATION,
    HloInstruction,
    parse_computations,
    parse_instruction,
)
from stablehlo_tools.hlo_input.shapes import COMMENT, closing_bracket, split_list, split_tuple

_HEADER = "HloModule"
_LEADING_COMMENT = re.compile(r"\s*(?://[^\n]*\n|/\*.*?\*/|\n)", re.DOTALL)


def is_hlo_text(data: bytes) -> bool:
    """Returns True if a file is HLO text: its first word, after comments, is `HloModule`."""
    start = data[:65_536].decode(errors="replace")
    at = 0
    while (comment := _LEADING_COMMENT.match(start, at)) is not None:
        at = comment.end()
    return start[at:].lstrip().startswith(_HEADER)


@dataclass(frozen=True)
class HloText:
    """HLO text and the facts that its header states.

    `name` is the file's name, for locations.
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
        """True if instructions are in the order in which a device issues them."""
        return re.search(r"\bis_scheduled=true\b", self.header) is not None

    @property
    def replicas(self) -> int | None:
        """The number of replicas; None if the header does not state it."""
        return self._count("replica_count")

    @property
    def partitions(self) -> int | None:
        """The number of partitions; None if the header does not state it."""
        return self._count("num_partitions")

    @property
    def is_of_tpu(self) -> bool:
        """True if XLA:TPU wrote the text: only its layouts have tiles."""
        return _TILE in self.text

    @cached_property
    def _normalized(self) -> tuple[str, tuple[int, ...]]:
        """The rewritten text, and for each of its lines the line of the original, from 1."""
        lines: list[str] = []
        origins: list[int] = []
        split_starts: dict[str, int] = {}
        is_mixed = _TILE in self.text
        shapes: dict[str, tuple[str, str]] = {}
        reducers = _Reducers()
        for number, line in enumerate(self.text.splitlines(), start=1):
            written = [line]
            if is_mixed and not line.startswith(" "):
                reducers.begin(line, len(lines))
            one = parse_instruction(line)
            if one is not None and (shape := _SHAPE.match(one.shape)) is not None:
                shapes[one.name] = (shape[1], shape[2])
            if one is not None and _SUFFIX.sub("", one.opcode) in _DIVISIBLE:
                written = _divide(line, split_starts)
                if is_mixed:
                    written = [reducers.retype(each, lines, origins) for each in written]
            elif one is not None and is_mixed:
                written = _unify_types(one, shapes, reducers.applied_computation(line, lines)[2])
            lines += written
            origins += [number] * len(written)
        end = "\n" if self.text.endswith("\n") else ""  # keeps the positions in XLA's errors right
        return "\n".join(lines) + end, tuple(origins)

    @property
    def converted(self) -> str:
        """The text, rewritten to the forms that XLA's converter accepts."""
        return self._normalized[0]

    @property
    def origins(self) -> tuple[int, ...]:
        """For each line of `converted`, the line of the original text, from 1."""
        return self._normalized[1]

    @cached_property
    def _computations(self) -> list[tuple[str, list[HloInstruction]]]:
        return list(parse_computations(self.converted)[0].items())

    def place_of(self, computation: int, instruction: int) -> tuple[str, int]:
        """Returns the name of a computation and the line of one of its instructions.

        Both arguments count from 0 in the order of the text. Returns "" and 0 for an unknown
        instruction.
        """
        if computation < len(self._computations):
            name, instructions = self._computations[computation]
            if instruction < len(instructions):
                return name, self.origins[instructions[instruction].number - 1]
        return "", 0

    def line_of_name(self, name: str) -> int:
        """Returns the first line that defines an instruction of this name; 0 if none does."""
        return self._first_line(rf"(?m)^\s*(?:ROOT\s+)?%?{re.escape(name)}\s+=\s")

    def elided_constant(self) -> int:
        """Returns the line of the first constant with elided elements; 0 if there is none."""
        return self._first_line(r"\bconstant\(\{\.\.\.\}\)")

    def control_dependence(self) -> int:
        """Returns the line of the first instruction with control predecessors; 0 if none has."""
        return self._first_line(r"\bcontrol-predecessors=\{")

    def _count(self, name: str) -> int | None:
        count = re.search(rf"\b{name}=(\d+)", self.header)
        return None if count is None else int(count[1])

    def _first_line(self, pattern: str) -> int:
        found = re.search(pattern, self.text)
        return 0 if found is None else self.text.count("\n", 0, found.start()) + 1


_ALIASING = "output_to_operand_aliasing="
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_SUFFIX = re.compile("-(?:start|done)$")
_TO_APPLY = re.compile(r"\bto_apply=(%[\w.-]+)")
_TILE = ":T("  # in layouts of XLA:TPU, which mixes precisions
_FLOATS = frozenset({"bf16", "f16", "f32", "f64"})

# HLO's names of ops whose operands and result must have one type in StableHLO; not exhaustive.
_OF_ONE_TYPE = frozenset(
    {
        "abs", "add", "broadcast", "clamp", "concatenate", "copy", "divide", "dynamic-slice",
        "dynamic-update-slice", "exponential", "gather", "log", "maximum", "minimum", "multiply",
        "negate", "pad", "power", "reshape", "reverse", "rsqrt", "select", "slice", "sqrt",
        "subtract", "tanh", "transpose",
    }
)  # fmt: skip
_REDUCTIONS = frozenset({"reduce", "reduce-window"})
_SINGLE = frozenset({"collective-permute", "reduce-scatter"})  # of one operand in StableHLO
_DIVISIBLE = COLLECTIVES - {"ragged-all-to-all"}  # its operands are parts of one exchange


@dataclass
class _Reducers:
    """The computations so far, for reductions of XLA:TPU whose computation has another precision.

    In StableHLO the computation of an all_reduce decides its element type. So a reduction of bf16
    by a computation in f32 gets a copy of it in bf16. XLA prints a computation before its users.
    """

    begins: dict[str, int] = field(default_factory=dict)
    holder: int = 0  # the line at which the computation of the current line begins
    copies: set[str] = field(default_factory=set)

    def begin(self, line: str, at: int) -> None:
        opened = COMPUTATION.match(line)
        if opened is not None:
            self.begins[f"%{opened[2]}"] = self.holder = at

    def applied_computation(self, line: str, lines: list[str]) -> tuple[str, list[str], set[str]]:
        """Returns name, lines and float types of the computation that a line applies, if any."""
        applied = _TO_APPLY.search(line)
        begin = None if applied is None else self.begins.get(applied.group(1))
        if applied is None or begin is None:
            return "", [], set()
        ends = (at for at in range(begin, len(lines)) if lines[at].startswith("}"))
        body = lines[begin : next(ends, begin) + 1]
        return applied.group(1), body, {e for e, _ in _SHAPE.findall("".join(body))} & _FLOATS

    def retype(self, line: str, lines: list[str], origins: list[int]) -> str:
        """Returns a collective's line, with a computation that has the collective's precision.

        A new copy of the computation is inserted into `lines`, before the one with the collective.
        """
        name, body, found = self.applied_computation(line, lines)
        shape = _SHAPE.search(line)
        element = "" if shape is None else shape.group(1)
        if element not in _FLOATS or found <= {element}:
            return line
        own = f"{name}.{element}"
        if own not in self.copies:
            self.copies.add(own)
            other = re.compile(rf"\b(?:{'|'.join(sorted(found))})(?=\[)")
            copied = [other.sub(element, text) for text in body]
            copied[0] = copied[0].replace(name, own, 1)
            begin = self.begins[name]
            lines[self.holder : self.holder] = copied
            origins[self.holder : self.holder] = origins[begin : begin + len(body)]
            self.holder += len(copied)
        return re.sub(rf"(?<=\bto_apply=){re.escape(name)}(?![\w.-])", own, line)


def _unify_types(
    one: HloInstruction, shapes: dict[str, tuple[str, str]], computed: set[str]
) -> list[str]:
    """Returns the lines of an instruction, with converts for operands of another element type.

    Applies to ops whose operands and result must have one type. A reduction gets the type of its
    computation, and its result is converted. `computed` is the set of float types in that
    computation. `shapes` has the element type and the dimensions of every array so far, by name.
    """
    shape = _SHAPE.match(one.shape)
    if shape is None:
        return [one.line]
    element = wanted = shape[1]
    if one.opcode in _REDUCTIONS and len(computed) == 1:
        wanted = min(computed)
    elif one.opcode not in _OF_ONE_TYPE:
        return [one.line]
    if element not in _FLOATS or one.end_of_operands == len(one.line):
        return [one.line]
    operands = split_list(COMMENT.sub("", one.literal))
    lines: list[str] = []
    for number, operand in enumerate(operands):
        value = operand.split()[-1]
        given, sizes = shapes.get(value.removeprefix("%"), ("", ""))
        if given in _FLOATS and given != wanted:
            operands[number] = f"{one.printed_name}.given{number}"
            lines.append(_define(one, operands[number], f"{wanted}[{sizes}] convert({value})"))
    call = f"{one.opcode}({', '.join(operands)}){one.attributes}"
    if wanted != element:
        made = f"{one.printed_name}.made"
        lines.append(_define(one, made, f"{wanted}[{shape[2]}] {call}"))
        call = f"convert({made})"
    return [*lines, _define(one, one.printed_name, f"{one.shape} {call}")] if lines else [one.line]


def _divide(line: str, split_starts: dict[str, int]) -> list[str]:
    """Replaces a collective with several operands, or its done, with one for each operand.

    Any other collective keeps its line, without its aliasing. `split_starts` maps the name of each
    divided start to its number of operands.
    """
    at = line.find(_ALIASING)
    if at >= 0:
        start, end = line.rfind(",", 0, at), closing_bracket(line, at + len(_ALIASING))
        line = line if end is None or start < 0 else line[:start] + line[end + 1 :]
    one = parse_instruction(COMMENT.sub("", line))
    if one is None or one.end_of_operands == len(one.line):
        return [line]
    operands = split_list(one.literal)
    is_start, shapes = one.opcode.endswith("-start"), split_tuple(one.shape)
    if one.opcode.endswith("-done"):
        start = operands[0].split()[-1] if operands else ""
        count = split_starts.get(start.removeprefix("%"), 0)
        operands = [f"{start}.part{i}" for i in range(count)]
    elif len(operands) < 2:
        return [line]
    elif is_start and one.shape.startswith("(("):  # else an all-reduce-start, of results alone
        given, made = map(split_tuple, shapes[:2])
        shapes = [f"(({a}), {b})" for a, b in zip(given, made, strict=False)]
    elif one.opcode == "all-to-all":
        return _one_exchange(one, operands) or [line]
    elif not is_start and one.opcode not in _SINGLE:
        return [line]
    if not operands or len(operands) != len(shapes):
        return [line]
    names = [f"{one.printed_name}.part{i}" for i in range(len(operands))]
    if is_start:
        split_starts[one.name] = len(names)
    parts = [
        _define(one, name, f"{shape} {one.opcode}({operand}){one.attributes}")
        for name, shape, operand in zip(names, shapes, operands, strict=True)
    ]
    return parts if is_start else [*parts, _join_parts(one, names)]


def _one_exchange(one: HloInstruction, operands: list[str]) -> list[str]:
    """Replaces an all-to-all that sends operand i to member i with one of their concatenation.

    Returns an empty list if its shape is not a tuple of as many arrays.
    """
    shapes = [_SHAPE.fullmatch(shape.partition("{")[0]) for shape in split_tuple(one.shape)]
    count = len(operands)
    if len(shapes) != count or shapes[0] is None:
        return []
    element, sizes = shapes[0].group(1), [s for s in shapes[0].group(2).split(",") if s]
    part = f"{element}[{','.join(['1', *sizes])}]"
    whole = f"{element}[{','.join([str(count), *sizes])}]"
    plain = f"{element}[{','.join(sizes)}]"
    ranges = "".join(f",[0:{size}]" for size in sizes)
    n = one.printed_name
    listed = ", ".join(f"{n}.given{i}" for i in range(count))
    exchanged = f"all-to-all({n}.joined){one.attributes}, dimensions={{0}}"
    lines = [
        *(
            _define(one, f"{n}.given{i}", f"{part} reshape({operand})")
            for i, operand in enumerate(operands)
        ),
        _define(one, f"{n}.joined", f"{whole} concatenate({listed}), dimensions={{0}}"),
        _define(one, f"{n}.exchanged", f"{whole} {exchanged}"),
    ]
    for i in range(count):
        cut = f"{part} slice({n}.exchanged), slice={{[{i}:{i + 1}]{ranges}}}"
        lines.append(_define(one, f"{n}.cut{i}", cut))
        lines.append(_define(one, f"{n}.part{i}", f"{plain} reshape({n}.cut{i})"))
    return [*lines, _join_parts(one, [f"{n}.part{i}" for i in range(count)])]


def _join_parts(one: HloInstruction, names: list[str]) -> str:
    return _define(one, one.printed_name, f"{one.shape} tuple({', '.join(names)})")


def _define(one: HloInstruction, name: str, value: str) -> str:
    """Returns a line that defines `name` as `value`; only the instruction's own name stays ROOT."""
    indent = one.line[: len(one.line) - len(one.line.lstrip())]
    return f"{indent}{'ROOT ' if one.is_root and name == one.printed_name else ''}{name} = {value}"
