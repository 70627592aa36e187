"""Which line of a module's text belongs to which op.

Values and types are asked of the IR; only what MLIR prints around them is read off the text. Ops
are printed in the order of a walk, each from the start of a line, so that one pass over the lines
finds them all.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError

_RESOURCES = "{-#"  # stand behind the module
_APPLIES = " applies "  # the short form of a stablehlo.reduce, which prints no region


class Role(enum.Enum):
    """What a line is to its op."""

    HEADER = enum.auto()  # results, name, operands
    BLOCK = enum.auto()  # `^bb0(%arg0: …):`, `reducer(%arg0: …) {`
    BETWEEN = enum.auto()  # `cond {`, `} do {`, `}, {`
    TAIL = enum.auto()  # from the last `}` on


@dataclass(frozen=True)
class Line:
    """A line without its indentation."""

    number: int
    text: str
    role: Role
    op: ir.Operation
    results: tuple[str, ...] = ()  # the names of a header's results, as they are used: %3#1
    arguments: tuple[str, ...] = ()  # of all blocks in the op's regions


def printed_lines(module: ir.Module) -> list[Line]:
    """The lines of a module's text, in order."""
    texts = to_text(module).splitlines()
    state = ir.AsmState(module.operation)
    headers = _headers(module.operation, texts, state)
    lines: list[Line] = []
    owners: dict[int, Line] = {}  # the header by its indentation
    for number, whole in enumerate(texts):
        text = whole.lstrip()
        indent = len(whole) - len(text)
        if text.startswith(_RESOURCES):
            break
        if number in headers:
            owners[indent] = _header(number, text, headers[number], state)
            lines.append(owners[indent])
        else:
            owner = owners.get(indent, lines[-1])
            lines.append(Line(number, text, _role(text), owner.op, (), owner.arguments))
    return lines


def _headers(root: ir.Operation, texts: list[str], state: ir.AsmState) -> dict[int, ir.Operation]:
    found: dict[int, ir.Operation] = {}
    number = -1
    for op in _printed_ops(root, texts, found):
        start = _start(op, state)
        number += 1
        while number < len(texts) and not start.match(texts[number]):
            number += 1
        if number == len(texts):
            raise ToolError(f"{op.name} was not found in the text of its module", op.location)
        found[number] = op
    return found


def _printed_ops(
    op: ir.Operation, texts: list[str], found: dict[int, ir.Operation]
) -> Iterator[ir.Operation]:
    """An op and those in it; `found` has gained the op when the walk goes on."""
    yield op
    header = next(reversed(found))
    if op.name == "stablehlo.reduce" and _APPLIES in texts[header]:
        return
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _printed_ops(inner.operation, texts, found)


def _start(op: ir.Operation, state: ir.AsmState) -> re.Pattern[str]:
    """What the op's first line starts with; the dialect is left out where it is the default."""
    groups: dict[str, int] = {}
    for result in op.results:
        base = result.get_name(state).partition("#")[0]
        groups[base] = groups.get(base, 0) + 1
    names = ", ".join(re.escape(b) + (f":{n}" if n > 1 else "") for b, n in groups.items())
    dialect, _, name = op.name.partition(".")
    results = names + " = " if names else ""
    return re.compile(rf' *{results}"?(?:{re.escape(dialect)}\.)?{re.escape(name)}(?![\w.-])')


def _header(number: int, text: str, op: ir.Operation, state: ir.AsmState) -> Line:
    results = tuple(result.get_name(state) for result in op.results)
    arguments = tuple(
        argument.get_name(state)
        for region in op.regions
        for block in region.blocks
        for argument in block.arguments
    )
    return Line(number, text, Role.HEADER, op, results, arguments)


def _role(text: str) -> Role:
    if text.startswith(("^", "reducer(")):
        return Role.BLOCK
    return Role.BETWEEN if text.endswith("{") else Role.TAIL
