"""Provides typed views of ops with regions: `While(op).body`, not `op.regions[1].blocks[0]`.

    While(op).condition, .body, .carries, .yields     a loop
    If(op).then, .otherwise; Case(op).branches        a choice
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


class OneRegion(OpRegions):
    """An op whose only region has one block."""

    __slots__ = ()

    @property
    def body(self) -> ir.Block:
        """The block of the region."""
        return self.op.regions[0].blocks[0]

    @property
    def yields(self) -> list[ir.Value]:
        """The operands of the terminator, one for each result."""
        return list(terminator(self.body).operands)


class Function(OneRegion):
    """A `func.func` with a body."""

    __slots__ = ()


class ManualComputation(OneRegion):
    """An `sdy.manual_computation`: the block is the program of one device."""

    __slots__ = ()


class Combining(OpRegions):
    """An op with a combiner block: reduce, scatter, all_reduce and so on."""

    __slots__ = ()

    @property
    def combiner(self) -> ir.Block:
        """The combiner block; for `select_and_scatter`, which has two, the one that selects."""
        return self.op.regions[0].blocks[0]


class While(OpRegions):
    """A `stablehlo.while`. Carry `i` is its operand, argument, yielded value and result `i`."""

    __slots__ = ()

    @property
    def condition(self) -> ir.Block:
        """The block that computes if another iteration runs."""
        return self.op.regions[0].blocks[0]

    @property
    def body(self) -> ir.Block:
        """The block that computes an iteration."""
        return self.op.regions[1].blocks[0]

    @property
    def carries(self) -> list[ir.Value]:
        """The arguments of the body: the carries at the start of an iteration."""
        return list(self.body.arguments)

    @property
    def yields(self) -> list[ir.Value]:
        """The carries at the end of an iteration."""
        return list(terminator(self.body).operands)


class If(OpRegions):
    """A `stablehlo.if`."""

    __slots__ = ()

    @property
    def then(self) -> ir.Block:
        """The block that runs if the predicate is true."""
        return self.op.regions[0].blocks[0]

    @property
    def otherwise(self) -> ir.Block:
        """The block that runs if the predicate is false."""
        return self.op.regions[1].blocks[0]


class Case(OpRegions):
    """A `stablehlo.case` or an `if`; branch 0 of an `if` is `then`."""

    __slots__ = ()

    @property
    def branches(self) -> list[ir.Block]:
        """The blocks, by branch number."""
        return [region.blocks[0] for region in self.op.regions]
