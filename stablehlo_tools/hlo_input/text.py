"""HLO text as people have it, and in the forms that XLA's converter takes.

What its header states and where each instruction stands is read here; the text itself is read by
XLA's parser, in `converter`, which does not take all that XLA prints. So it is rewritten first,
line by line. Scheduled text has collectives of several operands, which XLA's combiners made;
StableHLO has no such permute or reduce_scatter, and the converter takes none at all that is
asynchronous. They become one for each operand, in the same place:

    %s = ((f32[4], f32[8]), (f32[8], f32[16])) all-gather-start(%a, %b), ...
    %d = (f32[8], f32[16]) all-gather-done(%s)
      ==>
    %s.part0 = ((f32[4]), f32[8]) all-gather-start(%a), ...
    %s.part1 = ((f32[8]), f32[16]) all-gather-start(%b), ...
    %d.part0 = f32[8] all-gather-done(%s.part0)
    %d.part1 = f32[16] all-gather-done(%s.part1)
    %d = (f32[8], f32[16]) tuple(%d.part0, %d.part1)

An all-to-all of tuples, whose operand i goes to member i, becomes one of a concatenation.
`output_to_operand_aliasing` of collectives goes, which XLA prints and does not parse. XLA:TPU mixes
precisions: operands of another precision than the result get a convert, a reduction has the
precision of its computation, and an all_reduce gets a copy of its computation in its own.

Pure Python; linear in the text. An instruction that goes on over several lines stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

_HEADER = "HloModule"
_LEADING_COMMENT = re.compile(r"\s*(?://[^\n]*\n|/\*.*?\*/|\n)", re.DOTALL)
_SCHEDULED = re.compile(r"\bis_scheduled=true\b")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_COMPUTATION = re.compile(r"(?:ENTRY\s+)?%?([\w.-]+)\s*(?:\(.*)?\{\s*(?:/\*.*\*/)?\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=]+)\s+=\s")
_ELIDED = re.compile(r"\bconstant\(\{\.\.\.\}\)")
_CONTROL = re.compile(r"\bcontrol-predecessors=\{")


def is_hlo_text(data: bytes) -> bool:
    """Whether a file's bytes are HLO text: its first word, after comments, is `HloModule`."""
    start = data[:65_536].decode(errors="replace")
    at = 0
    while (comment := _LEADING_COMMENT.match(start, at)) is not None:
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
        return _normalized(self.text)

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


_COMMENT = re.compile(r"/\*.*?\*/")
_COLLECTIVE = re.compile(
    r"\s(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast)"
    r"(-start|-done|)\("
)
_HEAD = re.compile(r"(\s*)(ROOT\s+)?(%?[^\s=]+)\s+=\s+")
_ALIASING = "output_to_operand_aliasing="
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_TO_APPLY = re.compile(r"\bto_apply=(%[\w.-]+)")
_OPCODE = re.compile(r"\s([a-z][a-z0-9-]*)\(")
_TILE = ":T("  # of layouts of XLA:TPU, which computes in several precisions
_FLOATS = frozenset({"bf16", "f16", "f32", "f64"})

# HLO's names of ops whose operands and result StableHLO wants of one type; not all that there are.
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


@dataclass(frozen=True)
class _Instruction:
    """The parts of one line: `%name = shape opcode(operands), attributes`."""

    indent: str
    root: str
    name: str
    shape: str
    opcode: str
    suffix: str
    operands: tuple[str, ...]
    attributes: str  # with the comma before them

    def line(self, name: str, shape: str, operands: str, *, is_root: bool = False) -> str:
        """A line like this one."""
        root = self.root if is_root else ""
        return (
            f"{self.indent}{root}{name} = {shape} {self.opcode}{self.suffix}({operands})"
            f"{self.attributes}"
        )

    def other(self, name: str, shape: str, rest: str, *, is_root: bool = False) -> str:
        """A line of another opcode in the same place."""
        return f"{self.indent}{self.root if is_root else ''}{name} = {shape} {rest}"


def _normalized(text: str) -> tuple[str, tuple[int, ...]]:
    """The text that is converted, and for each line of it the line of the given text, from 1."""
    lines: list[str] = []
    origins: list[int] = []
    split_starts: dict[str, int] = {}
    is_mixed = _TILE in text
    shapes: dict[str, tuple[str, str]] = {}
    reducers = _Reducers()
    for number, line in enumerate(text.splitlines(), start=1):
        written = [line]
        if is_mixed and not line.startswith(" "):
            reducers.begin(line, len(lines))
        if _COLLECTIVE.search(line):
            written = _written(line, split_starts)
            if is_mixed:
                written = [reducers.retype(each, lines, origins) for each in written]
        elif is_mixed:
            written = _of_one_type(line, shapes, reducers.applied(line, lines)[2])
        lines += written
        origins += [number] * len(written)
    end = "\n" if text.endswith("\n") else ""  # XLA tells where it stopped
    return "\n".join(lines) + end, tuple(origins)


@dataclass
class _Reducers:
    """The computations so far, for reductions of XLA:TPU whose computation has another precision.

    StableHLO takes the element type of an all_reduce from its computation, so a reduction of bf16
    by a computation of f32 gets a copy of it in bf16. XLA prints a computation before its users.
    """

    begins: dict[str, int] = field(default_factory=dict)
    holder: int = 0  # the line at which the computation of the current line begins
    copies: set[str] = field(default_factory=set)

    def begin(self, line: str, at: int) -> None:
        opened = _COMPUTATION.match(line)
        if opened is not None:
            self.begins[f"%{opened.group(1)}"] = self.holder = at

    def applied(self, line: str, lines: list[str]) -> tuple[str, list[str], set[str]]:
        """The name, the lines and the float types of the computation that a line applies."""
        applied = _TO_APPLY.search(line)
        begin = None if applied is None else self.begins.get(applied.group(1))
        if applied is None or begin is None:
            return "", [], set()
        ends = (at for at in range(begin, len(lines)) if lines[at].startswith("}"))
        body = lines[begin : next(ends, begin) + 1]
        return applied.group(1), body, {e for e, _ in _SHAPE.findall("".join(body))} & _FLOATS

    def retype(self, line: str, lines: list[str], origins: list[int]) -> str:
        """A collective's line with a computation of its own precision.

        A new copy goes into `lines`, before the computation that holds the collective.
        """
        name, body, found = self.applied(line, lines)
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


def _of_one_type(line: str, shapes: dict[str, tuple[str, str]], computed: set[str]) -> list[str]:
    """An instruction that StableHLO wants of one type, with a convert for each operand of another.

    A reduction has the type of its computation, of whose float types `computed` is the set, and is
    converted afterwards. `shapes` has the element type and the dimensions of every array so far, by
    name.
    """
    head = _HEAD.match(line)
    shape = None if head is None else _SHAPE.match(line, head.end())
    if head is None or shape is None:
        return [line]
    indent, root, name = head.group(1), head.group(2) or "", head.group(3)
    shapes[name.removeprefix("%")] = (shape.group(1), shape.group(2))
    opcode = _OPCODE.search(line, shape.end())
    end = None if opcode is None else _closing(line, opcode.end() - 1)
    if opcode is None or end is None or shape.group(1) not in _FLOATS:
        return [line]
    wanted = shape.group(1)
    if opcode.group(1) in _REDUCTIONS and len(computed) == 1:
        wanted = min(computed)
    elif opcode.group(1) not in _OF_ONE_TYPE:
        return [line]
    operands = _split(_COMMENT.sub("", line[opcode.end() : end]))
    converts: list[str] = []
    for number, operand in enumerate(operands):
        value = operand.split()[-1]
        element, sizes = shapes.get(value.removeprefix("%"), ("", ""))
        if element in _FLOATS and element != wanted:
            operands[number] = f"{name}.given{number}"
            converts.append(f"{indent}{operands[number]} = {wanted}[{sizes}] convert({value})")
    given = ", ".join(operands)
    if wanted != shape.group(1):
        made = f"{wanted}[{shape.group(2)}] {opcode.group(1)}({given}){line[end + 1 :]}"
        whole = line[head.end() : opcode.start()]
        after = f"{indent}{root}{name} = {whole} convert({name}.made)"
        return [*converts, f"{indent}{name}.made = {made}", after]
    return [*converts, f"{line[: opcode.end()]}{given}{line[end:]}"] if converts else [line]


def _written(line: str, split_starts: dict[str, int]) -> list[str]:
    instruction = _read(_without_aliasing(line))
    if instruction is None:
        return [line]
    if instruction.suffix == "-done":
        return _done(instruction, split_starts)
    if len(instruction.operands) < 2:
        return [_without_aliasing(line)]
    if instruction.opcode == "all-to-all":
        return _one_exchange(instruction) if not instruction.suffix else [line]
    if instruction.suffix == "-start":
        return _starts(instruction, split_starts)
    return _parts(instruction) if instruction.opcode in _SINGLE else [_without_aliasing(line)]


def _parts(one: _Instruction) -> list[str]:
    """A synchronous collective of several operands."""
    shapes = _elements(one.shape)
    names = [f"{one.name}.part{i}" for i in range(len(one.operands))]
    if len(shapes) != len(names):
        return [one.line(one.name, one.shape, ", ".join(one.operands), is_root=True)]
    parts = zip(names, shapes, one.operands, strict=True)
    return [*(one.line(*part) for part in parts), _gathered(one, names)]


def _starts(one: _Instruction, split_starts: dict[str, int]) -> list[str]:
    """The start of an asynchronous collective of several operands."""
    whole = one.line(one.name, one.shape, ", ".join(one.operands), is_root=True)
    elements = _elements(one.shape)
    count = len(one.operands)
    if elements and elements[0].startswith("("):
        given, made = _elements(elements[0]), _elements(elements[1])
        if len(given) != count or len(made) != count:
            return [whole]
        shapes = [f"(({a}), {b})" for a, b in zip(given, made, strict=True)]
    elif len(elements) == count:  # an all-reduce-start, whose shape is that of its results
        shapes = elements
    else:
        return [whole]
    split_starts[one.name.removeprefix("%")] = count
    names = [f"{one.name}.part{i}" for i in range(count)]
    return [one.line(*part) for part in zip(names, shapes, one.operands, strict=True)]


def _done(one: _Instruction, split_starts: dict[str, int]) -> list[str]:
    """The end of a collective whose start was divided."""
    start = one.operands[0].split()[-1] if one.operands else ""
    count = split_starts.get(start.removeprefix("%"))
    if count is None:
        return [one.line(one.name, one.shape, ", ".join(one.operands), is_root=True)]
    names = [f"{one.name}.part{i}" for i in range(count)]
    starts = [f"{start}.part{i}" for i in range(count)]
    parts = zip(names, _elements(one.shape), starts, strict=True)
    return [*(one.line(*part) for part in parts), _gathered(one, names)]


def _one_exchange(one: _Instruction) -> list[str]:
    """An all-to-all whose operand i goes to member i, as one of their concatenation."""
    shapes = [_SHAPE.fullmatch(shape.partition("{")[0]) for shape in _elements(one.shape)]
    count = len(one.operands)
    if len(shapes) != count or shapes[0] is None:
        return [one.line(one.name, one.shape, ", ".join(one.operands), is_root=True)]
    element, sizes = shapes[0].group(1), [s for s in shapes[0].group(2).split(",") if s]
    part = f"{element}[{','.join(['1', *sizes])}]"
    whole = f"{element}[{','.join([str(count), *sizes])}]"
    plain = f"{element}[{','.join(sizes)}]"
    ranges = "".join(f",[0:{size}]" for size in sizes)
    n = one.name
    listed = ", ".join(f"{n}.given{i}" for i in range(count))
    lines = [
        one.other(f"{n}.given{i}", part, f"reshape({operand})")
        for i, operand in enumerate(one.operands)
    ]
    lines.append(one.other(f"{n}.joined", whole, f"concatenate({listed}), dimensions={{0}}"))
    lines.append(f"{one.line(f'{n}.exchanged', whole, f'{n}.joined')}, dimensions={{0}}")
    for i in range(count):
        cut = f"slice({n}.exchanged), slice={{[{i}:{i + 1}]{ranges}}}"
        lines.append(one.other(f"{n}.cut{i}", part, cut))
        lines.append(one.other(f"{n}.part{i}", plain, f"reshape({n}.cut{i})"))
    return [*lines, _gathered(one, [f"{n}.part{i}" for i in range(count)])]


def _gathered(one: _Instruction, names: list[str]) -> str:
    return one.other(one.name, one.shape, f"tuple({', '.join(names)})", is_root=True)


def _read(line: str) -> _Instruction | None:
    line = _COMMENT.sub("", line)
    head, opcode = _HEAD.match(line), _COLLECTIVE.search(line)
    if head is None or opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    if end is None:
        return None
    return _Instruction(
        head.group(1),
        head.group(2) or "",
        head.group(3),
        line[head.end() : opcode.start()].strip(),
        opcode.group(1),
        opcode.group(2),
        tuple(_split(line[opcode.end() : end])),
        line[end + 1 :].rstrip(),
    )


def _elements(shape: str) -> list[str]:
    """The shapes of a tuple's elements; none of what is no tuple."""
    return _split(shape[1:-1]) if shape.startswith("(") and shape.endswith(")") else []


def _without_aliasing(line: str) -> str:
    at = line.find(_ALIASING)
    if at < 0:
        return line
    end = _closing(line, at + len(_ALIASING))
    start = line.rfind(",", 0, at)
    return line if end is None or start < 0 else line[:start] + line[end + 1 :]


def _split(text: str) -> list[str]:
    """The parts between commas that no bracket encloses."""
    parts: list[str] = []
    depth = begin = 0
    for at, letter in enumerate(text):
        if letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _closing(line: str, at: int) -> int | None:
    """Where the bracket that opens at a place closes; None: on another line."""
    depth = 0
    for position in range(at, len(line)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(line[position], 0)
        if not depth:
            return position
    return None
