"""The chain of stages that every microbatch goes through, read off what was traced.

An output consists of what some segment computed, once for each microbatch. Where such a segment
takes what it computed itself for the same microbatch, on another stage and in an earlier tick, it
is a stage, and the microbatch has gone through a chain of them. Chains of all microbatches must be
alike: then stage n takes the same weights in each, and they fold to one loop over the stages. What
else a stage takes must depend on the stage or on the microbatch alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.fold_pipeline.segments import (
    Scratch,
    Segment,
    Segments,
    StageRows,
    all_stages,
    row_of_stages,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Piece,
    UnresolvedError,
    ViewOp,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

Pieces = tuple[Piece, ...]  # what one input consists of


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
class Handoff:
    """Input `input` of a stage is output `output` of the one before it, seen through some ops."""

    input: int
    output: int
    ops: tuple[ViewOp, ...]


@dataclass(frozen=True)
class Chains:
    """The same `length` applications of a segment for each microbatch.

    `inputs[m][n][i]` is what input i is for microbatch m in application n. `last[m]` is the last
    instance of microbatch m. `rows` computes one of stages that lie along a dimension.
    """

    segment: Segment
    rows: StageRows
    length: int
    handoffs: tuple[Handoff, ...]
    inputs: tuple[tuple[tuple[Pieces, ...], ...], ...]
    last: tuple[Instance, ...]

    def box(self, output: int, instance: Instance) -> Box:
        """The box of an output that an instance computes."""
        return self.rows.output_box(self.segment.outputs[output], output, instance.row)


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a segment by number, sorted by what they depend on.

    `batch`: what each microbatch has; of a handoff, what the first stage takes. `layered`: what
    each stage has. `fixed`: the same for all. `cells`: what differs for each stage and microbatch,
    `cells[i][m][n]`.
    """

    batch: dict[int, tuple[Pieces, ...]]
    layered: dict[int, tuple[Pieces, ...]]
    fixed: dict[int, Pieces]
    cells: dict[int, tuple[tuple[Pieces, ...], ...]]

    @staticmethod
    def of(chains: Chains) -> StageInputs:
        """The inputs of chains. Raises UnresolvedError where one differs for each stage and
        microbatch."""
        inputs = StageInputs.sorted(chains.inputs, chains.handoffs)
        if inputs.cells:
            raise UnresolvedError(
                "what a stage takes here depends on the stage and the microbatch both: the "
                "stages are no layers of one loop",
                maker_of(chains.segment.outputs[0]),
                5,
            )
        return inputs

    @staticmethod
    def sorted(
        inputs: Sequence[Sequence[Sequence[Pieces]]], handoffs: Sequence[Handoff]
    ) -> StageInputs:
        """Inputs `inputs[m][n][i]`, sorted."""
        handed = {handoff.input for handoff in handoffs}
        batch: dict[int, tuple[Pieces, ...]] = {}
        layered: dict[int, tuple[Pieces, ...]] = {}
        fixed: dict[int, Pieces] = {}
        cells: dict[int, tuple[tuple[Pieces, ...], ...]] = {}
        for number in range(len(inputs[0][0])):
            table = [[taken[number] for taken in row] for row in inputs]
            if number in handed:
                batch[number] = tuple(row[0] for row in table)
            elif all(row == table[0] for row in table):
                if all(pieces == table[0][0] for pieces in table[0]):
                    fixed[number] = table[0][0]
                else:
                    layered[number] = tuple(table[0])
            elif all(pieces == row[0] for row in table for pieces in row):
                batch[number] = tuple(row[0] for row in table)
            else:
                cells[number] = tuple(map(tuple, table))
        if len(inputs) == 1:
            single = {number: per_microbatch[0] for number, per_microbatch in batch.items()}
            return StageInputs({}, layered, fixed | single, cells)
        return StageInputs(batch, layered, fixed, cells)

    def for_each(self, count: int, numbers: Collection[int]) -> StageInputs:
        """The same with inputs of these numbers that are fixed taken once for each of `count`
        microbatches."""
        spread = {n: (self.fixed[n],) * count for n in numbers if n in self.fixed}
        fixed = {n: pieces for n, pieces in self.fixed.items() if n not in spread}
        return replace(self, batch=self.batch | spread, fixed=fixed)


class SameStageError(Exception):
    """A loop whose iterations follow each other on one stage: no pipeline.

    `partial`: each takes only a part of what the one before it computed, as where all stages of a
    pipeline are asked for together.
    """

    def __init__(self, *, partial: bool) -> None:
        super().__init__()
        self.partial = partial


@dataclass(frozen=True)
class _Stage:
    """Values that a stage computes together; of values of all stages side by side along `row_dim`,
    one of `count` rows."""

    outputs: tuple[ir.Value, ...]
    row_dim: int | None
    count: int

    @property
    def op(self) -> ir.Operation:
        """An op that computes what a stage hands on."""
        return maker_of(self.outputs[0])

    def instance(self, source: Computed, box: Box) -> Instance:
        """Where a box of what stages computed was computed."""
        row = 0 if self.row_dim is None else box.starts[self.row_dim] // box.sizes[self.row_dim]
        return Instance(source.rank, source.tick, row)

    def own(self, pieces: Pieces) -> list[tuple[Computed, Piece]]:
        """The pieces of an input that stages computed, with their source."""
        return [(s, piece) for s, piece in _computed([pieces]) if s.value in self.outputs]

    def is_all(self, source: Computed, box: Box) -> bool:
        """Whether a box is all that a stage computed of a value."""
        whole = Box.whole(shape_of(source.value))
        return whole.share(self.row_dim, 0, self.count).sizes == box.sizes


class ChainFinder:
    """Finds the chains that end in given pieces."""

    def __init__(self, tracer: Tracer, segments: Segments, scratch: Scratch) -> None:
        self._tracer = tracer
        self._segments = segments
        self._scratch = scratch
        self._rows: dict[_Stage, StageRows] = {}
        self._inputs: dict[tuple[tuple[ir.Value, ...], Instance], tuple[Pieces, ...]] = {}
        self.most_stages = 0

    def chains(self, ends: Sequence[tuple[Computed, Box]]) -> Chains:
        """The chains that end in what was computed, one a microbatch. Raises UnresolvedError."""
        source, box = ends[0]
        dim, count = _row_dim(source, box)
        stage = _Stage((source.value,), dim, count)
        self._part_from_head(stage, source, box)
        lasts = [stage.instance(end, part) for end, part in ends]
        while more := self._others(stage, self._chain(stage, lasts[0])):
            stage = replace(stage, outputs=(*stage.outputs, *more))
        return self._alike(stage, lasts)

    def _part_from_head(self, stage: _Stage, source: Computed, box: Box) -> None:
        """Takes a stage out of what else is computed from it in the same tick, such as the head of
        a model on the last rank."""
        if source.tick < 0:
            return
        inputs = self._inputs_of(stage, stage.instance(source, box))
        in_loop = {taken.value for taken, _ in _computed(inputs) if taken.tick >= 0}
        within = [v for v in in_loop if self._segments.is_within(v, [source.value])]
        if within:
            self._segments.stop_at(within)
            self._rows, self._inputs = {}, {}

    def _alike(self, stage: _Stage, lasts: Sequence[Instance]) -> Chains:
        """The chains that end in these instances, which must be alike."""
        segment, rows = self._segment(stage)
        chains = [self._chain(stage, last) for last in lasts]
        lengths = {len(chain) for chain in chains}
        if len(lengths) > 1:
            raise UnresolvedError(
                f"microbatches go through {min(lengths)} to {max(lengths)} stages: not all alike",
                stage.op,
                5,
            )
        inputs = tuple(
            tuple(self._inputs_of(stage, instance) for instance in chain) for chain in chains
        )
        handoffs = {_handoffs(stage, taken) for chain in inputs for taken in chain[1:]} or {()}
        if len(handoffs) > 1:
            raise UnresolvedError("stages take what others computed in different ways", stage.op, 5)
        if len(chains[0]) > 1:
            stages = len({instance.stage for chain in chains for instance in chain})
            self.most_stages = max(self.most_stages, stages)
        return Chains(segment, rows, lengths.pop(), handoffs.pop(), inputs, tuple(lasts))

    def _segment(self, stage: _Stage) -> tuple[Segment, StageRows]:
        segment = self._segments.of(stage.outputs)
        if stage not in self._rows:
            self._rows[stage] = (
                all_stages(segment)
                if stage.row_dim is None
                else row_of_stages(segment, stage.row_dim, stage.count, self._scratch)
            )
        return segment, self._rows[stage]

    def _inputs_of(self, stage: _Stage, instance: Instance) -> tuple[Pieces, ...]:
        key = stage.outputs, instance
        if key not in self._inputs:
            self._inputs[key] = inputs_of(instance, *self._segment(stage), self._tracer)
        return self._inputs[key]

    def _chain(self, stage: _Stage, last: Instance) -> list[Instance]:
        """The applications that end in one, first to last."""
        chain = [last]
        if last.tick < 0:
            return chain
        while True:
            own = [pair for taken in self._inputs_of(stage, chain[-1]) for pair in stage.own(taken)]
            before = {stage.instance(source, piece.box) for source, piece in own}
            if not before:
                return chain[::-1]
            if len(before) > 1:
                raise UnresolvedError(
                    f"a stage takes activations of {len(before)} others, where one of a pipeline "
                    "takes those of the stage before it",
                    stage.op,
                    5,
                )
            chain.append(before.pop())
            if chain[-1].tick >= chain[-2].tick:
                raise UnresolvedError("a stage takes what it computes itself", stage.op, 5)
            if chain[-1].stage == chain[-2].stage:
                whole = any(stage.is_all(source, piece.box) for source, piece in own)
                raise SameStageError(partial=not whole)

    def _others(self, stage: _Stage, chain: Sequence[Instance]) -> list[ir.Value]:
        """Other values that a stage takes from the one before it."""
        more: dict[ir.Value, None] = {}
        for before, after in pairwise(chain):
            for source, _ in _computed(self._inputs_of(stage, after)):
                is_before = (source.rank, source.tick) == (before.rank, before.tick)
                if is_before and source.value not in stage.outputs:
                    more[source.value] = None
        return list(more)


def inputs_of(
    instance: Instance, segment: Segment, rows: StageRows, tracer: Tracer
) -> tuple[Pieces, ...]:
    """What each input of a segment consists of where an instance computes it."""
    return tuple(
        tuple(
            tracer.pieces(
                value, instance.rank, instance.tick, rows.box(value, number, instance.row)
            )
        )
        for number, value in enumerate(segment.inputs)
    )


def _computed(inputs: Sequence[Pieces]) -> Iterator[tuple[Computed, Piece]]:
    """The pieces that an op computed, with their source."""
    for pieces in inputs:
        for piece in pieces:
            if isinstance(piece.source, Computed):
                yield piece.source, piece


def _handoffs(stage: _Stage, inputs: Sequence[Pieces]) -> tuple[Handoff, ...]:
    """How a stage takes what the one before it computed."""
    handoffs: list[Handoff] = []
    for number, pieces in enumerate(inputs):
        own = stage.own(pieces)
        if not own:
            continue
        source, piece = own[0]
        if len(pieces) > 1 or not stage.is_all(source, piece.box):
            raise UnresolvedError("a stage takes only a part of what another computed", stage.op, 5)
        handoffs.append(Handoff(number, stage.outputs.index(source.value), piece.view.ops))
    return tuple(handoffs)


def _row_dim(source: Computed, box: Box) -> tuple[int | None, int]:
    """The dimension along which only some of what was computed is asked for, and in how many parts
    it is then: there the stages lie side by side."""
    shape = shape_of(source.value)
    partial = [d for d, size in enumerate(shape) if box.sizes[d] != size]
    if not partial or source.tick < 0:
        return None, 1
    dim = partial[0]
    if len(partial) > 1 or shape[dim] % box.sizes[dim] or box.starts[dim] % box.sizes[dim]:
        raise UnresolvedError(
            "only a part of what it computes is used, and not that of one stage",
            maker_of(source.value),
            3,
        )
    return dim, shape[dim] // box.sizes[dim]
