"""The data of a collective with the parts of a group's devices in front, whatever its dimensions.

An operand is brought to [parts in, *piece] and a result back from [parts out, *piece]:

| kind | parts in | parts out | piece |
|---|---|---|---|
| all_gather along d | none | members | the operand |
| reduce_scatter along d | members | none | the result |
| all_to_all from d to e | members | members | the operand, its dimension d divided by the members |
| all_reduce, collective_permute | none | none | the operand, a scalar as a vector |

So pieces can lie beside each other, whatever dimensions their collectives run along. Reshapes that
only add or merge dimensions move nothing; a transpose copies, where a compiler lays it out no
better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of

_CUT = {"reduce_scatter": "scatter_dimension", "all_to_all": "split_dimension"}
_JOINED = {"all_gather": "all_gather_dim", "all_to_all": "concat_dimension"}

_LANES = 128  # of the last dimension, in the tiles that a TPU lays data out in


@dataclass(frozen=True)
class Exchange:
    """A kind of collective among `members` devices: which dimension of its operands it cuts into
    their parts, and along which of its results it joins them.
    """

    members: int
    cut: int | None
    joined: int | None

    @staticmethod
    def of(collective: Collective, members: int) -> Exchange:
        """The exchange that a collective makes in groups of so many."""
        cut = _dimension(collective, _CUT.get(collective.kind))
        return Exchange(members, cut, _dimension(collective, _JOINED.get(collective.kind)))

    @property
    def parts_in(self) -> list[int]:
        """The dimension in front of what goes in, if any."""
        return [] if self.cut is None else [self.members]

    @property
    def parts_out(self) -> list[int]:
        """The dimension in front of what comes out, if any."""
        return [] if self.joined is None else [self.members]

    def piece(self, shape: Sequence[int]) -> list[int]:
        """The shape of one device's part of an operand."""
        return [
            size // self.members if dimension == self.cut else size
            for dimension, size in enumerate(shape)
        ]

    def take_apart(self, builder: Builder, operand: ir.Value) -> ir.Value:
        """An operand as [parts in, *piece]."""
        shape = shape_of(operand)
        if self.cut is None:
            return reshaped(builder, operand, shape or [1])
        piece = self.piece(shape)
        split = [*piece[: self.cut], self.members, *piece[self.cut :]]
        rest = [dimension for dimension in range(len(split)) if dimension != self.cut]
        return transposed(builder, reshaped(builder, operand, split), [self.cut, *rest])

    def put_together(self, builder: Builder, parts: ir.Value, shape: Sequence[int]) -> ir.Value:
        """The result, of the given shape, that [parts out, *piece] is."""
        if self.joined is None:
            return reshaped(builder, parts, shape)
        order = list(range(1, len(shape) + 1))
        order.insert(self.joined, 0)
        return reshaped(builder, transposed(builder, parts, order), shape)


def _dimension(collective: Collective, name: str | None) -> int | None:
    return None if name is None else ir.IntegerAttr(collective.op.attributes[name]).value


def reshaped(builder: Builder, value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """The value in a shape, with no op where it has it."""
    return value if shape_of(value) == list(shape) else builder.reshape(value, shape)


def transposed(builder: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """The value with its dimensions in an order; a reshape where only those of size 1 move."""
    shape = shape_of(value)
    target = [shape[dimension] for dimension in order]
    moving = [dimension for dimension in order if shape[dimension] != 1]
    if moving == sorted(moving):
        return reshaped(builder, value, target)
    kind = builder.tensor(target, element_of(value))
    return builder.op("transpose", [value], kind, permutation=builder.integers(order))


@dataclass(frozen=True)
class Joint:
    """Shapes that agree in all dimensions but one, along which they are joined."""

    shapes: tuple[tuple[int, ...], ...]
    dimension: int

    @staticmethod
    def of(pieces: Sequence[Sequence[int]]) -> Joint:
        """The joint that reshapes pieces, of one dimension at least, the least.

        Those that differ in one dimension only stay as they are; of others the last dimensions do
        that all share. What is left with one dimension gets a last one of 128 where it can: XLA:TPU
        makes an all-reduce of a reduce_scatter of a vector, and lays data out in such rows anyway.
        """
        dimension = only_uneven(pieces, ())
        if dimension is not None and len(pieces[0]) > 1:
            return Joint(tuple(map(tuple, pieces)), dimension)
        shared = 0
        while all(len(piece) > shared + 1 for piece in pieces) and (
            len({piece[-1 - shared] for piece in pieces}) == 1
        ):
            shared += 1
        kept = pieces[0][len(pieces[0]) - shared :]
        leads = [math.prod(piece[: len(piece) - shared]) for piece in pieces]
        if not kept and all(lead % _LANES == 0 for lead in leads):
            kept, leads = [_LANES], [lead // _LANES for lead in leads]
        return Joint(tuple((lead, *kept) for lead in leads), 0)


def only_uneven(shapes: Sequence[Sequence[int]], taken: Sequence[int | None]) -> int | None:
    """The one dimension in which shapes differ, the first one where they are equal.

    None where it would be one of those that are taken, or where they differ in more.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    uneven = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    if len(uneven) > 1:
        return None
    free = uneven or range(len(shapes[0]))
    return next((dimension for dimension in free if dimension not in taken), None)
