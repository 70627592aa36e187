"""The chain of stages that every microbatch goes through, read off what was traced.

An output consists of what some segment computed, once for each microbatch. Where such a segment
takes what it computed itself for the same microbatch, on another stage and in an earlier tick, it
is a stage, and the microbatch has gone through a chain of them. Chains of all microbatches must be
alike: then stage n takes the same weights in each, and they fold to one loop over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.fold_pipeline.rows import Rows, all_of, row_of
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segment, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Piece,
    UnresolvedError,
    ViewOp,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

Term = tuple[Piece, ...]


@dataclass(frozen=True)
class Instance:
    """A segment computed on a rank in a tick, for one row of stages that lie along a dimension."""

    rank: int
    tick: int
    row: int

    @property
    def stage(self) -> tuple[int, int]:
        """Where it is computed."""
        return self.rank, self.row


@dataclass(frozen=True)
class Link:
    """Input `input` of a stage is output `output` of the one before, by way of some ops."""

    input: int
    output: int
    ops: tuple[ViewOp, ...]


@dataclass(frozen=True)
class Chains:
    """The same `length` applications of a segment for each microbatch.

    `terms[m][n][i]` is what input i is for microbatch m in application n. `last[m]` is the last
    instance of microbatch m.
    """

    segment: Segment
    rows: Rows
    row_dim: int | None
    length: int
    links: tuple[Link, ...]
    terms: tuple[tuple[tuple[Term, ...], ...], ...]
    last: tuple[Instance, ...]
    stages: int

    @property
    def last_op(self) -> ir.Operation:
        """An op that computes what a stage hands on."""
        return _op(self.segment.outputs[0])

    def box(self, output: int, instance: Instance) -> Box:
        """The box of an output that an instance computes."""
        value = self.segment.outputs[output]
        whole = Box.whole(shape_of(value))
        if self.row_dim is None:
            return whole
        size = whole.sizes[self.row_dim] // self.rows.count
        return whole.along(self.row_dim, instance.row * size, size)


class ChainFinder:
    """Finds the chains that end in given pieces."""

    def __init__(self, tracer: Tracer, segments: Segments, scratch: Scratch) -> None:
        self._tracer = tracer
        self._segments = segments
        self._scratch = scratch
        self._rows: dict[tuple[tuple[ir.Value, ...], int | None, int], Rows] = {}
        self._terms: dict[tuple[tuple[ir.Value, ...], Instance], tuple[Term, ...]] = {}
        self.found_stages = 0

    def chains(self, ends: Sequence[tuple[Computed, Box]]) -> Chains:
        """The chains that end in what was computed, one a microbatch. Raises UnresolvedError."""
        source, box = ends[0]
        dim, count = _part(source, box)
        self._divide(source, _instance(source, box, dim), dim, count)
        lasts = [_instance(end, part, dim) for end, part in ends]
        outputs: tuple[ir.Value, ...] = (source.value,)
        while True:
            chain = self._chain(outputs, dim, count, lasts[0])
            more = self._together(outputs, dim, count, chain)
            if not more:
                break
            outputs = (*outputs, *more)
        return self._alike(outputs, dim, count, lasts)

    def _divide(self, source: Computed, last: Instance, dim: int | None, count: int) -> None:
        """Takes a stage out of what else is computed from it in the same tick: a head."""
        if source.tick < 0:
            return
        inputs = self._inputs((source.value,), dim, count, last)
        found = {
            piece.source.value
            for term in inputs
            for piece in term
            if isinstance(piece.source, Computed) and piece.source.tick >= 0
        }
        within = [v for v in found if self._segments.is_within(v, [source.value])]
        if within:
            self._segments.stop_at(within)
            self._rows, self._terms = {}, {}

    def _alike(
        self,
        outputs: tuple[ir.Value, ...],
        dim: int | None,
        count: int,
        lasts: Sequence[Instance],
    ) -> Chains:
        segment, rows = self._segment(outputs, dim, count)
        chains = [self._chain(outputs, dim, count, last) for last in lasts]
        lengths = {len(chain) for chain in chains}
        op = _op(outputs[0])
        if len(lengths) > 1:
            raise UnresolvedError(
                f"microbatches go through {min(lengths)} to {max(lengths)} stages: not all alike",
                op,
                5,
            )
        terms = tuple(
            tuple(self._inputs(outputs, dim, count, instance) for instance in chain)
            for chain in chains
        )
        links = self._links(segment, terms, dim, count, op)
        stages = len({instance.stage for chain in chains for instance in chain})
        if len(chains[0]) > 1:
            self.found_stages = max(self.found_stages, stages)
        return Chains(segment, rows, dim, lengths.pop(), links, terms, tuple(lasts), stages)

    def _segment(
        self, outputs: tuple[ir.Value, ...], dim: int | None, count: int
    ) -> tuple[Segment, Rows]:
        segment = self._segments.of(outputs)
        key = (outputs, dim, count)
        if key not in self._rows:
            self._rows[key] = (
                all_of(segment) if dim is None else row_of(segment, dim, count, self._scratch)
            )
        return segment, self._rows[key]

    def _inputs(
        self, outputs: tuple[ir.Value, ...], dim: int | None, count: int, instance: Instance
    ) -> tuple[Term, ...]:
        key = (outputs, instance)
        if key not in self._terms:
            segment, rows = self._segment(outputs, dim, count)
            self._terms[key] = tuple(
                tuple(
                    self._tracer.pieces(
                        value, instance.rank, instance.tick, rows.box(value, i, instance.row)
                    )
                )
                for i, value in enumerate(segment.inputs)
            )
        return self._terms[key]

    def _chain(
        self, outputs: tuple[ir.Value, ...], dim: int | None, count: int, last: Instance
    ) -> list[Instance]:
        """The applications that end in one, first to last."""
        found = [last]
        if last.tick < 0:
            return found
        while True:
            inputs = self._inputs(outputs, dim, count, found[-1])
            before = {
                _instance(piece.source, piece.box, dim)
                for term in inputs
                for piece in term
                if isinstance(piece.source, Computed) and piece.source.value in outputs
            }
            if not before:
                return found[::-1]
            if len(before) > 1:
                raise UnresolvedError(
                    "a stage takes what several others computed", _op(outputs[0]), 5
                )
            found.append(before.pop())
            if found[-1].tick >= found[-2].tick:
                raise UnresolvedError("a stage takes what it computes itself", _op(outputs[0]), 5)
            if found[-1].stage == found[-2].stage:
                raise SameStageError(partial=not self._takes_all(inputs, outputs, dim, count))

    def _takes_all(
        self, inputs: Sequence[Term], outputs: Sequence[ir.Value], dim: int | None, count: int
    ) -> bool:
        """Whether an input is all that the application before computed."""
        return any(
            _is_all(piece, dim, count)
            for term in inputs
            for piece in term
            if isinstance(piece.source, Computed) and piece.source.value in outputs
        )

    def _together(
        self,
        outputs: tuple[ir.Value, ...],
        dim: int | None,
        count: int,
        chain: Sequence[Instance],
    ) -> list[ir.Value]:
        """Other values that a stage takes from the one before it."""
        more: dict[ir.Value, None] = {}
        for before, after in pairwise(chain):
            for term in self._inputs(outputs, dim, count, after):
                for piece in term:
                    source = piece.source
                    if not isinstance(source, Computed) or source.value in outputs:
                        continue
                    if (source.rank, source.tick) == (before.rank, before.tick):
                        more[source.value] = None
        return list(more)

    def _links(
        self,
        segment: Segment,
        terms: tuple[tuple[tuple[Term, ...], ...], ...],
        dim: int | None,
        count: int,
        op: ir.Operation,
    ) -> tuple[Link, ...]:
        """How a stage takes what the one before it computed; the same for all."""
        found: set[tuple[Link, ...]] = set()
        for chain in terms:
            for inputs in chain[1:]:
                found.add(tuple(_linked(segment, inputs, dim, count, op)))
        if len(found) > 1:
            raise UnresolvedError("stages take what others computed in different ways", op, 5)
        return found.pop() if found else ()


class SameStageError(Exception):
    """A loop whose iterations follow each other on one stage: no pipeline.

    `partial`: each takes only a part of what the one before it computed, as where all stages of a
    pipeline are asked for together.
    """

    def __init__(self, *, partial: bool) -> None:
        super().__init__()
        self.partial = partial


def _is_all(piece: Piece, row_dim: int | None, count: int) -> bool:
    """Whether a piece is all that a stage computed of a value."""
    assert isinstance(piece.source, Computed)
    sizes = shape_of(piece.source.value)
    if row_dim is not None:
        sizes[row_dim] //= count
    return tuple(sizes) == piece.box.sizes


def _linked(
    segment: Segment, inputs: Sequence[Term], row_dim: int | None, count: int, op: ir.Operation
) -> list[Link]:
    links: list[Link] = []
    for number, term in enumerate(inputs):
        own = [
            piece
            for piece in term
            if isinstance(piece.source, Computed) and piece.source.value in segment.outputs
        ]
        if not own:
            continue
        if len(term) > 1 or not _is_all(own[0], row_dim, count):
            raise UnresolvedError("a stage takes only a part of what another computed", op, 5)
        source = own[0].source
        assert isinstance(source, Computed)
        links.append(Link(number, segment.outputs.index(source.value), own[0].view.ops))
    return links


def _part(source: Computed, box: Box) -> tuple[int | None, int]:
    """The dimension along which only some of what was computed is asked for, and in how many parts
    it is then."""
    shape = shape_of(source.value)
    partial = [d for d, size in enumerate(shape) if box.sizes[d] != size]
    if not partial or source.tick < 0:
        return None, 1
    dim = partial[0]
    if len(partial) > 1 or shape[dim] % box.sizes[dim] or box.starts[dim] % box.sizes[dim]:
        raise UnresolvedError(
            "only a part of what it computes is used, and not that of one stage",
            _op(source.value),
            3,
        )
    return dim, shape[dim] // box.sizes[dim]


def _instance(source: object, box: Box, dim: int | None) -> Instance:
    assert isinstance(source, Computed)
    row = 0 if dim is None else box.starts[dim] // box.sizes[dim]
    return Instance(source.rank, source.tick, row)


def _op(value: ir.Value) -> ir.Operation:
    op = producer(value)
    assert op is not None, "what is computed has an op that computes it"
    return op
