"""The ops that a generated test checks, and the line of the text of each.

Values and types come from the IR; only the text that MLIR prints around them is parsed. Ops are
printed in the order of a walk, each from the start of a line, so one pass over the lines finds them
all.

By default, a test checks communication, its order and the control flow around it. All other ops may
change without failing the test.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.communication_kinds import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.custom_calls import ASYNC_STARTS, is_async_done, target_of
from stablehlo_tools.dialect.names import CASE, IF, WHILE
from stablehlo_tools.dialect.traits import CALLS, COMPUTATIONS, TERMINATORS
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    functions_by_name,
    ops_named,
    ops_where,
    symbol_name,
)

_RESOURCES = "{-#"  # printed after the module
_APPLIES = " applies "  # the short form of a stablehlo.reduce, which prints no region


class LineRole(enum.Enum):
    """The role of a line in the text of its op."""

    HEADER = enum.auto()  # results, name, operands
    BLOCK = enum.auto()  # `^bb0(%arg0: …):`, `reducer(%arg0: …) {`
    BETWEEN = enum.auto()  # `cond {`, `} do {`, `}, {`
    TAIL = enum.auto()  # from the last `}` on


@dataclass(frozen=True)
class ShownLine:
    """A line without its indentation."""

    number: int
    text: str
    role: LineRole
    op: ir.Operation
    results: tuple[str, ...] = ()  # the names of a header's results in uses, such as %3#1
    arguments: tuple[str, ...] = ()  # of all blocks in the op's regions


def printed_lines(module: ir.Module) -> list[ShownLine]:
    """Returns the lines of a module's text, in order."""
    texts = to_text(module).splitlines()
    state = ir.AsmState(module.operation)
    headers: dict[int, ir.Operation] = {}
    number = -1
    for op in _printed_ops(module.operation, texts, headers):
        # The start of the op's first line, which omits the default dialect.
        groups: dict[str, int] = {}
        for result in op.results:
            base = result.get_name(state).partition("#")[0]
            groups[base] = groups.get(base, 0) + 1
        names = ", ".join(re.escape(b) + (f":{n}" if n > 1 else "") for b, n in groups.items())
        dialect, _, name = op.name.partition(".")
        results = names + " = " if names else ""
        start = re.compile(rf' *{results}"?(?:{re.escape(dialect)}\.)?{re.escape(name)}(?![\w.-])')
        number += 1
        while number < len(texts) and not start.match(texts[number]):
            number += 1
        if number == len(texts):
            raise ToolError(f"{op.name} was not found in the text of its module", op.location)
        headers[number] = op
    lines: list[ShownLine] = []
    owners: dict[int, ShownLine] = {}  # the header by its indentation
    for number, whole in enumerate(texts):
        text = whole.lstrip()
        indent = len(whole) - len(text)
        if text.startswith(_RESOURCES):
            break
        if number in headers:
            op = headers[number]
            results = tuple(result.get_name(state) for result in op.results)
            arguments = tuple(
                argument.get_name(state)
                for region in op.regions
                for block in region.blocks
                for argument in block.arguments
            )
            owners[indent] = ShownLine(number, text, LineRole.HEADER, op, results, arguments)
            lines.append(owners[indent])
        else:
            role = LineRole.BETWEEN if text.endswith("{") else LineRole.TAIL
            if text.startswith(("^", "reducer(")):
                role = LineRole.BLOCK
            owner = owners.get(indent, lines[-1])
            lines.append(ShownLine(number, text, role, owner.op, (), owner.arguments))
    return lines


def _printed_ops(
    op: ir.Operation, texts: list[str], headers: dict[int, ir.Operation]
) -> Iterator[ir.Operation]:
    """Yields an op and those in it; the caller adds each op to `headers` before it continues."""
    yield op
    header = next(reversed(headers))
    if op.name == "stablehlo.reduce" and _APPLIES in texts[header]:
        return
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _printed_ops(inner.operation, texts, headers)


_COMMUNICATION = re.compile(
    r"(?:stablehlo|mhlo|sdy)\.(?:all_(?:gather|reduce|to_all|slice)|reduce_scatter|"
    r"collective_\w+|cross-replica-sum|send|recv|infeed|outfeed|async_\w+|partition_id|"
    r"replica_id|sharded_to_unreduced|replicated_to_unreduced)"
)
CONTROL_FLOW = COMPUTATIONS | {WHILE, IF, CASE}
_REDUCING = re.compile(r"stablehlo\.(?:all_reduce|reduce_scatter)")
_NEEDED = frozenset(
    {
        *("mhlo.num_partitions", "mhlo.num_replicas", "mhlo.sharding", "mhlo.memory_kind"),
        *("mhlo.backend_config", "jax.buffer_donor", "jax.global_constant"),
    }
)
_TOKEN = "!stablehlo.token"


def is_noise(attribute: str) -> bool:
    """Returns True if an attribute with this name does not affect the program's behaviour."""
    if attribute in _NEEDED:
        return False
    return attribute.startswith(("jax.", "mhlo.")) or attribute == "stablehlo.mesh"


def is_in_reduction(op: ir.Operation) -> bool:
    """Returns True if the op is in the reduction region of a collective."""
    parent = op.parent
    return parent is not None and bool(_REDUCING.fullmatch(parent.operation.name))


def communicates(op: ir.Operation) -> bool:
    """Returns True if the op exchanges data, or is a custom call that may do so."""
    if op.name in ("stablehlo.partition_id", "stablehlo.replica_id"):
        return False
    return bool(_COMMUNICATION.fullmatch(op.name)) or _is_effectful_call(op)


def visibility(symbol: ir.Operation | ir.OpView) -> str:
    """Returns the visibility of an op that defines a symbol, `public` by default."""
    attribute = symbol.attributes.get("sym_visibility")
    return "public" if attribute is None else ir.StringAttr(attribute).value


@dataclass(frozen=True)
class Selection:
    """The ops to check: all of them, or communication and the control flow around it."""

    everything: bool
    functions: frozenset[str]  # the names of those to check

    @staticmethod
    def from_module(module: ir.Module, everything: bool) -> Selection:
        """Selects the functions with ops to check: always the public ones."""
        functions = functions_by_name(module)
        if everything:
            return Selection(True, frozenset(functions))
        shown = {
            name
            for name, op in functions.items()
            if visibility(op) == "public" or ops_where(op, _matters)
        }
        calls = {
            name: set(map(callee_name, ops_named(op, CALLS))) for name, op in functions.items()
        }
        while more := {n for n, called in calls.items() if n not in shown and called & shown}:
            shown |= more
        return Selection(False, frozenset(shown))

    def shows(self, op: ir.Operation) -> bool:
        """Returns True if the op's own line is checked."""
        if self.everything:
            return True
        if op.name == FUNCTION:
            return symbol_name(op) in self.functions
        if op.name == "sdy.mesh" or _matters(op):
            return True
        if op.name in CALLS:
            return callee_name(op) in self.functions
        if op.name not in TERMINATORS or op.parent is None:
            return False
        holder = op.parent.operation  # not of a reduction or an async pair: these are unambiguous
        return holder.name in CONTROL_FLOW or (holder.name == FUNCTION and self.shows(holder))

    def shows_name_only(self, op: ir.Operation) -> bool:
        """Returns True if the op is the reduction of a checked collective."""
        return not self.everything and op.name not in TERMINATORS and is_in_reduction(op)


def _matters(op: ir.Operation) -> bool:
    if _COMMUNICATION.fullmatch(op.name) or op.name in CONTROL_FLOW or _is_effectful_call(op):
        return True
    values = () if op.name in TERMINATORS else (*op.operands, *op.results)
    return any(str(value.type) == _TOKEN for value in values)


def _is_effectful_call(op: ir.Operation) -> bool:
    if op.name != "stablehlo.custom_call":
        return False
    effect = op.attributes.get("has_side_effect")
    if effect is not None and ir.BoolAttr(effect).value:
        return True
    return target_of(op) in (RAGGED_ALL_TO_ALL, *ASYNC_STARTS) or is_async_done(op)
