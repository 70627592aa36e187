"""Finds the chain of stages that every microbatch passes through, from the pieces of a trace.

An output of a pipeline consists of results of a segment, one for each microbatch. The segment is a
stage if one of its inputs is its own result for the same microbatch, from another stage and an
earlier tick. The microbatch has then passed through a chain of stages. The chains of all
microbatches must be the same: stage n uses the same weights in each. They then fold to one loop
over the stages. Any other input of a stage must depend on the stage or on the microbatch alone.
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
    SourceBox,
    UnresolvedError,
    ViewOp,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

Pieces = tuple[SourceBox, ...]  # the pieces of one input


@dataclass(frozen=True)
class Instance:
    """A segment computed on a rank in a tick; `row` is the stage if the segment computes
    several."""

    rank: int
    tick: int
    row: int

    @property
    def stage(self) -> tuple[int, int]:
        """The rank and the row that compute it."""
        return self.rank, self.row


@dataclass(frozen=True)
class Handoff:
    """Input `input` of a stage is output `output` of the one before it, viewed through some ops."""

    input: int
    output: int
    ops: tuple[ViewOp, ...]


@dataclass(frozen=True)
class Chains:
    """The same `length` applications of a segment for each microbatch.

    `inputs[m][n][i]` is input i of application n for microbatch m. `last[m]` is the last instance
    of microbatch m. `rows` computes one stage if all are computed along a dimension.
    """

    segment: Segment
    rows: StageRows
    length: int
    handoffs: tuple[Handoff, ...]
    inputs: tuple[tuple[tuple[Pieces, ...], ...], ...]
    last: tuple[Instance, ...]

    def box(self, output: int, instance: Instance) -> Box:
        """Returns the box of an output that an instance computes."""
        return self.rows.output_box(self.segment.outputs[output], output, instance.row)


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a segment by number, sorted by their dependence on stage and microbatch.

    `batch`: one for each microbatch; for a handoff, the input of the first stage. `layered`: one
    for each stage. `fixed`: the same for all. `cells`: one for each stage and microbatch,
    `cells[i][m][n]`.
    """

    batch: dict[int, tuple[Pieces, ...]]
    layered: dict[int, tuple[Pieces, ...]]
    fixed: dict[int, Pieces]
    cells: dict[int, tuple[tuple[Pieces, ...], ...]]

    @staticmethod
    def from_chains(chains: Chains) -> StageInputs:
        """Returns the inputs of chains. Raises UnresolvedError if one of them depends on both the
        stage and the microbatch."""
        inputs = StageInputs.sort_by_dependence(chains.inputs, chains.handoffs)
        if inputs.cells:
            raise UnresolvedError(
                "an operand of a stage depends on both the stage and the microbatch: the stages "
                "are not layers of one loop",
                maker_of(chains.segment.outputs[0]),
                5,
            )
        return inputs

    @staticmethod
    def sort_by_dependence(
        inputs: Sequence[Sequence[Sequence[Pieces]]], handoffs: Sequence[Handoff]
    ) -> StageInputs:
        """Returns the inputs `inputs[m][n][i]`, sorted."""
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
        # A single microbatch needs no stack and no batch.
        if len(inputs) == 1:
            single = {number: per_microbatch[0] for number, per_microbatch in batch.items()}
            return StageInputs({}, layered, fixed | single, cells)
        return StageInputs(batch, layered, fixed, cells)

    def for_each(self, count: int, numbers: Collection[int]) -> StageInputs:
        """Returns these inputs with the fixed ones among `numbers` repeated for each of `count`
        microbatches."""
        spread = {n: (self.fixed[n],) * count for n in numbers if n in self.fixed}
        fixed = {n: pieces for n, pieces in self.fixed.items() if n not in spread}
        return replace(self, batch=self.batch | spread, fixed=fixed)


class SameStageError(Exception):
    """A loop whose iterations depend on each other on one stage, and which is therefore no
    pipeline.

    `partial`: each iteration reads only a part of the previous result. This also happens if all
    stages of a pipeline are queried together.
    """

    def __init__(self, *, partial: bool) -> None:
        super().__init__()
        self.partial = partial


@dataclass(frozen=True)
class _StageValues:
    """Values that a stage computes together. With `row_dim`, they hold the results of `count`
    stages side by side along it, and each stage is one row."""

    outputs: tuple[ir.Value, ...]
    row_dim: int | None
    count: int

    @property
    def op(self) -> ir.Operation:
        """An op that computes a value which the stage passes on."""
        return maker_of(self.outputs[0])

    def instance(self, source: Computed, box: Box) -> Instance:
        """Returns the instance that computed a box of a stage's output."""
        row = 0 if self.row_dim is None else box.starts[self.row_dim] // box.sizes[self.row_dim]
        return Instance(source.rank, source.tick, row)

    def own(self, pieces: Pieces) -> list[tuple[Computed, SourceBox]]:
        """Returns the pieces of an input that stages computed, with their sources."""
        return [(s, piece) for s, piece in _computed_pieces([pieces]) if s.value in self.outputs]

    def is_all(self, source: Computed, box: Box) -> bool:
        """Returns True if a box is all that a stage computed of a value."""
        whole = Box.whole(shape_of(source.value))
        return whole.share(self.row_dim, 0, self.count).sizes == box.sizes


class ChainFinder:
    """Finds the chains that end in given pieces."""

    def __init__(self, tracer: Tracer, segments: Segments, scratch: Scratch) -> None:
        self._tracer = tracer
        self._segments = segments
        self._scratch = scratch
        self._rows: dict[_StageValues, StageRows] = {}
        self._inputs: dict[tuple[tuple[ir.Value, ...], Instance], tuple[Pieces, ...]] = {}
        self.most_stages = 0

    def chains(self, ends: Sequence[tuple[Computed, Box]]) -> Chains:
        """Returns the chains that end in these results, one for each microbatch. Raises
        UnresolvedError."""
        source, box = ends[0]
        dim, count = _row_dim(source, box)
        stage = _StageValues((source.value,), dim, count)
        self._part_from_head(stage, source, box)
        lasts = [stage.instance(end, part) for end, part in ends]
        # A stage may pass on several values: add outputs until none is missing.
        while more := self._others(stage, self._chain(stage, lasts[0])):
            stage = replace(stage, outputs=(*stage.outputs, *more))
        return self._alike(stage, lasts)

    def _part_from_head(self, stage: _StageValues, source: Computed, box: Box) -> None:
        """Separates a stage from other ops of the same tick that use its result, such as the head
        of a model on the last rank."""
        if source.tick < 0:
            return
        inputs = self._inputs_of(stage, stage.instance(source, box))
        in_loop = {taken.value for taken, _ in _computed_pieces(inputs) if taken.tick >= 0}
        within = [v for v in in_loop if self._segments.is_within(v, [source.value])]
        if within:
            self._segments.stop_at(within)
            # These belong to segments that no longer exist.
            self._rows, self._inputs = {}, {}

    def _alike(self, stage: _StageValues, lasts: Sequence[Instance]) -> Chains:
        """Returns the chains that end in these instances. Raises UnresolvedError if they differ."""
        segment, rows = self._segment(stage)
        chains = [self._chain(stage, last) for last in lasts]
        lengths = {len(chain) for chain in chains}
        if len(lengths) > 1:
            raise UnresolvedError(
                f"microbatches pass through different numbers of stages, {min(lengths)} to "
                f"{max(lengths)}",
                stage.op,
                5,
            )
        inputs = tuple(
            tuple(self._inputs_of(stage, instance) for instance in chain) for chain in chains
        )
        handoffs = {_handoffs(stage, taken) for chain in inputs for taken in chain[1:]} or {()}
        if len(handoffs) > 1:
            raise UnresolvedError("stages read earlier results in different ways", stage.op, 5)
        if len(chains[0]) > 1:
            stages = len({instance.stage for chain in chains for instance in chain})
            self.most_stages = max(self.most_stages, stages)
        return Chains(segment, rows, lengths.pop(), handoffs.pop(), inputs, tuple(lasts))

    def _segment(self, stage: _StageValues) -> tuple[Segment, StageRows]:
        segment = self._segments.segment_of(stage.outputs)
        if stage not in self._rows:
            self._rows[stage] = (
                all_stages(segment)
                if stage.row_dim is None
                else row_of_stages(segment, stage.row_dim, stage.count, self._scratch)
            )
        return segment, self._rows[stage]

    def _inputs_of(self, stage: _StageValues, instance: Instance) -> tuple[Pieces, ...]:
        key = stage.outputs, instance
        if key not in self._inputs:
            self._inputs[key] = inputs_of(instance, *self._segment(stage), self._tracer)
        return self._inputs[key]

    def _chain(self, stage: _StageValues, last: Instance) -> list[Instance]:
        """Returns the applications that end in one, first to last. Raises UnresolvedError if an
        application depends on several others, SameStageError if on one of the same stage."""
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
                    f"a stage reads activations of {len(before)} other stages; in a pipeline it "
                    "reads those of the stage before it",
                    stage.op,
                    5,
                )
            chain.append(before.pop())
            if chain[-1].tick >= chain[-2].tick:
                raise UnresolvedError("a stage reads a result of its own tick", stage.op, 5)
            if chain[-1].stage == chain[-2].stage:
                whole = any(stage.is_all(source, piece.box) for source, piece in own)
                raise SameStageError(partial=not whole)

    def _others(self, stage: _StageValues, chain: Sequence[Instance]) -> list[ir.Value]:
        """Returns the other values that a stage reads from the one before it."""
        more: dict[ir.Value, None] = {}
        for before, after in pairwise(chain):
            for source, _ in _computed_pieces(self._inputs_of(stage, after)):
                is_before = (source.rank, source.tick) == (before.rank, before.tick)
                if is_before and source.value not in stage.outputs:
                    more[source.value] = None
        return list(more)


def inputs_of(
    instance: Instance, segment: Segment, rows: StageRows, tracer: Tracer
) -> tuple[Pieces, ...]:
    """Returns the pieces of each input of a segment as an instance computes it."""
    return tuple(
        tuple(
            tracer.pieces(
                value, instance.rank, instance.tick, rows.box(value, number, instance.row)
            )
        )
        for number, value in enumerate(segment.inputs)
    )


def _computed_pieces(inputs: Sequence[Pieces]) -> Iterator[tuple[Computed, SourceBox]]:
    """Yields the pieces that an op computed, with their sources."""
    for pieces in inputs:
        for piece in pieces:
            if isinstance(piece.source, Computed):
                yield piece.source, piece


def _handoffs(stage: _StageValues, inputs: Sequence[Pieces]) -> tuple[Handoff, ...]:
    """Returns the handoffs by which a stage reads the results of the one before it. Raises
    UnresolvedError if it reads only a part of a result."""
    handoffs: list[Handoff] = []
    for number, pieces in enumerate(inputs):
        own = stage.own(pieces)
        if not own:
            continue
        source, piece = own[0]
        if len(pieces) > 1 or not stage.is_all(source, piece.box):
            raise UnresolvedError("a stage reads only part of another stage's result", stage.op, 5)
        handoffs.append(Handoff(number, stage.outputs.index(source.value), piece.view.ops))
    return tuple(handoffs)


def _row_dim(source: Computed, box: Box) -> tuple[int | None, int]:
    """Returns the dimension along which only a part of a result is queried, and the number of such
    parts. The stages are side by side along it. Returns None and 1 if all of it is queried."""
    shape = shape_of(source.value)
    partial = [d for d, size in enumerate(shape) if box.sizes[d] != size]
    if not partial or source.tick < 0:
        return None, 1
    dim = partial[0]
    if len(partial) > 1 or shape[dim] % box.sizes[dim] or box.starts[dim] % box.sizes[dim]:
        raise UnresolvedError(
            "only a part of its result is used, and it is not the part of one stage",
            maker_of(source.value),
            3,
        )
    return dim, shape[dim] // box.sizes[dim]
