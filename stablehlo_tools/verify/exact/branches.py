"""Finds which branches and loops of a program its inputs enter, counted while it runs.

Each predicate or index passes through the host, which remembers its values:

    "stablehlo.if"(%p)  ==>  %q = stablehlo.custom_call @field_host(%n, %p); "stablehlo.if"(%q)

Of a comparison that is marked, it counts whether it was true and whether it was false anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CASE, COMPARE, IF, WHILE
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import is_spread_constant, maker_of, named
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named, terminator
from stablehlo_tools.verify.exact.host_functions import PROBE, HostFunction, write_call

OUTCOMES = "outcomes"  # the attribute of a comparison that is marked: its number
_BOTH = 3


@dataclass(frozen=True)
class Branching:
    """An op that chooses what runs, by the number of its probe: `choices` are the values that its
    predicate or index may have. Without choices, it is the marked comparison of this number."""

    probe: int
    what: str
    choices: tuple[int, ...]

    def missing(self, seen: Mapping[int, Set[int]]) -> list[str]:
        """Returns what no input entered, in words; of a marked comparison its number, unless it had
        both outcomes."""
        values = seen.get(self.probe, set())
        if not self.choices:
            return [] if {1, 2} <= values or _BOTH in values else [self.what]
        if self.what.startswith("while"):
            return [] if 1 in values else [f"the loop {self.what}"]
        if self.what.startswith("if"):
            sides = {1: "true", 0: "false"}
            return [f"{sides[c]} of {self.what}" for c in self.choices if c not in values]
        last = self.choices[-1]  # which is entered by any index out of range
        entered = {value if 0 <= value <= last else last for value in values}
        return [f"branch {c} of {self.what}" for c in self.choices if c not in entered]


def write_probes(module: ir.Module, functions: list[HostFunction]) -> list[Branching]:
    """Lets each predicate and index pass through the host, in place; adds to its functions."""
    branchings: list[Branching] = []
    for op in ops_named(module.operation, (IF, CASE, WHILE)):
        if op.name == CASE and is_spread_constant(op.operands[0]):
            continue  # a choice between platforms, which is made
        if op.name == WHILE:
            holder = terminator(While(op).condition)
            choices: Sequence[int] = (1,)
        else:
            holder = op
            choices = range(len(op.regions)) if op.name == CASE else (1, 0)
        builder = Builder(ir.InsertionPoint(holder), op.location)
        value, number = holder.operands[0], len(functions)
        function, [passed] = write_call(PROBE, PROBE, [value], [value], builder, number, {})
        functions.append(function)
        holder.operands[0] = passed
        branchings.append(Branching(number, named(op), tuple(choices)))
    for op in ops_named(module.operation, (COMPARE,)):
        if OUTCOMES in op.attributes:
            what = str(ir.IntegerAttr(op.attributes[OUTCOMES]).value)
            branchings.append(Branching(len(functions), what, ()))
            functions.append(_count_outcomes(op, len(functions)))
    return branchings


def _count_outcomes(compare: ir.Operation, number: int) -> HostFunction:
    """Shows the host 1 if a comparison is true anywhere, plus 2 if it is false anywhere."""
    builder = Builder(ir.InsertionPoint.after(compare), compare.location)
    holds, counts = compare.results[0], list[ir.Value]()
    boolean, i32 = (ir.IntegerType.get_signless(width) for width in (1, 32))
    for weight, booleans in ((1, holds), (2, builder.same("not", holds))):
        dims = range(len(shape_of(holds)))
        anywhere = builder.reduce(booleans, builder.splat(0, [], boolean), dims, "or")
        counts.append(builder.same("multiply", builder.i32(weight), builder.convert(anywhere, i32)))
    code = builder.same("add", *counts)
    function, [passed] = write_call(PROBE, PROBE, [code], [code], builder, number, {})
    maker_of(passed).attributes["has_side_effect"] = ir.BoolAttr.get(True)
    return function
