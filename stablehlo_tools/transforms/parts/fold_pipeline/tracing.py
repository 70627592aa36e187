"""Traces the elements of a value back to their origin, past all ops that only move them.

A query names a rank, an iteration of the loop (a *tick*; -1 is outside of the loop) and a box of
elements. Ops that move elements by known indices are followed: through carries into earlier ticks,
and through collectives to other ranks. The trace ends in pieces of op results, of values from
outside and of constants. Values that no output depends on, such as the garbage of ramp-up, are
never visited.

Values that a pipeline keeps for its backward are traced on into the pipeline, so that both appear
as one region. Two constructs occur only in a backward:

A *merge* adds two cotangents of a stage's result: one from the next stage, and one from the result
that leaves the pipeline. If one of the two is known to be zero, in every tick and on every rank,
the addition only moves elements.

A *sum over ticks* is a carry to which every tick adds a term, such as the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    ADD,
    ALL_GATHER,
    BROADCAST,
    COLLECTIVE_PERMUTE,
    DIVIDE,
    REDUCE,
    RESHAPE,
    SCATTER,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, is_float, is_splat, producer, splat_of, value_text
from stablehlo_tools.ir.views import Combining, ManualComputation
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    BoxView,
    Computed,
    InterleavedError,
    Known,
    Outside,
    SourceBox,
    Splat,
    Summed,
    UnresolvedError,
    zeros,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import (
    BETWEEN_RANKS,
    MOVING,
    follow_move,
    is_reshaping_sum,
    merges,
    repeated_number,
)

Answer = Sequence[BoxQuery] | SourceBox

_IDS = ops_with(Trait.DEVICE_ID)
_MOST_PIECES = 1 << 16  # of one value


class Tracer:
    """Traces values of a region."""

    def __init__(self, region: LoopRegion) -> None:
        self.region = region
        self._found: dict[tuple[ir.Value, int, int, Box], list[SourceBox]] = {}
        self._computing: set[ir.Value] = set()  # reshapes that interleave the elements they move

    def pieces(self, value: ir.Value, rank: int, tick: int, box: Box) -> list[SourceBox]:
        """Returns the pieces of a box of a value, in order of their targets. Raises
        UnresolvedError.

        The result is cached: the same box is queried often, since each term of a sum is itself a
        sum.
        """
        key = value, rank, tick, box
        if key not in self._found:
            query = BoxQuery(value, rank, tick, box, BoxView(Box.whole(box.sizes)))
            self._found[key] = self.trace_boxes([query])
        return list(self._found[key])

    def trace_boxes(self, queries: Sequence[BoxQuery]) -> list[SourceBox]:
        """Returns the pieces of some boxes, in order of their targets. Raises UnresolvedError.

        A reshape outside of the loop that does not keep a box a box counts as computing.
        """
        while True:
            try:
                return self._all_followed(queries)
            except InterleavedError as error:
                if error.result is None or error.result in self._computing:
                    raise
                self._computing.add(error.result)

    def _all_followed(self, queries: Sequence[BoxQuery]) -> list[SourceBox]:
        pending = list(queries)
        done: list[SourceBox] = []
        while pending:
            query = pending.pop()
            answer = self._step_back(query)
            if isinstance(answer, SourceBox):
                try:
                    done += self._beyond(answer)
                except InterleavedError as error:
                    raise InterleavedError(error.op, query.reshaped or error.result) from None
            else:
                pending += answer
            if len(done) + len(pending) > _MOST_PIECES:
                raise UnresolvedError("a loop value has too many pieces", self.region.loop, 4)
        return sorted(done, key=lambda piece: piece.view.target.starts)

    def leaving(self, result: int, box: Box, view: BoxView) -> list[BoxQuery]:
        """Returns the queries for a box of a result of the region. If the ranks divide the result,
        there is one query for each rank's shard."""
        region = self.region
        if region.manual is None:
            return [BoxQuery(region.loop.results[result], 0, -1, box, view)]
        end, dim = region.yielded_shard(result), region.leaving_dim(result)
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

    def left(self, result: int, box: Box) -> list[SourceBox]:
        """Returns the pieces of a box of a result of the region. Raises UnresolvedError."""
        return self.trace_boxes(self.leaving(result, box, BoxView(Box.whole(box.sizes))))

    def _beyond(self, piece: SourceBox) -> list[SourceBox]:
        """Returns the pieces of a piece that a trace ends in: itself. A backward overrides this."""
        return [_first_of_repeated(piece)]

    def _known(self, value: ir.Value, query: BoxQuery) -> Values | None:
        """Returns an integer value on the rank and in the tick of a query; None if it is
        unknown."""
        return self.region.integers_at(value, query.rank, query.tick)

    def _step_back(self, query: BoxQuery) -> Answer:
        """Goes one step back: through known integers, carries, results of the loop, constants,
        arguments from outside and moves, or to an op that computes the value."""
        region, value = self.region, query.value
        known = known_piece(query, self._known(value, query))
        if known is not None:
            return known
        carry = region.argument_number(value)
        if carry is not None:
            # In the first tick a carry is the operand of the loop; an invariant carry always is.
            if query.tick <= 0 or carry in region.invariant:
                return [query.in_tick(region.loop.operands[carry], -1)]
            return [query.in_tick(region.ends[carry], query.tick - 1)]
        op = producer(value)
        if op is not None and op == region.loop:
            result = ir.OpResult(value).result_number
            return [query.in_tick(region.ends[result], region.ticks - 1)]
        if op is None or not region.is_inside(op):
            return SourceBox(
                Outside(value), region.unshard_box(value, query.rank, query.box), query.view
            )
        if op.name in _IDS:
            raise UnresolvedError(f"{op.name} is not the same on all devices of a stage", op, 3)
        tick = query.tick if region.is_in_loop(op) else -1
        query = replace(query, tick=tick)
        moved = self._move_origin(op, query)
        if moved is not None:
            return moved
        # The same in every tick, or on every rank: use one source, so that pieces compare equal.
        if tick >= 0 and not region.is_varying(op):
            tick = -1
        rank = query.rank if tick >= 0 or region.differs(value) else 0
        return SourceBox(Computed(value, rank, tick), query.box, query.view)

    def _move_origin(self, op: ir.Operation, query: BoxQuery) -> Answer | None:
        """Returns the origin of the elements that an op moves; None if it computes them."""
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
            return self._follow_permute(op, query, groups)
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
                    replace(query.part(op, box).in_value(operand, inner), rank=members[number])
                )
            return queries
        return self._follow_all_reduce(op, query, members)

    def _follow_permute(
        self, op: ir.Operation, query: BoxQuery, pairs: Sequence[Sequence[int]]
    ) -> Answer:
        """Follows a collective_permute to the sending rank; zeros if no rank sends to this one."""
        ranks = self.region.ranks
        sources = {target: source for source, target in pairs}
        source = sources.get(ranks.devices[query.rank])
        sending = None if source is None else ranks.rank_of[source]
        # The trace follows one device of a rank: all of them must receive from the same rank.
        for device, rank in enumerate(ranks.rank_of):
            other = sources.get(device)
            if rank == query.rank and sending != (None if other is None else ranks.rank_of[other]):
                raise UnresolvedError("the devices of one rank receive from different ranks", op, 3)
        if source is not None and ranks.devices[ranks.rank_of[source]] != source:
            raise UnresolvedError("it moves elements along two axes of the mesh at once", op, 3)
        if sending is None:
            return query.ending_in(zeros(element_of(query.value)))
        return [replace(query, value=op.operands[0], rank=sending)]

    def _follow_all_reduce(
        self, op: ir.Operation, query: BoxQuery, members: Sequence[int]
    ) -> Answer:
        """Follows a sum over ranks in which at most one rank holds a nonzero for each element.
        Pipelines use such an all_reduce to send their outputs from the last rank to all."""
        if not adds(Combining(op).combiner):
            raise UnresolvedError(
                "it combines values of several ranks by another reduction than a sum", op, 3
            )
        operand = op.operands[ir.OpResult(query.value).result_number]
        terms = [replace(query, value=operand, rank=rank) for rank in members]
        queries = self.only_nonzero(op, terms)
        if queries is None:
            raise UnresolvedError(
                "it adds values of several ranks: mask with jnp.where, as zero times NaN is NaN",
                op,
                4,
            )
        return queries

    def only_nonzero(self, op: ir.Operation, terms: Sequence[BoxQuery]) -> list[BoxQuery] | None:
        """Returns `only_nonzero` of terms that this tracer follows. Raises UnresolvedError."""

        def pieces(term: BoxQuery) -> list[SourceBox]:
            return self.pieces(term.value, term.rank, term.tick, term.box)

        return only_nonzero(op, terms, pieces)


def known_piece(query: BoxQuery, integers: Values | None) -> SourceBox | None:
    """Returns the answer for known integers or for a splat constant; None for any other value."""
    if integers is not None:
        return query.ending_in(Known.from_array(integers[query.box.slices()]))
    op = producer(query.value)
    if op is None or op.name not in CONSTANTS or not is_splat(op):
        return None
    text = value_text(op).rpartition(" : ")[0]
    element = str(element_of(query.value))
    return query.ending_in(Splat(text, element, splat_of(query.value) == 0))


def only_nonzero(
    op: ir.Operation,
    terms: Sequence[BoxQuery],
    pieces_of: Callable[[BoxQuery], Iterable[SourceBox]],
) -> list[BoxQuery] | None:
    """Returns queries that pick, for each element of a box, the only term not known to be zero.
    Returns None if several terms may be nonzero. Raises UnresolvedError.

    All terms query the same box; `pieces_of` returns the pieces of one term.
    """
    nonzero = [[p.view.target for p in pieces_of(term) if not p.is_zero] for term in terms]
    holding = [number for number, boxes in enumerate(nonzero) if boxes] or [0]
    whole = terms[0].box
    parts = [whole]
    for number in holding[1:]:
        parts = cut_around(parts, (box.shift_by(whole.starts) for box in nonzero[number]))
    queries: list[BoxQuery] = []
    for part in parts:
        inner = part.relative_to(whole)
        holders = [number for number in holding if any(map(inner.overlaps, nonzero[number]))]
        if len(holders) > 1:
            return None
        queries.append(terms[holders[0] if holders else holding[0]].part(op, part))
    return queries


def _first_of_repeated(piece: SourceBox) -> SourceBox:
    """Returns the piece. If a broadcast from outside repeats elements along a dimension, the piece
    starts at the first of them, so that equal pieces compare equal."""
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
    """Returns True if a reducer adds its arguments, with or without sharding constraints."""
    ops = [view.operation for view in reducer.operations]
    ops = [op for op in ops if op.name != SHARDING_CONSTRAINT]
    if [op.name for op in ops] != [ADD, "stablehlo.return"]:
        return False
    return set(ops[0].operands) == set(reducer.arguments)


def cut_around(boxes: Sequence[Box], others: Iterable[Box]) -> list[Box]:
    """Returns boxes cut so that none crosses an edge of another one."""
    pieces = list(boxes)
    for by in others:
        for dim in range(len(by.sizes)):
            pieces = [p for box in pieces for p in box.cut(dim, [by.starts[dim], by.end(dim)])]
    return pieces


_DEEPEST = 64  # ops in a row that are followed for zeros


class BackwardTracer(Tracer):
    """Traces values of a backward, and on into the pipeline `before` that it belongs to. `zeros`
    are boxes of values computed in ticks that are known to be zero."""

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
        """Returns True if, on all ranks in all ticks, at most one operand of an addition is
        nonzero. Values of the same tick may only be merged if the sum is passed on, not used in a
        stage."""
        return op.results[0] in self.merges

    def with_zeros(self, zeros: Mapping[Computed, Sequence[Box]]) -> BackwardTracer | None:
        """Returns a tracer that knows these boxes to be zero; None if they add no information."""
        other = BackwardTracer(self.region, self.before, zeros)
        more = zeros and not self._zeros
        return other if more or other.merges > self.merges else None

    @property
    def merges(self) -> set[ir.Value]:
        """The results of all merges."""
        if self._merges is None:
            self._merges = set()
            self._find_merges()
        return self._merges

    def _find_merges(self) -> None:
        """Assumes that all additions are merges, then removes those that contradict this.

        An operand of an addition depends on earlier additions of the tick, and on earlier ticks. So
        if every remaining addition is a merge given the others, all of them are. With known
        zeros, a removed addition may still be a merge: another one, removed with it, may have a
        result that is known to be zero. So each is tried once more.
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
            self._found.clear()  # these pieces were found with the removed additions as merges
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
        """Returns True if ops of the same tick only move a result, neither computing with it nor
        accumulating it. Other additions may use it: one in a stage is not a merge, and is refused
        later."""
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

    def _move_origin(self, op: ir.Operation, query: BoxQuery) -> Answer | None:
        if op.name == ADD and self.is_merge(op):
            return self.only_nonzero(
                op, [query.in_value(operand, query.box) for operand in op.operands]
            )
        moved = super()._move_origin(op, query)
        if moved is None and query.tick < 0 and self._vanishes(op, query):
            return query.ending_in(zeros(element_of(query.value)))
        return moved

    def _vanishes(self, op: ir.Operation, query: BoxQuery) -> bool:
        """Returns True if an op around the loop computes zero on a rank. Cotangents are zero on all
        ranks but the last, and so is all that is linear in them. Other factors are assumed to be
        finite, as in a stage."""
        if self._depth == _DEEPEST or not is_float(query.value.type):
            return False

        def is_zero(value: ir.Value) -> bool:
            # in the query's box if the shape is the same, else everywhere
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

    def _step_back(self, query: BoxQuery) -> Answer:
        # The value may be a sum over this many ticks.
        region, op = self.region, producer(query.value)
        if op is not None and op == region.loop:
            number, ticks = ir.OpResult(query.value).result_number, region.ticks
        else:
            number, ticks = region.argument_number(query.value), query.tick
        if number is None or number not in self._added or ticks < 1:
            return super()._step_back(query)
        start = self.pieces(region.loop.operands[number], query.rank, -1, query.box)
        if not all(piece.is_zero for piece in start):
            raise UnresolvedError(
                "the backward accumulates the results of its ticks from a value that is not zero",
                region.loop,
                6,
            )
        terms = [replace(query, value=self._added[number], tick=tick) for tick in range(ticks)]
        moved = self.only_nonzero(region.loop, terms)
        if moved is not None:
            return moved
        if ticks != region.ticks:
            raise UnresolvedError(
                "the backward uses a sum over only some of its ticks", region.loop, 6
            )
        return self._sum_over_ticks(query, terms)

    def _sum_over_ticks(self, query: BoxQuery, terms: Sequence[BoxQuery]) -> Answer:
        """Returns the sum over ticks of a query's terms: a sum of op results, if all ticks move
        theirs in the same way. If ticks add to different boxes, each box is followed separately: a
        stage adds the gradients of layers that it runs in turn to different rows."""
        held = {
            term.tick: tuple(
                piece.view.target.shift_by(query.box.starts)
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
            for piece in self.trace_boxes([term])
            if not piece.is_zero and isinstance(source := piece.source, Computed)
        }
        if len(moved) == 1:
            value, box, view, rank, is_own = moved.pop()
            if is_own and view.target == first.view.target and rank == first.rank:
                return SourceBox(Summed(value, rank, adding), box, view)
        return SourceBox(Summed(first.value, first.rank, tuple(held)), first.box, first.view)

    def _beyond(self, piece: SourceBox) -> list[SourceBox]:
        """Returns the pieces of a piece, traced on into the pipeline if it depends on it."""
        if isinstance(source := piece.source, Computed):
            if any(box.contains(piece.box) for box in self._zeros.get(source, ())):
                piece = piece.with_zeros(element_of(source.value))
            return super()._beyond(piece)
        if not isinstance(source, Outside):
            return super()._beyond(piece)

        def known(value: ir.Value) -> Values | None:
            return self.before.region.integers_at(value, 0, -1)

        done: list[SourceBox] = []
        value, manual = source.value, self.region.manual
        if manual is not None and value.owner == ManualComputation(manual).body:
            value = manual.operands[ir.BlockArgument(value).arg_number]
        pending = [BoxQuery(value, 0, -1, piece.box, piece.view)]
        while pending:
            query = pending.pop()
            op = producer(query.value)
            if op is not None and op == self._anchor:
                number = ir.OpResult(query.value).result_number
                done += self.before.trace_boxes(self.before.leaving(number, query.box, query.view))
                continue
            more = None
            if op is not None and self._reaches_pipeline(query.value):
                more = follow_move(op, query, known)
            if more is None and repeated_number(query.value) == 0:
                piece = SourceBox(Outside(query.value), query.box, query.view)
                done.append(piece.with_zeros(element_of(query.value)))
            elif more is None:
                done += super()._beyond(SourceBox(Outside(query.value), query.box, query.view))
            else:
                pending += more
        return done

    def _reaches_pipeline(self, value: ir.Value) -> bool:
        """Returns True if a value depends on a result of the pipeline."""
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
    """Returns groups of operands of an op: its result is zero if all operands of one group are."""
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
    """Returns the carries that an iteration only adds a term to, each with that term."""
    sums: dict[int, ir.Value] = {}
    for number, argument in enumerate(loop.arguments):
        op = producer(loop.ends[number])
        if op is None or op.name != ADD or op.block != loop.block or not is_float(argument.type):
            continue
        # Any other use would read the running sum.
        if len(list(argument.uses)) != 1 or len(list(op.results[0].uses)) != 1:
            continue
        if argument in op.operands and not loop.is_read_by_condition(number):
            sums[number] = next(v for v in op.operands if v != argument)
    return sums
