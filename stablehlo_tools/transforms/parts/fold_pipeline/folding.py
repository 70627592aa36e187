"""Writes what outputs of a pipeline are, with one loop over the layers for all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.transforms.parts.fold_pipeline.chains import ChainFinder, Chains, Term
from stablehlo_tools.transforms.parts.fold_pipeline.composing import (
    Composer,
    Placed,
    shifted,
    stacked,
)
from stablehlo_tools.transforms.parts.fold_pipeline.inputs import Inputs, Terms, sorted_inputs
from stablehlo_tools.transforms.parts.fold_pipeline.layer_loop import Operand, Stage
from stablehlo_tools.transforms.parts.fold_pipeline.microbatch_loop import Microbatches
from stablehlo_tools.transforms.parts.fold_pipeline.peeling import Layers, layers_of
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Outside,
    Piece,
    Source,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer
from stablehlo_tools.transforms.parts.fold_pipeline.widening import Order, as_it_is, widening


class Folding:
    """Writes at a point; `entering` says what stands there for a value from outside."""

    def __init__(
        self,
        tracer: Tracer,
        segments: Segments,
        scratch: Scratch,
        place: ir.InsertionPoint,
        location: ir.Location,
        entering: Callable[[ir.Value], ir.Value],
    ) -> None:
        self._tracer = tracer
        self._segments = segments
        self._scratch = scratch
        self._point = place
        self._build = Builder(place, location)
        self._entering = entering
        self._composer = Composer(self._build, self._placed)
        self._made: dict[Computed, ir.Value] = {}
        self._alike: dict[tuple[ir.Value, tuple[Term, ...]], ir.Value] = {}
        self._computed: dict[tuple[Computed, Box], Placed] = {}
        self.finder = ChainFinder(tracer, segments, scratch)

    def value(self, pieces: Sequence[Piece], kind: ir.Type) -> ir.Value:
        """A tensor of a type that consists of pieces. Raises UnresolvedError."""
        self._ensure(pieces)
        return self._composer.compose(pieces, kind)

    def _placed(self, source: Source, box: Box) -> Placed:
        if isinstance(source, Outside):
            return Placed(self._entering(source.value), box)
        assert isinstance(source, Computed)
        if source.tick < 0:
            return Placed(self._made[source], box)
        return self._computed[source, box]

    def _ensure(self, pieces: Iterable[Piece]) -> None:
        """Writes what pieces are made of, and is not there yet."""
        groups: dict[tuple[ir.Value, tuple[int, ...]], dict[tuple[Computed, Box], None]] = {}
        for piece in pieces:
            source = piece.source
            if not isinstance(source, Computed):
                continue
            if source.tick < 0:
                self._ensure_made(source)
            elif (source, piece.box) not in self._computed:
                group = groups.setdefault((source.value, piece.box.sizes), {})
                group[source, piece.box] = None
        for group in groups.values():
            self._write(self.finder.chains(list(group)))

    def _ensure_made(self, source: Computed) -> None:
        """What a rank computes outside of the loop; once where ranks compute the same."""
        if source in self._made:
            return
        segment = self._segments.of([source.value])
        terms = tuple(
            tuple(self._tracer.pieces(value, source.rank, -1, Box.whole(shape_of(value))))
            for value in segment.inputs
        )
        key = source.value, terms
        if key not in self._alike:
            inputs = [
                self.value(term, value.type)
                for term, value in zip(terms, segment.inputs, strict=True)
            ]
            self._alike[key] = self._copied(segment.block, inputs)
        self._made[source] = self._alike[key]

    def _copied(self, block: ir.Block, inputs: Sequence[ir.Value]) -> ir.Value:
        values: dict[ir.Value, ir.Value] = dict(zip(block.arguments, inputs, strict=True))
        ops = [view.operation for view in block.operations]
        for op in ops[:-1]:
            copy = copy_with(op, values, self._point)
            values.update(zip(op.results, copy.results, strict=True))
        return values[ops[-1].operands[0]]

    def _write(self, chains: Chains) -> None:
        """Writes the loop that chains fold to, and notes what it computes."""
        inputs = sorted_inputs(chains)
        if len(chains.terms) == 1:
            inputs = Inputs({}, inputs.layered, inputs.fixed | _only(inputs.batch))
        layers = layers_of(chains, inputs, self._scratch)
        wide = widening(layers.block, inputs.batch, chains.links, self._scratch)
        order = Order.of(len(chains.terms), inputs.batch, wide)
        results = self._layers(chains, inputs, layers, order)
        for place, output in enumerate(chains.segment.outputs):
            shape = shape_of(layers.outputs[place])
            held = order.held(results[place], shape, place)
            value = self._composer.reshaped(results[place], held)
            for number, instance in enumerate(chains.last):
                source = Computed(output, instance.rank, instance.tick)
                where = order.placed(value, shape, place, number)
                self._computed[source, chains.box(place, instance)] = where

    def _layers(
        self, chains: Chains, inputs: Inputs, layers: Layers, order: Order
    ) -> list[ir.Value]:
        """Writes the layers on what they take; returns what the last one computes."""
        kinds = [argument.type for argument in layers.block.arguments]
        operands: dict[int, Operand] = {}
        for number, term in inputs.fixed.items():
            operands[number] = Operand(self.value(term, kinds[number]))
        for number, terms in inputs.batch.items():
            operands[number] = Operand(self._batch(terms, order, number, kinds[number]))
        for number, terms in inputs.layered.items():
            operands[number] = self._stack(terms, kinds[number], layers, number)
        ordered = tuple(operands[number] for number in range(len(kinds)))
        dims = as_it_is(layers.block) if order.wide is None else order.wide.dims
        stage = Stage(dims, order.samples, chains.links, ordered)
        trips = chains.length * layers.each
        if order.wide is not None or not inputs.batch:
            return stage.write(self._build, self._point, trips)
        apart = Microbatches(stage, order.count, trips, inputs.batch)
        return apart.write(self._build, self._point)

    def _batch(self, terms: Terms, order: Order, number: int, kind: ir.Type) -> ir.Value:
        """All microbatches, as the samples of one batch or stacked."""
        shape = ir.RankedTensorType(kind).shape
        pieces = [order.piece(p, number, shape, m) for m, term in enumerate(terms) for p in term]
        value = self.value(pieces, kind)
        return self._composer.reshaped(value, order.shape(number, shape))

    def _stack(self, terms: Terms, kind: ir.Type, layers: Layers, number: int) -> Operand:
        """What all layers take, stacked along a dimension."""
        dim = layers.within.get(number)
        if dim is None:
            moved = [stacked(piece, n) for n, term in enumerate(terms) for piece in term]
            return Operand(self.value(moved, kind), 0)
        by = layers.each
        moved = [shifted(p, dim, n * by) for n, term in enumerate(terms) for p in term]
        return Operand(self.value(moved, kind), dim, whole=True)


def _only(batch: dict[int, Terms]) -> dict[int, Term]:
    """What a single microbatch takes."""
    return {number: terms[0] for number, terms in batch.items()}
