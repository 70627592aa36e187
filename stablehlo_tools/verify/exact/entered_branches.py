"""Finds the branches and loops of a program that its inputs enter, counted at run time.

Each predicate or index passes through the host, which records its values:

    "stablehlo.if"(%p)  ==>  %q = stablehlo.custom_call @field_host(%n, %p); "stablehlo.if"(%q)

For a marked comparison, it records if the result was true anywhere, and if it was false anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CASE, COMPARE, IF, WHILE
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import describe_op, is_spread_constant, maker_of
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named, terminator
from stablehlo_tools.verify.exact.host_functions import PROBE, HostFunction, write_call

OUTCOMES = "outcomes"  # the attribute that marks a comparison: its number
_BOTH = 3


@dataclass(frozen=True)
class Branching:
    """A branch or loop, with the number of its probe, or a marked comparison.

    `choices` are the possible values of its predicate or index; () for a marked comparison, whose
    number is `what`."""

    probe: int
    what: str
    choices: tuple[int, ...]

    def missing(self, seen: Mapping[int, Set[int]]) -> list[str]:
        """Describes the choices that no input entered; `seen` maps probes to values.

        For a marked comparison, returns its number unless it had both outcomes."""
        values = seen.get(self.probe, set())
        if not self.choices:
            return [] if {1, 2} <= values or _BOTH in values else [self.what]
        if self.what.startswith("while"):
            return [] if 1 in values else [f"the loop {self.what}"]
        if self.what.startswith("if"):
            sides = {1: "true", 0: "false"}
            return [f"{sides[c]} of {self.what}" for c in self.choices if c not in values]
        last = self.choices[-1]  # an index out of range enters the last branch
        entered = {value if 0 <= value <= last else last for value in values}
        return [f"branch {c} of {self.what}" for c in self.choices if c not in entered]


def write_probes(module: ir.Module, functions: list[HostFunction]) -> list[Branching]:
    """Inserts a host call at each predicate and index, in place; adds to `functions`."""
    branchings: list[Branching] = []
    for op in ops_named(module.operation, (IF, CASE, WHILE)):
        if op.name == CASE and is_spread_constant(op.operands[0]):
            continue  # a choice between platforms, already fixed
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
        branchings.append(Branching(number, describe_op(op), tuple(choices)))
    for op in ops_named(module.operation, (COMPARE,)):
        if OUTCOMES in op.attributes:
            what = str(ir.IntegerAttr(op.attributes[OUTCOMES]).value)
            branchings.append(Branching(len(functions), what, ()))
            functions.append(_count_outcomes(op, len(functions)))
    return branchings


def _count_outcomes(compare: ir.Operation, number: int) -> HostFunction:
    """Passes the host 1 if a comparison is true anywhere, plus 2 if it is false anywhere."""
    builder = Builder(ir.InsertionPoint.after(compare), compare.location)
    holds, counts = compare.results[0], list[ir.Value]()
    boolean, i32 = (ir.IntegerType.get_signless(width) for width in (1, 32))
    for weight, booleans in ((1, holds), (2, builder.same("not", holds))):
        dims = range(len(shape_of(holds)))
        anywhere = builder.reduce(booleans, builder.splat(0, [], boolean), dims, "or")
        counts.append(builder.same("multiply", builder.i32(weight), builder.convert(anywhere, i32)))
    code = builder.same("add", *counts)
    function, [passed] = write_call(PROBE, PROBE, [code], [code], builder, number, {})
    # Nothing reads its result, so XLA would delete the call.
    maker_of(passed).attributes["has_side_effect"] = ir.BoolAttr.get(True)
    return function
