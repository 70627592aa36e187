"""Where the elements of a value come from, past everything that only moves them.

A value is asked for on one rank, in one iteration of the loop (a *tick*; -1 is outside of the
loop), as a box of elements. Ops that move elements by known indices are followed, through carries
into earlier ticks and through collectives to other ranks, until what was asked for is in pieces: of
what an op computed, of a value from outside, of a constant. What no output asks for, such as the
garbage of ramp-up, is never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    ADD,
    ALL_GATHER,
    BROADCAST,
    COLLECTIVE_PERMUTE,
    RESHAPE,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, is_splat, producer, splat_of, value_text
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.moves import BETWEEN_RANKS, follow_move, merges
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    Computed,
    InterleavedError,
    Known,
    Outside,
    Piece,
    Splat,
    UnresolvedError,
    View,
    zeros,
)

Answer = Sequence[BoxQuery] | Piece

_IDS = ops_with(Trait.DEVICE_ID)
_MOST_PIECES = 1 << 16  # of one value


class Tracer:
    """Follows values of a region."""

    def __init__(self, region: LoopRegion) -> None:
        self.region = region
        self._found: dict[tuple[ir.Value, int, int, Box], list[Piece]] = {}
        self._computing: set[ir.Value] = set()  # reshapes that interleave what they move

    def pieces(self, value: ir.Value, rank: int, tick: int, box: Box) -> list[Piece]:
        """What a box of a value consists of, in order of the targets. Raises UnresolvedError.

        It is asked for many times over: each sum asks for all of its terms, which are sums.
        """
        key = value, rank, tick, box
        if key not in self._found:
            query = BoxQuery(value, rank, tick, box, View(Box.whole(box.sizes)))
            self._found[key] = self.followed([query])
        return list(self._found[key])

    def followed(self, queries: Sequence[BoxQuery]) -> list[Piece]:
        """What some boxes consist of, in order of the targets. Raises UnresolvedError.

        A reshape outside of the loop that leaves no box of what is moved counts as computing.
        """
        while True:
            try:
                return self._all_followed(queries)
            except InterleavedError as error:
                if error.result is None or error.result in self._computing:
                    raise
                self._computing.add(error.result)

    def _all_followed(self, queries: Sequence[BoxQuery]) -> list[Piece]:
        pending = list(queries)
        done: list[Piece] = []
        while pending:
            query = pending.pop()
            answer = self._followed(query)
            if isinstance(answer, Piece):
                try:
                    done += self._beyond(answer)
                except InterleavedError as error:
                    raise InterleavedError(error.op, query.reshaped or error.result) from None
            else:
                pending += answer
            if len(done) + len(pending) > _MOST_PIECES:
                raise UnresolvedError("what it holds is in too many pieces", self.region.loop, 4)
        return sorted(done, key=lambda piece: piece.view.target.starts)

    def leaving(self, result: int, box: Box, view: View) -> list[BoxQuery]:
        """The queries for a box of a result of the region: of each rank's shard of it, where the
        ranks divide the result."""
        region = self.region
        if region.manual is None:
            return [BoxQuery(region.loop.results[result], 0, -1, box, view)]
        end, dim = region.returned(result), region.leaving_dim(result)
        whole = BoxQuery(end, 0, -1, box, view)
        if dim is None:
            return [whole]
        size = shape_of(end)[dim]
        queries: list[BoxQuery] = []
        for part in box.cut(dim, [rank * size for rank in range(region.ranks.count)]):
            rank = part.starts[dim] // size
            shard = part.along(dim, part.starts[dim] - rank * size, part.sizes[dim])
            cut = whole.part(region.manual, part)
            queries.append(replace(cut, rank=rank, box=shard))
        return queries

    def left(self, result: int, box: Box) -> list[Piece]:
        """What a box of a result of the region consists of. Raises UnresolvedError."""
        return self.followed(self.leaving(result, box, View(Box.whole(box.sizes))))

    def _beyond(self, piece: Piece) -> list[Piece]:
        """What a piece that tracing ends in consists of: itself."""
        return [_first_of_repeated(piece)]

    def _known(self, value: ir.Value, query: BoxQuery) -> Values | None:
        """A value of integers on the rank and in the tick of a query, where it is known."""
        return self.region.integers_at(value, query.rank, query.tick)

    def _followed(self, query: BoxQuery) -> Answer:
        """One step back: known integers, carries, results of the loop, constants, arguments from
        outside, moves, and what an op computed."""
        region, value = self.region, query.value
        known = known_piece(query, self._known(value, query))
        if known is not None:
            return known
        carry = region.argument_number(value)
        if carry is not None:
            if query.tick <= 0 or carry in region.invariant:
                return [query.in_tick(region.loop.operands[carry], -1)]
            return [query.in_tick(region.ends[carry], query.tick - 1)]
        op = producer(value)
        if op is not None and op == region.loop:
            result = ir.OpResult(value).result_number
            return [query.in_tick(region.ends[result], region.ticks - 1)]
        if op is None or not region.is_inside(op):
            return Piece(Outside(value), region.unsharded(value, query.rank, query.box), query.view)
        if op.name in _IDS:
            raise UnresolvedError(f"{op.name} is not the same on all devices of a stage", op, 3)
        tick = query.tick if region.is_in_loop(op) else -1
        query = replace(query, tick=tick)
        moved = self._moved(op, query)
        if moved is not None:
            return moved
        # The same in every tick, or on every rank: one source, so that pieces compare equal.
        if tick >= 0 and not region.is_varying(op):
            tick = -1
        rank = query.rank if tick >= 0 or region.differs(value) else 0
        return Piece(Computed(value, rank, tick), query.box, query.view)

    def _moved(self, op: ir.Operation, query: BoxQuery) -> Answer | None:
        """Where an op has moved the elements from; None where it computes them."""
        if op.name == RESHAPE and query.tick < 0:
            if query.value in self._computing:
                return None
            if merges(op):
                query = replace(query, reshaped=query.value)
        if op.name not in BETWEEN_RANKS:
            return follow_move(op, query, lambda value: self._known(value, query))
        groups, ranks = self.region.groups(op), self.region.ranks
        if groups is None or not ranks.moves(groups):
            return None
        if op.name == COLLECTIVE_PERMUTE:
            return self._permuted(op, query, groups)
        own = next((g for g in groups if ranks.devices[query.rank] in g), ())
        members = [ranks.rank_of[device] for device in own]
        if [ranks.devices[rank] for rank in members] != list(own):
            raise UnresolvedError("it joins devices along two axes of the mesh at once", op, 3)
        if op.name == ALL_GATHER:
            operand = op.operands[ir.OpResult(query.value).result_number]
            dim = integer(op, "all_gather_dim")
            size = shape_of(operand)[dim]
            queries: list[BoxQuery] = []
            for box in query.box.cut(dim, [size * number for number in range(len(members))]):
                number = box.starts[dim] // size
                inner = box.along(dim, box.starts[dim] - number * size, box.sizes[dim])
                queries.append(
                    replace(query.part(op, box).at(operand, inner), rank=members[number])
                )
            return queries
        return self._reduced(op, query, members)

    def _permuted(
        self, op: ir.Operation, query: BoxQuery, pairs: Sequence[Sequence[int]]
    ) -> Answer:
        """What a rank receives, another has sent; or zeros, where none has."""
        ranks = self.region.ranks
        sources = {target: source for source, target in pairs}
        source = sources.get(ranks.devices[query.rank])
        sending = None if source is None else ranks.rank_of[source]
        for device, rank in enumerate(ranks.rank_of):
            other = sources.get(device)
            if rank == query.rank and sending != (None if other is None else ranks.rank_of[other]):
                raise UnresolvedError("the devices of one rank receive from different ranks", op, 3)
        if source is not None and ranks.devices[ranks.rank_of[source]] != source:
            raise UnresolvedError("it moves elements along two axes of the mesh at once", op, 3)
        if sending is None:
            return query.ending_in(zeros(element_of(query.value)))
        return [replace(query, value=op.operands[0], rank=sending)]

    def _reduced(self, op: ir.Operation, query: BoxQuery, members: Sequence[int]) -> Answer:
        """A sum in which each element is zero on all ranks but one: a pipeline hands its outputs
        from the last rank to all so."""
        if not adds(Combining(op).combiner):
            raise UnresolvedError(
                "it combines what several ranks hold in another way than by a sum", op, 3
            )
        operand = op.operands[ir.OpResult(query.value).result_number]
        terms = [replace(query, value=operand, rank=rank) for rank in members]
        queries = self.only_nonzero(op, terms)
        if queries is None:
            raise UnresolvedError(
                "it adds up what several ranks hold; jnp.where masks, zero times NaN does not",
                op,
                4,
            )
        return queries

    def only_nonzero(self, op: ir.Operation, terms: Sequence[BoxQuery]) -> list[BoxQuery] | None:
        """`only_nonzero` of terms that this follows. Raises UnresolvedError."""

        def pieces(term: BoxQuery) -> list[Piece]:
            return self.pieces(term.value, term.rank, term.tick, term.box)

        return only_nonzero(op, terms, pieces)


def known_piece(query: BoxQuery, integers: Values | None) -> Piece | None:
    """The answer for a value of known integers, or for a constant of one number."""
    if integers is not None:
        return query.ending_in(Known.of(integers[query.box.slices()]))
    op = producer(query.value)
    if op is None or op.name not in CONSTANTS or not is_splat(op):
        return None
    text = value_text(op).rpartition(" : ")[0]
    element = str(element_of(query.value))
    return query.ending_in(Splat(text, element, splat_of(query.value) == 0))


def only_nonzero(
    op: ir.Operation, terms: Sequence[BoxQuery], pieces_of: Callable[[BoxQuery], Iterable[Piece]]
) -> list[BoxQuery] | None:
    """For each element of a box, the one of some terms that is not known to be zero; None where
    that may be several. Raises UnresolvedError.

    The terms ask for the same box; `pieces_of` says what that of one consists of.
    """
    nonzero = [[p.view.target for p in pieces_of(term) if not p.is_zero] for term in terms]
    holding = [number for number, boxes in enumerate(nonzero) if boxes] or [0]
    whole = terms[0].box
    parts = [whole]
    for number in holding[1:]:
        parts = cut_around(parts, (box.moved(whole.starts) for box in nonzero[number]))
    queries: list[BoxQuery] = []
    for part in parts:
        inner = part.relative_to(whole)
        holders = [number for number in holding if any(map(inner.overlaps, nonzero[number]))]
        if len(holders) > 1:
            return None
        queries.append(terms[holders[0] if holders else holding[0]].part(op, part))
    return queries


def _first_of_repeated(piece: Piece) -> Piece:
    """The piece; where a broadcast from outside repeats elements along a dimension, the first of
    them, so that pieces that are the same compare equal."""
    source = piece.source
    op = producer(source.value) if isinstance(source, Outside) else None
    if op is None or op.name != BROADCAST:
        return piece
    box, before = piece.box, shape_of(op.operands[0])
    taken = dict(zip(integers(op, "broadcast_dimensions"), before, strict=True))
    for dim, size in enumerate(box.sizes):
        if taken.get(dim, 1) == 1:
            box = box.along(dim, 0, size)
    return replace(piece, box=box)


def adds(reducer: ir.Block) -> bool:
    """Whether a reducer adds its arguments, with sharding constraints or without."""
    ops = [view.operation for view in reducer.operations]
    ops = [op for op in ops if op.name != SHARDING_CONSTRAINT]
    if [op.name for op in ops] != [ADD, "stablehlo.return"]:
        return False
    return set(ops[0].operands) == set(reducer.arguments)


def cut_around(boxes: Sequence[Box], others: Iterable[Box]) -> list[Box]:
    """Boxes cut so that none reaches over an edge of another one."""
    pieces = list(boxes)
    for by in others:
        for dim in range(len(by.sizes)):
            pieces = [p for box in pieces for p in box.cut(dim, [by.starts[dim], by.end(dim)])]
    return pieces
