"""Provides typed views of ops with regions: `While(op).body`, not `op.regions[1].blocks[0]`.

    While(op).condition, .body, .carries, .yields     a loop; .yield_of(carry)
    Case(op).branches                                 a choice, also an `if`
    Function(op).body, .yields                        a function with a body
    ManualComputation(op).body, .yields               the program of one device
    Combining(op).combiner                            a reduction, a scatter, a reducing collective

A view stores only the op and reads it at each access, so that it stays valid after rewrites.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import terminator


class OpRegions:
    """An op, viewed as one of its kind. The kind is not checked."""

    __slots__ = ("op",)

    def __init__(self, op: ir.Operation) -> None:
        self.op = op


class WithBody(OpRegions):
    """An op with a body: one block, which yields the results. By default its only region."""

    __slots__ = ()

    @property
    def body(self) -> ir.Block:
        """The block that yields the results."""
        return self.op.regions[0].blocks[0]

    @property
    def yields(self) -> list[ir.Value]:
        """The operands of the body's terminator, one for each result."""
        return list(terminator(self.body).operands)

    def yield_of(self, result: int) -> ir.Value:
        """Returns the value that the body yields for a result."""
        return terminator(self.body).operands[result]


class Function(WithBody):
    """A `func.func` with a body."""

    __slots__ = ()


class ManualComputation(WithBody):
    """An `sdy.manual_computation`: the block is the program of one device."""

    __slots__ = ()


class Combining(OpRegions):
    """An op with a combiner block: reduce, scatter, all_reduce and so on."""

    __slots__ = ()

    @property
    def combiner(self) -> ir.Block:
        """The combiner block; for `select_and_scatter`, which has two, the one that selects."""
        return self.op.regions[0].blocks[0]


class While(WithBody):
    """A `stablehlo.while`. Operand, body argument, yield and result `i` belong to carry `i`."""

    __slots__ = ()

    @property
    def condition(self) -> ir.Block:
        """The block that computes if another iteration runs."""
        return self.op.regions[0].blocks[0]

    @property
    def body(self) -> ir.Block:
        """The block of one iteration."""
        return self.op.regions[1].blocks[0]

    @property
    def carries(self) -> list[ir.Value]:
        """The body arguments: the values of the carries at the start of an iteration."""
        return list(self.body.arguments)


class Case(OpRegions):
    """A `stablehlo.case` or an `if`; branch 0 of an `if` is `then`."""

    __slots__ = ()

    @property
    def branches(self) -> list[ir.Block]:
        """The blocks, by branch number."""
        return [region.blocks[0] for region in self.op.regions]
