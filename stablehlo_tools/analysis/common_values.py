"""Gives equal symbols to values that separately compiled programs surely share.

A value is shared if it follows by exact ops from constants and from results of collectives. These
results must be the same on all devices of the job. Exact ops give the same bits with any compiler.
Two programs that decide a loop or branch by the same symbol make the same decision. Floating-point
arithmetic is left out, because separately compiled programs may round differently.
"""

from __future__ import annotations

import hashlib
import re

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_async_done
from stablehlo_tools.dialect.names import CONCATENATE, CONVERT, GATHER, IOTA
from stablehlo_tools.dialect.traits import (
    LAYOUT,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
    short_names,
)
from stablehlo_tools.ir.values import value_text
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.order.program import CollectiveIssue

_SAME_EVERYWHERE = short_names(ops_with(Trait.SAME_ON_GROUP))
# The exact ops that decide loops and branches; the others have not been needed.
_EXACT = (
    ops_with(Trait.ELEMENTWISE | Trait.EXACT)
    - ops_with_any(Trait.SHIFT | Trait.COMPLEX_PART)
    - full_names("count_leading_zeros popcnt round_nearest_afz round_nearest_even")
) | (LAYOUT | ops_with(Trait.PIECE) | {CONCATENATE, IOTA}) - {GATHER}
_EXACT_ON_INTEGERS = ops_with(Trait.ELEMENTWISE | Trait.CORRECTLY_ROUNDED) - ops_with(Trait.UNARY)


_LONGEST = 2000  # characters of a symbol that is not hashed
_CARRY = re.compile(r"carry\((\d+)\)")


class CommonValues:
    """The symbols of one program's values; the reader adds collectives as it reads them."""

    def __init__(self, job_size: int) -> None:
        self.job_size = job_size
        self.symbols: dict[ir.Value, str | None] = {}

    def met(
        self, collective: Collective, issue: CollectiveIssue, place: str, occurrence: int
    ) -> None:
        """Notes a collective: the n-th of its form at a place of the program."""
        whole = [m for m in issue.rendezvous if len(m.members) == self.job_size]
        symbol = None
        if collective.kind in _SAME_EVERYWHERE and len(whole) == len(issue.rendezvous) == 1:
            symbol = f"{place}/{issue.signature.text}/{occurrence}"
        for position, result in enumerate(collective.op.results):
            self.symbols[result] = None if symbol is None else f"met({symbol})#{position}"

    def of_branch(self, branch: ir.Operation) -> str | None:
        """Returns the symbol of the value that chooses a branch."""
        return hash_symbol(self._symbol_of(branch.operands[0]))

    def of_loop(self, loop: ir.Operation) -> str | None:
        """Returns the symbol of a loop's trip count; its regions must have been read."""
        condition, body = (region.blocks[0] for region in loop.regions)
        numbers: dict[int, int] = {}  # of carries that matter, in order of discovery
        asked: list[int] = []

        for argument in (*condition.arguments, *body.arguments):
            self.symbols[argument] = f"carry({argument.arg_number})"
        parts = [self._symbol_of(terminator(condition).operands[0])]
        ends = list(terminator(body).operands)
        known = 0
        while None not in parts:
            for part in parts[known:]:
                for carry in _carries(part or ""):
                    if carry not in numbers:
                        numbers[carry] = len(numbers)
                        asked.append(carry)
            known = len(parts)
            if not asked:
                text = "|".join(part or "" for part in parts)
                text = _CARRY.sub(lambda carry: f"<{numbers[int(carry[1])]}>", text)
                return hash_symbol(f"while({text})")
            carry = asked.pop(0)
            before = self._symbol_of(loop.operands[carry])
            if before is not None and _carries(before):
                before = None  # a carry of a loop around this one
            parts += [before, self._symbol_of(ends[carry])]
        return None

    def _symbol_of(self, value: ir.Value) -> str | None:
        if value not in self.symbols:
            self.symbols[value] = self._compute_symbol(value)
        return self.symbols[value]

    def _compute_symbol(self, value: ir.Value) -> str | None:
        owner = value.owner
        if isinstance(owner, ir.Block):
            return None
        op = owner.operation
        if op.name == "stablehlo.constant":
            return f"constant({value_text(op)})"
        if is_async_done(op):
            return self._symbol_of(op.operands[0])
        if op.name == "stablehlo.optimization_barrier":
            return self._symbol_of(op.operands[ir.OpResult(value).result_number])
        is_exact = op.name in _EXACT or (op.name in _EXACT_ON_INTEGERS and _is_integral(value))
        if op.name == CONVERT:  # between floats, a compiler may leave out the rounding
            is_exact = _is_integral(value) or _is_integral(op.operands[0])
        operands = [self._symbol_of(operand) for operand in op.operands] if is_exact else [None]
        if None in operands:
            return None
        attributes = ",".join(
            f"{name}={attribute}"
            for name, attribute in sorted(op.attributes.items())
            if not name.startswith("mhlo.")
        )
        inside = ",".join(operand or "" for operand in operands)
        text = f"{op.name}[{attributes}]({inside}):{value.type}"
        return text if len(text) < _LONGEST or _carries(text) else hash_symbol(text)


def hash_symbol(symbol: str | None) -> str | None:
    """Returns a short symbol, a hash, for a long one."""
    return None if symbol is None else hashlib.sha256(symbol.encode()).hexdigest()


def _carries(symbol: str) -> list[int]:
    """Returns the numbers of the carries named in a symbol, in order of appearance."""
    return list(dict.fromkeys(map(int, _CARRY.findall(symbol))))


def _is_integral(value: ir.Value) -> bool:
    type_ = value.type
    return isinstance(type_, ir.RankedTensorType) and isinstance(type_.element_type, ir.IntegerType)
