"""The relation of dimensions as Shardy would write it, and why it differs.

Shardy's factors say how a tensor's sharding goes on through an op, at the price of communication;
those of the relation say which elements become which. Where that is not the same:

grown           a dimension of one element that a broadcast repeats is of no use to a sharding
moved           a slice, a pad or a window has one factor of the whole operand (a concatenate and a
                window: of the whole result), to permute the elements along; the relation has the
                elements that are taken or put, each with its place
indexed         a dynamic_slice likewise, and a slice of a gather; the update of a
                dynamic_update_slice is for itself
window          the positions within a window are no factor; the gradient of a window (a
                select_and_scatter) has no factor for both its operand and its source
spatial         dimensions of a convolution are left out: Shardy divides an image's into as many
                windows as fit, which is not where they lie
looked up       of the rows of a table that a gather takes, each device serves its own, and zeros
                for others', to be summed up
put             the rows that a scatter's indices are for stay divided, as each device leaves out
                what is not for it; so do windows that are as long as the operand
not a sum       a scatter whose region keeps one of two updates cannot take them from two devices
mixed           of a reshape that spreads a dimension over another (2x3 -> 3x2) Shardy moves what
                has a place in both
exchanged       devices exchange nothing of what is divided besides, so both sides are whole
matrices        rows and columns of a triangular_solve are told apart, and nobody may divide either
one element     a dimension of one element cannot be divided, and has any factor or none
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stablehlo_tools.analysis.shardings import ShardingRule
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers
from stablehlo_tools.dialect.factors import Along, Factor, FactorRole, OpDimensions
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.views import Combining

Treatment = Literal["passed through", "reduced", "whole"]
Dim = tuple[int, int]  # a tensor's number, operands first and then results, and its dimension
Dims = frozenset[Dim]


@dataclass(frozen=True)
class Shared:
    """What Shardy's factor of dimensions says."""

    size: int
    treatment: Treatment
    dims: Dims


_TREATMENTS: dict[FactorRole, Treatment] = {
    FactorRole.KEPT: "passed through",
    FactorRole.MERGED: "passed through",
    FactorRole.SPLIT: "passed through",
    FactorRole.REGROUPED: "passed through",
    FactorRole.REPEATED: "passed through",
    FactorRole.CONTRACTED: "reduced",
    FactorRole.REDUCED: "reduced",
}
# Ops that have a relation and no rule of Shardy's: what some give is divided as their users like,
# a map has its own function, and the others are other ops before Shardy sees a program.
NO_RULE = frozenset(
    {
        "chlo.top_k",
        "stablehlo.batch_norm_inference",
        "stablehlo.iota",
        "stablehlo.map",
        "stablehlo.optimization_barrier",
    }
)


def shardys(rule: ShardingRule) -> set[Shared]:
    """The factors of a rule."""
    shared: set[Shared] = set()
    for factor, size in enumerate(rule.sizes):
        dims = frozenset(
            (number, dim)
            for number, tensor in enumerate(rule.tensors)
            for dim, factors in enumerate(tensor)
            if factor in factors
        )
        treatment: Treatment = (
            "reduced"
            if factor in rule.reduced
            else "whole"
            if factor in rule.whole
            else "passed through"
        )
        shared.add(Shared(size, treatment, dims))
    return shared


def as_shardy(op: ir.Operation, relation: OpDimensions) -> set[Shared]:
    """The factors of an op's relation, with the differences above."""
    shared = set(_Translation(op, relation).factors())
    if op.name == "stablehlo.scatter" and reducer_kind(Combining(op).combiner) is None:
        return {replace(f, treatment="whole") if f.treatment == "reduced" else f for f in shared}
    return shared


def differences(
    op: ir.Operation, rule: ShardingRule, relation: OpDimensions
) -> tuple[set[Shared], set[Shared]]:
    """The factors that Shardy alone has, and those of the relation alone, but for what is left out
    on both sides."""
    theirs, ours = shardys(rule), as_shardy(op, relation)
    left_out: Dims = frozenset()
    if op.name == "stablehlo.convolution":
        left_out = _spatial_dims(op)
    if op.name == "stablehlo.triangular_solve":
        rank = len(relation.results[0])
        left_out = frozenset((tensor, d) for tensor in range(3) for d in (rank - 2, rank - 1))
    if op.name == "stablehlo.reshape":
        left_out = frozenset[Dim]().union(*(f.dims for f in ours if f.treatment == "whole"))
    theirs, ours = (
        {f for f in shared if f.size != 1 and not f.dims & left_out} for shared in (theirs, ours)
    )
    return theirs - ours, ours - theirs


class _Translation:
    """The factors of one op, as Shardy has them."""

    def __init__(self, op: ir.Operation, relation: OpDimensions) -> None:
        self._name = op.name.removeprefix("stablehlo.")
        self._relation = relation
        self._shapes = (*relation.operands, *relation.results)

    def factors(self) -> Iterator[Shared]:
        if self._name == "concatenate":
            yield self._joined()
        for factor in self._relation.factors:
            yield from self._translated(factor)

    def _dims(self, operands: Iterable[Along], results: Iterable[Along] = ()) -> Dims:
        count = len(self._relation.operands)
        own = [(along.tensor, along.dim) for along in operands if along.step]
        return frozenset([*own, *((count + along.tensor, along.dim) for along in results)])

    def _size(self, along: Along) -> int:
        return self._relation.operands[along.tensor][along.dim]

    def _joined(self) -> Shared:
        moved = [f for f in self._relation.factors if f.role is FactorRole.MOVED]
        dims = [self._dims(factor.operands, factor.results) for factor in moved]
        return Shared(sum(f.size for f in moved), "whole", frozenset[Dim]().union(*dims))

    def _translated(self, factor: Factor) -> Iterator[Shared]:
        both = self._dims(factor.operands, factor.results)
        first = next(iter(factor.operands), None)
        whole = [Shared(self._shapes[t][d], "whole", frozenset({(t, d)})) for t, d in both]
        match factor.role, self._name:
            case FactorRole.EXCHANGED, _:
                yield from whole
            case FactorRole.WINDOWED, "reduce_window":
                if factor.results:
                    yield Shared(factor.size, "whole", both)
            case FactorRole.WINDOWED, "select_and_scatter":
                yield from self._unpooled(factor)
            case (FactorRole.WINDOWED, "convolution") | (FactorRole.MOVED, "concatenate"):
                pass
            case ((FactorRole.MOVED | FactorRole.INDEXED), ("slice" | "pad" | "dynamic_slice")):
                assert first is not None
                yield Shared(self._size(first), "whole", both)
            case ((FactorRole.MOVED | FactorRole.INDEXED), "gather"):
                assert first is not None
                if factor.size == 1:
                    yield Shared(self._size(first), "reduced", self._dims(factor.operands))
                else:
                    yield Shared(self._size(first), "whole", both)
            case FactorRole.INDEXED, "dynamic_update_slice":
                if first is not None and first.tensor == 1:
                    both = self._dims(factor.operands)
                yield Shared(factor.size, "whole", both)
            case ((FactorRole.MOVED | FactorRole.INDEXED), "scatter"):
                yield from self._put(factor)
            case _:
                yield Shared(factor.size, _TREATMENTS.get(factor.role, "whole"), both)

    def _unpooled(self, factor: Factor) -> Iterator[Shared]:
        if len(factor.operands) == 1:
            return
        operand, source = factor.operands
        yield Shared(factor.size, "whole", self._dims([source]))
        yield Shared(self._size(operand), "whole", self._dims([operand], factor.results))

    def _put(self, factor: Factor) -> Iterator[Shared]:
        """A dimension of a scatter's operand, or of its updates, that is no batching one."""
        results = len(self._relation.results)
        windows = {
            along.dim: (other, other.size == self._relation.results[0][along.dim])
            for other in self._relation.factors
            if other.operands and other.operands[0].tensor > results
            for along in other.results
        }
        if factor.operands[0].tensor > results:
            _, is_full = windows[factor.results[0].dim]
            if not is_full:
                yield Shared(factor.size, "whole", self._dims(factor.operands))
            return
        window, is_full = windows.get(factor.operands[0].dim, (None, False))
        both = self._dims(factor.operands, factor.results)
        if window is None:
            yield Shared(factor.size, "passed through", both)
        elif is_full:
            yield Shared(factor.size, "passed through", both | self._dims(window.operands))
        else:
            yield Shared(factor.size, "whole", both)


def _spatial_dims(convolution: ir.Operation) -> Dims:
    numbers = conv_numbers(convolution)
    spatial = (numbers.input_spatial, numbers.kernel_spatial, numbers.output_spatial)
    return frozenset((tensor, dim) for tensor, dims in enumerate(spatial) for dim in dims)
