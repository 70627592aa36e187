"""The CHECK lines of a module: the required text, its order, and the values in it.

%3:2 = stablehlo.optimization_barrier %arg0, %2 : tensor<4xf32>, !stablehlo.token
%4 = "stablehlo.all_gather"(%3#0) …
==>
CHECK-NEXT: %[[BARRIER:[^ ,)]+]]:2 = stablehlo.optimization_barrier %[[ARG]], %[[AFTER_ALL]] :
CHECK-NEXT: %[[ALL_GATHER:[^ ,)]+]] = "stablehlo.all_gather"(%[[BARRIER]]#0) …

Adjacent checked lines have a `CHECK-NEXT`. Elsewhere there are unchecked lines between two checks.
Those that the pattern of the second would match are checked too, so that the test does not depend
on which line FileCheck finds first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, CONSTANT, WHILE
from stablehlo_tools.dialect.traits import TERMINATORS
from stablehlo_tools.ir.values import value_text
from stablehlo_tools.ir.walk import FUNCTION, MESH, symbol_name
from stablehlo_tools.testing.check_patterns import (
    Gap,
    NamedReference,
    Pattern,
    Piece,
    Text,
    Variable,
    anonymous,
    as_regex,
    pattern_lines,
    without_middles,
)
from stablehlo_tools.testing.shown_ops import (
    LineRole,
    Selection,
    ShownLine,
    is_in_reduction,
    is_noise,
    printed_lines,
    visibility,
)

_LONG = 80  # characters of a constant
_CUT, _CUT_FROM_ARGUMENT = "\x00", "\x01"
_MARK = f"[{_CUT}{_CUT_FROM_ARGUMENT}]"
_TOKENS = re.compile(
    rf'(?P<string>"(?:[^"\\]|\\.)*")|(?P<cut>{_MARK})|'
    r"(?P<channel>(?<=channel_handle) = #\S+ = \d+, |(?<=channel_id) = \d+)|"
    r"(?P<sigil>[%@])(?P<name>[\w$.-]+)(?P<number>#\d+)?"
)
_SHORT_NAMES = {"optimization_barrier": "BARRIER", "partition_id": "PARTITION"}


@dataclass
class _CheckedLine:
    """A checked line and its pattern."""

    line: int
    suffix: str  # of the directive: "", -LABEL, -DAG
    pieces: list[Piece]


@dataclass(frozen=True)
class Checks:
    """`lines` are directives, without their comment leader."""

    lines: list[str]
    has_gaps: bool  # True if a collective could be added without failing a check


def check_lines(module: ir.Module, *, everything: bool) -> Checks:
    """Returns the directives for a module: of every op, or of communication and its order."""
    lines = printed_lines(module)
    writer = _CheckWriter(Selection.from_module(module, everything), _symbol_variables(module))
    for line in lines:
        writer.add(line)
    _name_variables(writer.checks)
    return _directives(writer.checks, lines)


def _symbol_variables(module: ir.Module) -> dict[str, Variable | None]:
    """Maps symbols whose names jax chooses to variables; None for meshes that look the same."""
    variables: dict[str, Variable | None] = {}
    ops = [view.operation for view in module.body.operations]
    meshes = Counter(str(op.attributes["mesh"]) for op in ops if op.name == MESH)
    for op in ops:
        if op.name == MESH and meshes[str(op.attributes["mesh"])] > 1:
            variables[symbol_name(op)] = None
        elif op.name == MESH or visibility(op) == "private":
            name = symbol_name(op)
            stem = re.sub(r"[._]\d+$", "", name)  # without the number that makes it unique
            words = re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_").upper()
            base = words if words[:1].isalpha() else f"SYMBOL_{words}".rstrip("_")
            variables[name] = Variable(base, name)
    return variables


@dataclass
class _CheckWriter:
    """Turns lines into checks, one after the other."""

    selection: Selection
    symbols: dict[str, Variable | None]
    checks: list[_CheckedLine] = field(default_factory=list[_CheckedLine])
    values: dict[str, Variable | None] = field(default_factory=dict[str, "Variable | None"])
    meshes: set[str] = field(default_factory=set[str])

    def add(self, line: ShownLine) -> None:
        """Adds the check of a line, if it has one, and records the names that it defines."""
        op = line.op
        shown = self.selection.shows(op)
        if line.role is LineRole.HEADER:
            argument_base = "ITER_ARG" if op.name == WHILE else "ARG"
            for name in line.arguments:
                self.values[name] = Variable(argument_base, name[1:]) if shown else None
            short = op.name.rpartition(".")[2]
            result_base = _SHORT_NAMES.get(short) or re.sub(r"\W", "_", short).upper()
            for base in dict.fromkeys(name.partition("#")[0] for name in line.results):
                self.values[base] = Variable(result_base, base[1:]) if shown else None
        if op.name == "builtin.module":
            if line.role is LineRole.HEADER:
                pieces: list[Piece] = []
                for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
                    if name in op.attributes:
                        pieces += [Gap()] if pieces else []
                        pieces.append(Text(f"{name} = {op.attributes[name]}"))
                if pieces:
                    self._add(line, "", pieces)
        elif op.name == MESH:
            # Meshes that look the same are checked once.
            content = str(op.attributes["mesh"])
            if content not in self.meshes:
                self.meshes.add(content)
                self._add(line, "-DAG", self._pieces(line))
        elif shown and (
            self.selection.everything
            or line.role in (LineRole.HEADER, LineRole.BETWEEN)
            or (line.role is LineRole.TAIL and len(line.text) > 1)  # more than a bracket
        ):
            self._add(line, "", self._pieces(line))
        elif line.role is LineRole.HEADER and self.selection.shows_name_only(op):
            self._add(line, "", [Text(f"{op.name} ")])

    def _add(self, line: ShownLine, suffix: str, pieces: list[Piece]) -> None:
        is_function = line.role is LineRole.HEADER and line.op.name == FUNCTION
        if is_function and symbol_name(line.op) not in self.symbols:
            suffix = "-LABEL"
            label = line.text[: line.text.index("(") + 1]
            first, *rest = self._pieces(line)
            assert isinstance(first, Text)
            pieces = [Text(label), Gap(), Text(first.text.removeprefix(label)), *rest]
        self.checks.append(_CheckedLine(line.number, suffix, pieces))

    def _pieces(self, line: ShownLine) -> list[Piece]:
        text = _without_noise(line, self.selection.everything)
        defined = {name.partition("#")[0] for name in line.results} | set(line.arguments)
        pieces: list[Piece] = []
        end = 0
        for match in _TOKENS.finditer(text):
            piece = self._piece(match, defined)
            if piece is None:
                continue
            if match.start() > end:
                pieces.append(Text(text[end : match.start()]))
            pieces += piece
            end = match.end()
        pieces += [Text(text[end:])] if end < len(text) else []
        return pieces if self.selection.everything else without_middles(pieces)

    def _piece(self, match: re.Match[str], defined: set[str]) -> list[Piece] | None:
        """Returns the pieces that replace a token of the text; None keeps it as text."""
        if match["cut"]:
            return [Gap() if match["cut"] == _CUT else Pattern("[^%]*")]
        if match["channel"]:
            return [Pattern(".+" if match["channel"].endswith(" ") else " = [0-9]+")]
        if not match["sigil"]:
            return None
        sigil, name, number = match["sigil"], match["name"], match["number"]
        if sigil == "@":
            if name not in self.symbols:
                return None
            variable = self.symbols[name]
        else:
            variable = self.values.get(sigil + name)
        if variable is None:
            return [NamedReference(sigil, None)]  # its pattern also matches a suffix `#1`
        defines = sigil == "%" and sigil + name in defined
        named = NamedReference(sigil, variable, defines)
        return [named, Text(number)] if number else [named]


def _without_noise(line: ShownLine, everything: bool) -> str:
    """Returns the line's text with a mark in place of attributes and text that do not matter."""
    text = line.text
    op = line.op
    noisy = [(name, op.attributes[name], _CUT) for name in op.attributes if is_noise(name)]
    for listed, mark in (("arg_attrs", _CUT_FROM_ARGUMENT), ("res_attrs", _CUT)):
        if op.name == FUNCTION and listed in op.attributes:
            for entry in ir.ArrayAttr(op.attributes[listed]):
                noisy += [(a.name, a.attr, mark) for a in ir.DictAttr(entry) if is_noise(a.name)]
    for name, value, mark in noisy:
        for printed in (f"{name} = {value}", name):
            if printed in text:
                text = text.replace(printed, mark, 1)
                break
    value = value_text(op) if op.name == CONSTANT else ""
    if len(value) > _LONG:
        text = text.replace(value, _CUT, 1)
    text = re.sub(rf" ?\{{(?:({_MARK})(?:, )?)+", r"\1", text)
    text = re.sub(rf"(?:, )?({_MARK})\}}?", r"\1", text)
    if op.name == FUNCTION:
        text = text.removesuffix(" {")
    if op.name in TERMINATORS or (op.name == BARRIER and not everything):
        end = text.rfind(" : ")
        text = text if end < 0 else text[: end + 2]
    return text


def _name_variables(checks: list[_CheckedLine]) -> None:
    """Names the variables that are used more than once, numbered function by function."""
    for check in checks:
        for sigil, variable, defines in _named_in(check):
            variable.uses += 1
            variable.is_defined |= defines or sigil == "@"
    taken: Counter[str] = Counter()
    for check in checks:
        for sigil, variable, _ in _named_in(check):
            if sigil == "@":
                _name(variable, taken)
    numbers = Counter(taken)
    for check in checks:
        if check.suffix == "-LABEL" or _is_function(check):
            numbers = Counter(taken)
        for _, variable, _ in _named_in(check):
            _name(variable, numbers)


def _named_in(check: _CheckedLine) -> Iterator[tuple[str, Variable, bool]]:
    """Yields the variables of a line: the sigil, the variable, True if it is defined there."""
    for piece in check.pieces:
        if isinstance(piece, NamedReference) and piece.variable is not None:
            yield piece.sigil, piece.variable, piece.defines


def _is_function(check: _CheckedLine) -> bool:
    first = check.pieces[0]
    return isinstance(first, Text) and first.text.startswith("func.func")


def _name(variable: Variable, numbers: Counter[str]) -> None:
    if variable.name or variable.uses < 2 or not variable.is_defined:
        return
    number = numbers[variable.base]
    numbers[variable.base] += 1
    variable.name = f"{variable.base}_{number}" if number else variable.base


def _directives(checks: list[_CheckedLine], lines: list[ShownLine]) -> Checks:
    directives: list[str] = []
    defined: set[str] = set()
    before = -1
    has_gaps = False
    meshes = sum(check.suffix == "-DAG" for check in checks)
    for check in checks:
        suffix = "" if check.suffix == "-DAG" and meshes == 1 else check.suffix
        first, *rest = pattern_lines(check.pieces, defined)
        if suffix == "" and before >= 0:
            # The earlier lines that the pattern would match before its own.
            between = lines[before + 1 : check.line]
            regex = as_regex(first, check.pieces)
            taken = [line.number for line in between if regex.search(line.text)]
            for number in [*taken, check.line]:
                pattern = first if number == check.line else anonymous(first)
                directives.append(f"CHECK{'-NEXT' if number == before + 1 else ''}: {pattern}")
                gap = lines[before + 1 : number]
                # No collective could be inserted between lines of these kinds.
                closed = (each.role is LineRole.BLOCK or is_in_reduction(each.op) for each in gap)
                has_gaps |= not _is_function(check) and not all(closed)
                before = number
        else:
            directives.append(f"CHECK{suffix}: {first}")
        directives += [f"CHECK-SAME: {pattern}" for pattern in rest]
        before = check.line
    return Checks(directives, has_gaps)
