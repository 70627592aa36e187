"""Where the elements of a pipeline's backward come from: out of the pipeline, too.

What the ticks of a pipeline leave for its backward is followed on into the pipeline, so that both
are one region for whoever asks. Two things are only found in a backward:

A *merge* adds what only one of two ever holds: the cotangent of what a stage hands on to the next
one, and that of what leaves the pipeline. Where the other is known to be zero, in every tick and on
every rank, it only moves elements.

A *sum over ticks* is a carry that every tick adds something to, as the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, DIVIDE, REDUCE, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import is_float, producer
from stablehlo_tools.ir.views import Combining, ManualComputation
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.moves import (
    MOVING,
    follow_move,
    is_reshaping_sum,
    repeated_number,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    Computed,
    Outside,
    Piece,
    Summed,
    UnresolvedError,
    zeros,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Answer, Tracer, cut_around

_DEEPEST = 64  # ops in a row that are followed for zeros


class BackwardTracer(Tracer):
    """Follows values of a backward, and into the pipeline `before` that it belongs to. `zeros` are
    boxes of what ticks compute that are known to be zero."""

    def __init__(
        self,
        region: LoopRegion,
        before: Tracer,
        zeros: Mapping[Computed, Sequence[Box]] | None = None,
    ) -> None:
        super().__init__(region)
        self.before = before
        self._zeros = zeros or {}
        self._anchor = before.region.manual or before.region.loop
        self._merges: set[ir.Value] | None = None
        self._added = _sums(region)
        self._reaches: dict[ir.Value, bool] = {}
        self._depth = 0

    def is_merge(self, op: ir.Operation) -> bool:
        """Whether an addition in the loop adds zero to whatever is not zero, on all ranks in all
        ticks. What the same tick computes is only merged to be handed on, not in a stage."""
        return op.results[0] in self.merges

    def with_zeros(self, zeros: Mapping[Computed, Sequence[Box]]) -> BackwardTracer | None:
        """A tracer that knows these boxes to be zero; None where that tells no more."""
        other = BackwardTracer(self.region, self.before, zeros)
        more = zeros and not self._zeros
        return other if more or other.merges > self.merges else None

    @property
    def merges(self) -> set[ir.Value]:
        """What the merges give."""
        if self._merges is None:
            self._merges = set()
            self._find_merges()
        return self._merges

    def _find_merges(self) -> None:
        """Takes all additions for merges, and out again whichever is none if the others are.

        What an addition takes was made by those in front of it in the same tick, and in earlier
        ticks: where all that are left are merges if those are, they are. One that is taken out with
        another may still be one, as what the other gives is known to be zero: each is tried once
        more.
        """
        body = (view.operation for view in self.region.block.operations)
        merges = {
            op.results[0]: op for op in body if op.name == ADD and is_float(op.results[0].type)
        }
        candidates = dict(merges)
        self._merges = set(merges)
        failed = True
        while failed:
            failed = [value for value, op in merges.items() if not self._merges_always(op)]
            for value in failed:
                del merges[value]
            self._merges = set(merges)
            self._found.clear()  # what was found in the meantime took them for some
        for value, op in candidates.items() if self._zeros else ():
            if value in merges:
                continue
            self._merges = {*merges, value}
            if all(map(self._merges_always, [op, *merges.values()])):
                merges[value] = op
            self._merges = set(merges)
            self._found.clear()

    def _merges_always(self, op: ir.Operation) -> bool:
        region = self.region
        box = Box.whole(shape_of(op.results[0]))
        cells = ((rank, tick) for tick in range(region.ticks) for rank in range(region.ranks.count))
        try:
            return all(self._merges_at(op, box, rank, tick) for rank, tick in cells)
        except UnresolvedError:
            return False

    def _merges_at(self, op: ir.Operation, box: Box, rank: int, tick: int) -> bool:
        held: list[list[Box]] = []
        for operand in op.operands:
            pieces = [p for p in self.pieces(operand, rank, tick, box) if not p.is_zero]
            own = any(isinstance(p.source, Computed) and p.source.tick == tick for p in pieces)
            if own and not self._is_only_handed_on(op):
                return False
            held.append([piece.view.target for piece in pieces])
        first, second = held
        return not any(one.overlaps(other) for one in first for other in second)

    def _is_only_handed_on(self, op: ir.Operation) -> bool:
        """Whether nothing computes with a result in the same tick, nor adds it up. Other additions
        may take it: one that is no merge stands in a stage, which is refused then."""
        sums = [self.region.ends[number] for number in self._added]
        pending = [op]
        while pending:
            for use in pending.pop().results[0].uses:
                user = use.owner.operation
                moves = user.name in MOVING | {ADD} or is_reshaping_sum(user)
                if moves and len(user.results) == 1 and user.results[0] not in sums:
                    pending.append(user)
                elif user.name != "stablehlo.return":
                    return False
        return True

    def _moved(self, op: ir.Operation, query: BoxQuery) -> Answer | None:
        if op.name == ADD and self.is_merge(op):
            return self.only_nonzero(op, [query.at(operand, query.box) for operand in op.operands])
        moved = super()._moved(op, query)
        if moved is None and query.tick < 0 and self._vanishes(op, query):
            return query.ending_in(zeros(element_of(query.value)))
        return moved

    def _vanishes(self, op: ir.Operation, query: BoxQuery) -> bool:
        """Whether what an op around the loop computes is zero on a rank, as cotangents are on all
        but the last, and what is linear in them: other factors are taken to be finite, as in a
        stage."""
        if self._depth == _DEEPEST or not is_float(query.value.type):
            return False

        def is_zero(value: ir.Value) -> bool:
            # of the same shape, in the places of the query, else everywhere
            shape = shape_of(value)
            box = query.box if shape == shape_of(query.value) else Box.whole(shape)
            return all(piece.is_zero for piece in self.pieces(value, query.rank, -1, box))

        self._depth += 1
        try:
            return any(bool(factors) and all(map(is_zero, factors)) for factors in _vanishing(op))
        except UnresolvedError:
            return False
        finally:
            self._depth -= 1

    def _followed(self, query: BoxQuery) -> Answer:
        # The value may be a sum over so many ticks.
        region, op = self.region, producer(query.value)
        if op is not None and op == region.loop:
            number, ticks = ir.OpResult(query.value).result_number, region.ticks
        else:
            number, ticks = region.argument_number(query.value), query.tick
        if number is None or number not in self._added or ticks < 1:
            return super()._followed(query)
        start = self.pieces(region.loop.operands[number], query.rank, -1, query.box)
        if not all(piece.is_zero for piece in start):
            raise UnresolvedError(
                "the backward adds up what its ticks compute to what is not zero before",
                region.loop,
                6,
            )
        terms = [replace(query, value=self._added[number], tick=tick) for tick in range(ticks)]
        moved = self.only_nonzero(region.loop, terms)
        if moved is not None:
            return moved
        if ticks != region.ticks:
            raise UnresolvedError(
                "the backward uses a sum over some of its ticks only", region.loop, 6
            )
        return self._summed(query, terms)

    def _summed(self, query: BoxQuery, terms: Sequence[BoxQuery]) -> Answer:
        """The sum of what each tick has for a query: of what it has computed, where all have moved
        that alike. Where ticks add to different boxes, as a stage does to the gradients of the
        layers that it runs in turn, each box by itself."""
        held = {
            term.tick: tuple(
                piece.view.target.moved(query.box.starts)
                for piece in self.pieces(term.value, term.rank, term.tick, term.box)
                if not piece.is_zero
            )
            for term in terms
        }
        adding = tuple(tick for tick, boxes in held.items() if boxes)
        if len({held[tick] for tick in adding}) > 1:
            edges = dict.fromkeys(box for boxes in held.values() for box in boxes)
            parts = cut_around([query.box], edges)
            if len(parts) > 1:
                return [query.part(self.region.loop, part) for part in parts]
        first = terms[0]
        moved = {
            (source.value, piece.box, piece.view, source.rank, source.tick == term.tick)
            for term in terms
            for piece in self.followed([term])
            if not piece.is_zero and isinstance(source := piece.source, Computed)
        }
        if len(moved) == 1:
            value, box, view, rank, is_own = moved.pop()
            if is_own and view.target == first.view.target and rank == first.rank:
                return Piece(Summed(value, rank, adding), box, view)
        return Piece(Summed(first.value, first.rank, tuple(held)), first.box, first.view)

    def _beyond(self, piece: Piece) -> list[Piece]:
        """What a piece consists of in the pipeline, where it comes from there."""
        if isinstance(source := piece.source, Computed):
            if any(box.contains(piece.box) for box in self._zeros.get(source, ())):
                piece = piece.zeroed(element_of(source.value))
            return super()._beyond(piece)
        if not isinstance(source, Outside):
            return super()._beyond(piece)

        def known(value: ir.Value) -> Values | None:
            return self.before.region.integers_at(value, 0, -1)

        done: list[Piece] = []
        value, manual = source.value, self.region.manual
        if manual is not None and value.owner == ManualComputation(manual).body:
            value = manual.operands[ir.BlockArgument(value).arg_number]
        pending = [BoxQuery(value, 0, -1, piece.box, piece.view)]
        while pending:
            query = pending.pop()
            op = producer(query.value)
            if op is not None and op == self._anchor:
                number = ir.OpResult(query.value).result_number
                done += self.before.followed(self.before.leaving(number, query.box, query.view))
                continue
            more = None
            if op is not None and self._reaches_pipeline(query.value):
                more = follow_move(op, query, known)
            if more is None and repeated_number(query.value) == 0:
                piece = Piece(Outside(query.value), query.box, query.view)
                done.append(piece.zeroed(element_of(query.value)))
            elif more is None:
                done += super()._beyond(Piece(Outside(query.value), query.box, query.view))
            else:
                pending += more
        return done

    def _reaches_pipeline(self, value: ir.Value) -> bool:
        """Whether a value is made of what the pipeline leaves."""
        pending, seen = [value], set[ir.Value]()
        while pending:
            asked = pending.pop()
            op = producer(asked)
            if asked in seen or op is None:
                continue
            if op == self._anchor or self._reaches.get(asked, False):
                self._reaches[value] = True
                return True
            seen.add(asked)
            pending += [v for v in op.operands if v not in self._reaches or self._reaches[v]]
        self._reaches.update(dict.fromkeys(seen, False))
        return False


def _vanishing(op: ir.Operation) -> list[list[ir.Value]]:
    """Groups of operands of an op, where all of one group are zero, its result is."""
    operands = list(op.operands)
    if op.name in ops_with(Trait.LINEAR_IN_EACH):
        return [[operand] for operand in operands]
    if op.name in ops_with(Trait.LINEAR_IN_FIRST):
        return [operands[:1]]
    if op.name == DIVIDE:
        return [] if repeated_number(operands[1]) == 0 else [operands[:1]]
    of_all = op.name in ops_with_any(Trait.LINEAR_IN_ALL | Trait.ZERO_OF_ZERO | Trait.ZERO_OF_ZEROS)
    if op.name in (REDUCE, SCATTER) and len(op.results) == 1:
        of_all = reducer_kind(Combining(op).combiner) == "add"
    return [[operand for operand in operands if is_float(operand.type)]] if of_all else []


def _sums(loop: WhileLoop) -> dict[int, ir.Value]:
    """The carries that an iteration only adds something to, and what it adds."""
    sums: dict[int, ir.Value] = {}
    for number, argument in enumerate(loop.arguments):
        op = producer(loop.ends[number])
        if op is None or op.name != ADD or op.block != loop.block or not is_float(argument.type):
            continue
        if len(list(argument.uses)) != 1 or len(list(op.results[0].uses)) != 1:
            continue
        if argument in op.operands and not loop.is_read_by_condition(number):
            sums[number] = next(v for v in op.operands if v != argument)
    return sums
