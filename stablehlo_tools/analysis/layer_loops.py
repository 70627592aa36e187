"""Recognises a loop over layers, by what its body does with each carry.

A `while` that counts is such a loop if it takes slices of stacked weights, one row, or a fixed
number of rows, an iteration, in order or in reverse. Every other carry is a counter, a constant, a
stacked result that each iteration writes its rows of, or a flow: what iterations hand on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import LoopCarries, Rows
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import is_float, producer, unconstrained
from stablehlo_tools.ir.walk import is_inside

_ROW_RANK = 1  # a stack of rank 1 has scalars for rows: no weights, but a rate a layer


@dataclass(frozen=True)
class LayerLoop:
    """A `while` that runs `trips` times, through its stacks in order, or in reverse.

    `counters` gives what each iteration adds to a carry. `reads` and `writes` are stacks, at most
    one of each kind for a carry; a carry with both is read, a row at a time, before it is written.
    """

    op: ir.Operation
    trips: int
    reverse: bool
    counters: dict[int, int]
    constants: frozenset[int]
    reads: dict[int, Rows]
    writes: dict[int, Rows]
    flows: tuple[int, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The stacks that it reads whose rows may be weights: vectors of floats or matrices of
        anything, for weights may be quantised."""
        types = {carry: self.op.operands[carry].type for carry in self.reads}
        return tuple(
            carry
            for carry, type_ in types.items()
            if ir.RankedTensorType(type_).rank > (_ROW_RANK if is_float(type_) else _ROW_RANK + 1)
        )

    @property
    def block(self) -> ir.Block:
        """The block of an iteration."""
        return self.op.regions[1].blocks[0]


def layer_loops(block: ir.Block, effects: Effects) -> list[LayerLoop]:
    """The layer loops of a block and of loops in it, in the order of the text: an outer one before
    those in it.

    A loop around a layer loop whose weights stay the same for it is none: it goes over batches.
    """
    loops = list(_candidates(block, effects))
    return [outer for outer in loops if not any(_keeps_weights(outer, loop) for loop in loops)]


def _keeps_weights(outer: LayerLoop, inner: LayerLoop) -> bool:
    """Whether all weights of a loop come from outside of another one that it stands in."""
    if inner is outer or not is_inside(inner.op, outer.op):
        return False
    for carry in inner.weights:
        value = unconstrained(inner.op.operands[carry])
        maker = producer(value)
        if maker is not None and is_inside(maker, outer.op):
            return False
        is_carried = maker is None and value in list(outer.block.arguments)
        if is_carried and ir.BlockArgument(value).arg_number not in outer.constants:
            return False
    return True


def _candidates(block: ir.Block, effects: Effects) -> Iterator[LayerLoop]:
    for view in block.operations:
        op = view.operation
        loop = read_layer_loop(op, effects) if op.name == WHILE else None
        if loop is not None:
            yield loop
        for region in op.regions:
            for inner in region.blocks:
                yield from _candidates(inner, effects)


def read_layer_loop(
    loop: ir.Operation, effects: Effects, *, weights: bool = True
) -> LayerLoop | None:
    """The loop as a loop over layers; None where it takes no slices of stacked weights, or, if
    layers may share their `weights`, neither reads nor writes rows."""
    count = counted(loop, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1 or count.trips[0] < 2:
        return None
    layers = _layer_loop(LoopCarries(LoopBody(loop, effects), count.trips[0]))
    return layers if layers is not None and (layers.weights or not weights) else None


def _layer_loop(carries: LoopCarries) -> LayerLoop | None:
    body = carries.body
    reads: dict[int, Rows] = {}
    writes: dict[int, Rows] = {}
    for carry in range(len(body.arguments)):
        if carry in body.steps:
            continue
        stack = None if carry in body.invariant else carries.rows_written(carry)
        read = carries.rows_read(carry) if carry in body.invariant else stack and stack.read
        if read is not None:
            reads[carry] = read
        if stack is not None:
            writes[carry] = stack.written
    reverse = _direction(reads, writes)
    if reverse is None:
        return None
    known = {*body.steps, *body.invariant, *writes}
    return LayerLoop(
        body.loop,
        carries.trips,
        reverse,
        dict(body.steps),
        frozenset(body.invariant - reads.keys()),
        reads,
        writes,
        tuple(c for c in range(len(body.arguments)) if c not in known),
    )


def _direction(reads: dict[int, Rows], writes: dict[int, Rows]) -> bool | None:
    """Whether the stacks are gone through from the end; those that are read the other way are
    left out of `reads`. None where two are written in opposite directions, or there is none."""
    written = {rows.is_reverse for rows in writes.values()}
    if len(written) > 1 or not (reads or written):
        return None
    reverse = written.pop() if written else next(iter(reads.values())).is_reverse
    for carry in list(reads):
        if reads[carry].is_reverse != reverse:
            if carry in writes:
                return None
            del reads[carry]
    return reverse
