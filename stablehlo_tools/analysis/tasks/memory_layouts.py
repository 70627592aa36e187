"""Finds the order in which XLA:GPU keeps the dimensions of values in memory, and its copies.

A matrix product writes its batch dimensions, then those of one operand, then those of the other. A
transpose only renames dimensions. Elementwise ops keep the order of their operands. XLA transposes
a value in memory in three cases: two operands of one op have different orders; the batch, free or
contracted dimensions of a matrix product's operand are not contiguous; a loop expects a value in
another order than it has. (xla/service/gpu/transforms/layout_assignment, matmul_utils)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stablehlo_tools import bindings
from stablehlo_tools.analysis.tasks.nodes import Ref
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers, static_shape

LEAST_BYTES = 2.0**20  # values smaller than this are not followed

type _Dims = tuple[int, ...]
type _Copy = Callable[[Ref, bool], Ref]  # (value, in place) -> the value in another order


@dataclass(slots=True)
class _LayoutOrders:
    """The possible orders of a value, major to minor; none while nothing is known.

    `first` is the first value computed from a matrix product. Its kernel may write another order,
    until a reader has `settled` on the order of the product.
    """

    options: list[_Dims] = field(default_factory=list[_Dims])
    product: Ref | None = None
    first: Ref | None = None
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Layout:
    """The order of a value, as a renaming of the dimensions of a choice.

    `names` has, for each dimension of the choice, the value's dimension, or None if it has none.
    """

    choice: _LayoutOrders
    names: tuple[int | None, ...]
    shape: _Dims

    def orders(self) -> list[_Dims]:
        """Returns the possible orders of the value's dimensions, without those of size 1."""
        return list(dict.fromkeys(map(self._value_order, self.choice.options)))

    def keep(self, order: _Dims) -> bool:
        """Settles on an order; returns False if it is not possible."""
        if not self.choice.options:
            places = {name: place for place, name in enumerate(self.names) if name is not None}
            if any(dim not in places for dim in order):
                return True
            first = [p for p, name in enumerate(self.names) if name is None or name not in order]
            self.choice.options = [(*first, *(places[dim] for dim in order))]
            return True
        left = [option for option in self.choice.options if self._value_order(option) == order]
        if left:
            self.choice.options = left
            self.choice.settled = True
        return bool(left)

    def rename(self, order: _Dims) -> None:
        """Changes the value, and all values made of it, to an order that was not possible."""
        (option, *_) = self.choice.options
        places = {self.names[dim]: dim for dim in option}
        rest = [dim for dim in option if self.names[dim] not in order]
        self.choice.options = [(*rest, *(places[name] for name in order))]

    def map_dims(self, change: Sequence[int | None], shape: Sequence[int]) -> _Layout:
        """Returns the layout of a value of a shape, given its dimension for each of this one's."""
        names = tuple(None if name is None else change[name] for name in self.names)
        return _Layout(self.choice, names, tuple(shape))

    def _value_order(self, option: _Dims) -> _Dims:
        named = (self.names[dim] for dim in option)
        return tuple(name for name in named if name is not None and self.shape[name] > 1)


class Layouts:
    """The layouts of the values of one block."""

    def __init__(self) -> None:
        self._of: dict[Ref, _Layout] = {}
        self._copies: dict[tuple[Ref, _Dims], Ref] = {}

    def begin(self, ref: Ref, type_: ir.Type, *, fixed: bool) -> None:
        """Follows a value that comes from outside.

        It is in row-major order if `fixed`, as the arguments of a program are. Otherwise the loop's
        body may choose.
        """
        shape = static_shape(type_)
        if shape is not None and math.prod(shape) >= LEAST_BYTES:
            dims = tuple(range(len(shape)))
            self._of[ref] = _Layout(_LayoutOrders([dims] if fixed else []), dims, shape)

    def forget(self, begin: int) -> None:
        """Forgets the values of nodes from an index on."""
        self._of = {ref: layout for ref, layout in self._of.items() if ref[0] < begin}
        self._copies = {key: ref for key, ref in self._copies.items() if ref[0] < begin}

    def into(self, source: Ref, inner: Layouts, inside: Ref, copy: _Copy) -> Ref:
        """Returns an operand of a loop, or a yield of its body, in the body's order of `inside`."""
        wanted = inner._of.get(inside)
        if source not in self._of or wanted is None or not wanted.orders():
            return source
        return self._put_in_order(source, wanted.orders()[0], copy)

    def follow_loop_result(self, result: Ref, inner: Layouts, argument: Ref, source: Ref) -> None:
        """Gives a loop's result the order of the carry in its body, or of its initial value."""
        wanted = inner._of.get(argument)
        layout = wanted if wanted is not None and wanted.orders() else self._of.get(source)
        if layout is not None:
            self._of[result] = layout

    def follow_barrier(self, source: Ref, ref: Ref) -> None:
        """Follows a value through a barrier."""
        if source in self._of:
            self._of[ref] = self._of[source]

    def operands(
        self, op: ir.Operation, name: str, sources: Sequence[Ref], copy: _Copy
    ) -> list[Ref]:
        """Returns the operands of an op, copied if it cannot read them in their order."""
        if name == "dot_general":
            return self._factors(op, sources, copy)
        followed = [number for number, ref in enumerate(sources) if ref in self._of]
        if name == "dynamic_update_slice":
            followed = [number for number in followed if number < 2]
        elif name not in ("concatenate", "reduce") and len(op.results):
            shape = static_shape(op.results[0].type)
            followed = [n for n in followed if self._of[sources[n]].shape == shape]
        ordered = list(sources)
        if len(followed) < 2:
            return ordered
        first, *others = sorted(followed, key=lambda number: sources[number])
        for number in others:
            ordered[number] = self._beside(sources[first], sources[number], copy)
        return ordered

    def result(self, op: ir.Operation, name: str, sources: Sequence[Ref], ref: Ref) -> None:
        """Follows the result of an op."""
        shape = static_shape(op.results[0].type) if len(op.results) else None
        if shape is None or math.prod(shape) < LEAST_BYTES:
            return
        if name == "dot_general":
            # A matrix product can write the rows of either operand last.
            dims = bindings.dot_dimension_numbers(op.attributes["dot_dimension_numbers"])
            batch = len(dims.lhs_batching_dimensions)
            left = ir.ShapedType(op.operands[0].type).rank - len(dims.lhs_contracting_dimensions)
            every = tuple(range(len(shape)))
            orders = [every, (*every[:batch], *every[left:], *every[batch:left])]
            self._of[ref] = _Layout(_LayoutOrders(orders, product=ref), every, shape)
            return
        if name == "broadcast_in_dim":
            operand = static_shape(op.operands[0].type)
            if operand is not None and math.prod(shape) == math.prod(operand):
                name = "reshape"
        known = sorted(source for source in sources if source in self._of)
        if not known:
            return
        layout = self._of[known[0]]
        if name == "transpose":
            permutation = integers(op, "permutation")
            change = [permutation.index(d) for d in range(len(permutation))]
            self._of[ref] = layout.map_dims(change, shape)
        elif name == "reshape":
            reshaped = _reshape_layout(layout, shape)
            if reshaped is not None:
                self._of[ref] = reshaped
        elif name == "reduce":
            gone = integers(op, "dimensions")
            left = [d for d in range(len(layout.shape)) if d not in gone]
            change = [left.index(d) if d in left else None for d in range(len(layout.shape))]
            self._of[ref] = layout.map_dims(change, shape)
        elif name == "dynamic_update_slice" and known[0] != sources[0]:
            # The order of the array that these rows are written into is unknown.
            options: list[_Dims] = []
            for order in layout.orders()[:1]:
                others = (dim for dim in range(len(shape)) if dim not in order)
                options.append((*others, *order))
            self._of[ref] = _Layout(_LayoutOrders(options), tuple(range(len(shape))), shape)
        elif len(shape) == len(layout.shape) and name != "broadcast_in_dim":
            self._of[ref] = _Layout(layout.choice, layout.names, shape)
            if layout.choice.product == known[0] and layout.choice.first is None:
                layout.choice.first = ref

    def _factors(self, op: ir.Operation, sources: Sequence[Ref], copy: _Copy) -> list[Ref]:
        dims = bindings.dot_dimension_numbers(op.attributes["dot_dimension_numbers"])
        sides = (
            (dims.lhs_batching_dimensions, dims.lhs_contracting_dimensions),
            (dims.rhs_batching_dimensions, dims.rhs_contracting_dimensions),
        )
        ordered: list[Ref] = []
        for ref, (batch, contracted) in zip(sources, sides, strict=True):
            layout = self._of.get(ref)
            if layout is None or not layout.orders():
                ordered.append(ref)
                continue
            free = [d for d in range(len(layout.shape)) if d not in (*batch, *contracted)]
            groups = [
                tuple(d for d in group if layout.shape[d] > 1)
                for group in (batch, free, contracted)
            ]
            row_major = tuple(d for d, size in enumerate(layout.shape) if size > 1)
            possible = [
                *layout.orders(),
                *(order for copied, order in self._copies if copied == ref),
                row_major,
                (*groups[0], *groups[1], *groups[2]),
            ]
            # Orders that need no new copy come first.
            order = next(order for order in possible if _lies_together(order, groups))
            ordered.append(self._put_in_order(ref, order, copy))
        return ordered

    def _beside(self, first: Ref, ref: Ref, copy: _Copy) -> Ref:
        """Returns a value in the order of another operand of the same op."""
        ours, theirs = self._of[ref], self._of[first]
        if not theirs.orders():
            if ours.orders():
                theirs.keep(ours.orders()[0])
            return ref
        if not ours.orders():
            ours.keep(theirs.orders()[0])
            return ref
        shared = [order for order in theirs.orders() if order in ours.orders()]
        if shared:
            theirs.keep(shared[0])
            ours.keep(shared[0])
            return ref
        theirs.keep(theirs.orders()[0])
        return self._put_in_order(ref, theirs.orders()[0], copy)

    def _put_in_order(self, ref: Ref, order: _Dims, copy: _Copy) -> Ref:
        """Returns a value in an order, copied if that order is not possible."""
        layout = self._of[ref]
        if set(order) != set(layout.orders()[0] if layout.orders() else order):
            return ref  # of another shape
        if layout.keep(order):
            return ref
        choice = layout.choice
        if choice.first is not None and not choice.settled:
            copy(choice.first, True)
            layout.rename(order)
            choice.settled = True
            return ref
        layout.keep(layout.orders()[0])
        if (ref, order) not in self._copies:
            made = copy(ref, False)
            ones = (d for d in range(len(layout.shape)) if d not in order)
            dims = tuple(range(len(layout.shape)))
            self._of[made] = _Layout(_LayoutOrders([(*ones, *order)]), dims, layout.shape)
            self._copies[ref, order] = made
        return self._copies[ref, order]


def _reshape_layout(layout: _Layout, shape: _Dims) -> _Layout | None:
    """Returns the layout after a reshape; None if no order is possible.

    Possible orders keep dimensions together that are split or merged.
    """
    groups = _groups(layout.shape, shape)
    if groups is None:
        return None
    if all(len(before) <= 1 and len(after) <= 1 for before, after in groups):
        change: list[int | None] = [None] * len(layout.shape)
        for before, after in groups:
            if before and after:
                change[before[0]] = after[0]
        return layout.map_dims(change, shape)
    options: list[_Dims] = []
    for order in layout.orders():
        made: list[int] = []
        rest = list(order)
        while rest:
            before, after = next(group for group in groups if rest[0] in group[0])
            if tuple(rest[: len(before)]) != before:
                break
            made += after
            del rest[: len(before)]
        else:
            ones = (d for d in range(len(shape)) if d not in made)
            options.append((*ones, *made))
    if not options:
        return None
    return _Layout(_LayoutOrders(options), tuple(range(len(shape))), shape)


def _groups(before: _Dims, after: _Dims) -> list[tuple[_Dims, _Dims]] | None:
    """Returns the groups of dimensions, of size above 1, that become one another in a reshape."""
    groups: list[tuple[_Dims, _Dims]] = []
    left = [d for d, size in enumerate(before) if size > 1]
    right = [d for d, size in enumerate(after) if size > 1]
    while left and right:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(before[d] for d in ours)) != (
            b := math.prod(after[d] for d in theirs)
        ):
            pending, taken = (left, ours) if a < b else (right, theirs)
            if not pending:
                return None
            taken.append(pending.pop(0))
        groups.append((tuple(ours), tuple(theirs)))
    return groups if not left and not right else None


def _lies_together(order: _Dims, groups: Sequence[_Dims]) -> bool:
    """Returns True if each group of dimensions is contiguous, in order, and no batch is last."""
    places = {dim: place for place, dim in enumerate(order)}
    for group in groups:
        at = [places.get(dim, -1) for dim in group]
        if any(b - a != 1 for a, b in pairwise(at)):
            return False
    batch, free, contracted = groups
    return not batch or not (free or contracted) or order[-1] not in batch
