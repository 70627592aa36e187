"""The grid of cells of a differentiated pipeline or of its backward: one cell for each microbatch
and each application of a stage.

`chains` follows values that leave a pipeline: one value of the last stage for each microbatch. A
grid follows values of all stages: the forward's residuals, and the terms of the backward's
gradients. It collects all cells that such a value depends on, and orders them into rows by their
dependences.

A sum over all ticks includes the ticks of ramp-up and ramp-down. These are left out if their terms
are zero: a stage computes them by linear ops from cotangents that are zero. The other factors are
results of the pipeline in these ticks, which are assumed to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import gcd

from stablehlo_tools.analysis.dimension_propagation.propagation import Graph, propagate
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import is_float, maker_of, producer
from stablehlo_tools.transforms.parts.fold_pipeline.segments import (
    Scratch,
    Segment,
    Segments,
    StageRows,
    all_stages,
    mixed_stages_error,
    rows_along,
)
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import (
    Handoff,
    Instance,
    Pieces,
    inputs_of,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    SourceBox,
    Summed,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import RELAYOUTS
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer
from stablehlo_tools.transforms.parts.scaling import NotScaledError

# Elements of a value that one stage computed.
End = tuple[Computed, Box]


@dataclass(frozen=True)
class StageGrid:
    """`cells[m][n]` computes application n of the stage on microbatch m from `inputs[m][n]`.

    If a stage is divided into layers, applications and `inputs` are those of layers, and `rows`
    computes one layer. `made[k][i]` is output i of layer k of the stage; None if it is not used.
    """

    segment: Segment
    rows: StageRows
    handoffs: tuple[Handoff, ...]
    cells: tuple[tuple[Instance, ...], ...]
    inputs: tuple[tuple[tuple[Pieces, ...], ...], ...]
    made: tuple[tuple[ir.Value | None, ...], ...]

    @property
    def length(self) -> int:
        """The number of applications for each microbatch."""
        return len(self.inputs[0])

    @property
    def stages(self) -> int:
        """The number of stages that compute the cells."""
        return len({cell.stage for cells in self.cells for cell in cells})

    @cached_property
    def places(self) -> dict[Instance, tuple[int, int]]:
        """The microbatch and the application of each cell."""
        return {c: (m, n) for m, row in enumerate(self.cells) for n, c in enumerate(row)}

    def reorder_microbatches(self, order: Sequence[int]) -> StageGrid:
        """Returns the grid with the microbatches in another order."""
        cells, inputs = (tuple(rows[m] for m in order) for rows in (self.cells, self.inputs))
        return replace(self, cells=cells, inputs=inputs)

    def with_pieces(self, change: Callable[[int, Pieces], Pieces]) -> StageGrid:
        """Returns the grid with `change(number, pieces)` as the pieces of each input of a cell."""
        inputs = tuple(
            tuple(
                tuple(change(number, pieces) for number, pieces in enumerate(cell)) for cell in row
            )
            for row in self.inputs
        )
        return replace(self, inputs=inputs)

    @cached_property
    def _columns(self) -> dict[ir.Value, tuple[int, int]]:
        """The layer and the number of the output that each value is."""
        return {
            value: (layer, number)
            for layer, values in enumerate(self.made)
            for number, value in enumerate(values)
            if value is not None
        }

    def output_number(self, value: ir.Value) -> int | None:
        """Returns the number of the output of a stage, or of a layer, that a value is; None for
        others."""
        column = self._columns.get(value)
        return None if column is None else column[1]

    def box(self, output: int, row: int) -> Box:
        """Returns the box of an output that one stage computes."""
        value = next(v for values in self.made if (v := values[output]) is not None)
        return self.rows.output_box(value, output, row)

    def place_of(self, source: Computed, box: Box) -> tuple[int, int, int] | None:
        """Returns the output, the microbatch and the application that a box of a value belongs to;
        None if it is not what one cell computes."""
        column = self._columns.get(source.value)
        if column is None:
            return None
        layer, output = column
        instance = _instance(self.rows, output, source, box)
        place = None if instance is None else self.places.get(instance)
        return None if place is None else (output, place[0], place[1] * len(self.made) + layer)

    def application_of(self, summed: Summed, row: int) -> int:
        """Returns the application whose results a sum over ticks adds up, one for each microbatch.
        Raises UnresolvedError if there are several, or if the sum omits some microbatches."""
        ticks = {
            place: cell.tick
            for cell, place in self.places.items()
            if cell.stage == (summed.rank, row)
        }
        own = {n for (_, n), tick in ticks.items() if tick in summed.ticks}
        if len(own) != 1:
            raise UnresolvedError(
                f"one sum of a stage adds up the results of {len(own)} of its layers",
                maker_of(summed.value),
                6,
            )
        application = own.pop()
        if any(n == application and tick not in summed.ticks for (_, n), tick in ticks.items()):
            raise UnresolvedError(
                "a sum includes only some of the microbatches", maker_of(summed.value), 6
            )
        layer, _ = self._columns[summed.value]
        return application * len(self.made) + layer


Zero = dict[Instance, frozenset[int]]


@dataclass(frozen=True)
class Cells:
    """All instances of a segment that some values depend on, with their inputs and their zeros.
    `zero` are the outputs that are zero because they are linear in inputs that are."""

    segment: Segment
    rows: StageRows
    instances: Sequence[Instance]
    inputs: dict[Instance, tuple[Pieces, ...]]
    zero: Zero

    def grid(self) -> StageGrid:
        """Orders the instances with nonzero outputs into rows, one for each microbatch. Raises
        UnresolvedError if the rows differ in length or in the inputs that they pass on."""
        count, op = len(self.segment.outputs), maker_of(self.segment.outputs[0])
        # Cells of ramp-up and ramp-down that compute only zeros belong to no microbatch.
        live = [i for i in self.instances if len(self.zero.get(i, ())) < count]

        def settle(piece: SourceBox) -> SourceBox:
            """Returns the piece, or zeros if it is of an output that is zero."""
            if piece.is_zero or not is_zero(piece, self.segment, self.rows, self.zero):
                return piece
            assert isinstance(piece.source, Computed)
            return piece.with_zeros(element_of(piece.source.value))

        settled = {
            instance: tuple(tuple(map(settle, pieces)) for pieces in taken)
            for instance, taken in self.inputs.items()
        }
        after: dict[Instance, Instance] = {}
        first: list[Instance] = []
        for instance in live:
            before = {cell for taken in settled[instance] for cell, _ in self._own(taken)}
            if not before:
                first.append(instance)
                continue
            if len(before) > 1:
                raise UnresolvedError(
                    f"a stage reads activations or gradients of {len(before)} other stages; in a "
                    "pipeline it reads those of the stage before it",
                    op,
                    5,
                )
            if (cell := before.pop()) in after:
                raise UnresolvedError(
                    "two stages read the result of one; in a pipeline a stage sends activations or "
                    "gradients only to the next",
                    op,
                    5,
                )
            after[cell] = instance
        cells: list[list[Instance]] = []
        for instance in first:
            row = [instance]
            while row[-1] in after:
                row.append(after[row[-1]])
            cells.append(row)
        lengths = {len(row) for row in cells}
        if len(lengths) != 1:
            raise UnresolvedError(
                "microbatches pass through different numbers of stages, "
                f"{min(lengths, default=0)} to {max(lengths, default=0)}",
                op,
                5,
            )
        if any(one.stage == two.stage for row in cells for one, two in pairwise(row)):
            raise UnresolvedError("a stage reads its own earlier result", op, 5)
        inputs = tuple(tuple(settled[cell] for cell in row) for row in cells)
        handoffs = {self._handoffs(taken) for row in inputs for taken in row[1:]} or {()}
        if len(handoffs) > 1:
            raise UnresolvedError("stages read earlier results in different ways", op, 5)
        whole = tuple(map(tuple, cells))
        made = (self.segment.outputs,)
        return StageGrid(self.segment, self.rows, handoffs.pop(), whole, inputs, made)

    def _own(self, pieces: Pieces) -> list[tuple[Instance, SourceBox]]:
        """Returns the pieces that other instances computed, with these instances."""
        own: list[tuple[Instance, SourceBox]] = []
        for piece in pieces:
            source = piece.source
            if isinstance(source, Computed) and source.value in self.segment.outputs:
                output = self.segment.outputs.index(source.value)
                instance = _instance(self.rows, output, source, piece.box)
                assert instance is not None
                own.append((instance, piece))
        return own

    def _handoffs(self, inputs: Sequence[Pieces]) -> tuple[Handoff, ...]:
        handoffs: list[Handoff] = []
        for number, pieces in enumerate(inputs):
            own = self._own(pieces)
            if not own:
                continue
            if len(pieces) > 1:
                raise UnresolvedError(
                    "a stage reads only part of another stage's result",
                    maker_of(self.segment.outputs[0]),
                    5,
                )
            source = own[0][1].source
            assert isinstance(source, Computed)
            output = self.segment.outputs.index(source.value)
            handoffs.append(Handoff(number, output, own[0][1].view.ops))
        return tuple(handoffs)

    @property
    def zeros(self) -> dict[Computed, list[Box]]:
        """The boxes of computed values that are zero."""
        boxes: dict[Computed, list[Box]] = {}
        for instance, numbers in self.zero.items():
            for number in numbers:
                value = self.segment.outputs[number]
                source = Computed(value, instance.rank, instance.tick)
                box = self.rows.output_box(value, number, instance.row)
                boxes.setdefault(source, []).append(box)
        return boxes

    def adds_inputs(self) -> bool:
        """Returns True if a stage adds two of its inputs before it computes anything else from
        them."""
        return any(
            view.operation.name == ADD and all(map(_is_input, view.operation.operands))
            for view in self.segment.block.operations
        )


def _is_input(value: ir.Value) -> bool:
    op = producer(value)
    while op is not None and op.name in RELAYOUTS:
        op = producer(op.operands[0])
    return op is None


class GridFinder:
    """Finds the cells that compute given values."""

    def __init__(self, tracer: Tracer, segments: Segments, scratch: Scratch) -> None:
        self._tracer = tracer
        self._segments = segments
        self._scratch = scratch
        self._inputs: dict[Instance, tuple[Pieces, ...]] = {}

    def cells(self, ends: Sequence[End], sums: Sequence[Summed] = ()) -> Cells:
        """Returns the cells that compute some values, and the terms of sums. Raises
        UnresolvedError."""
        outputs = list(
            dict.fromkeys([*(source.value for source, _ in ends), *(s.value for s in sums)])
        )
        while True:
            segment = self._segments.segment_of(outputs)
            rows = self._rows(segment)
            self._inputs = {}
            wanted = self._wanted_instances(outputs, rows, ends, sums)
            instances, more = self._closure(segment, rows, wanted)
            if not more:
                break
            # Other values that stages pass on become outputs of the segment, too.
            outputs += more
        # Only sums include ramp-up and ramp-down, in which cotangents are zero.
        zero = _find_zeros(segment, rows, self._inputs, instances) if sums else {}
        return Cells(segment, rows, instances, self._inputs, zero)

    def _rows(self, segment: Segment) -> StageRows:
        """Returns the rows of a segment. If all stages are computed along a dimension, an input
        made of parts of earlier results shows which one. Raises UnresolvedError if stages depend on
        each other."""
        # Along a manual axis, each rank computes its own stage.
        if self._tracer.region.ranks.axis:
            return all_stages(segment)
        graph, failed = Graph.from_block(segment.block), None
        for number, dim, count in self._find_stage_dims(segment):
            try:
                rows = rows_along(graph, number, dim, count, self._scratch)
            except NotScaledError as error:
                failed = error.op
                continue
            for output, value in zip(rows.outputs, segment.outputs, strict=True):
                if output is None:
                    raise UnresolvedError("not all stages compute it", maker_of(value), 3)
            return rows
        if failed is None:
            raise UnresolvedError(
                "no stage reads the result of another one", maker_of(segment.outputs[0]), 6
            )
        raise mixed_stages_error(failed)

    def _find_stage_dims(self, segment: Segment) -> Iterable[tuple[int, int, int]]:
        """Yields an input, a dimension and a number of stages for each dimension along which a tick
        reads parts of an earlier tick's results."""
        for number, value in enumerate(segment.inputs):
            if not is_float(value.type):
                continue
            shape = shape_of(value)
            pieces = self._tracer.pieces(value, 0, self._tracer.region.ticks - 1, Box.whole(shape))
            own = _in_loop(self._tracer, [tuple(pieces)])
            for dim, size in enumerate(shape):
                edges = [(t.starts[dim], t.sizes[dim]) for t in (p.view.target for p in own)]
                unit = gcd(size, *(number for edge in edges for number in edge))
                if own and unit < size:
                    yield number, dim, size // unit

    def _wanted_instances(
        self,
        outputs: Sequence[ir.Value],
        rows: StageRows,
        ends: Sequence[End],
        sums: Sequence[Summed],
    ) -> list[Instance]:
        wanted: dict[Instance, None] = {}
        for source, box in ends:
            instance = _instance(rows, outputs.index(source.value), source, box)
            if instance is None:
                raise UnresolvedError(
                    "only a part of its result is used, and it is not the part of one stage",
                    maker_of(source.value),
                    3,
                )
            wanted[instance] = None
        for summed in sums:
            for tick in summed.ticks:
                for row in range(rows.count):
                    wanted[Instance(summed.rank, tick, row)] = None
        return list(wanted)

    def _closure(
        self, segment: Segment, rows: StageRows, wanted: Sequence[Instance]
    ) -> tuple[list[Instance], list[ir.Value]]:
        """Returns all instances that some depend on, and values that they need but are not outputs
        yet."""
        pending, instances, more = list(wanted), dict[Instance, None](), dict[ir.Value, None]()
        while pending:
            instance = pending.pop()
            if instance in instances:
                continue
            instances[instance] = None
            self._inputs[instance] = inputs_of(instance, segment, rows, self._tracer)
            for piece in _in_loop(self._tracer, self._inputs[instance]):
                source = piece.source
                assert isinstance(source, Computed)
                if source.tick == instance.tick:
                    raise UnresolvedError(
                        "a stage selects one of its intermediate values by the tick",
                        maker_of(source.value),
                        6,
                    )
                if source.value not in segment.outputs:
                    more[source.value] = None
                    continue
                before = _instance(rows, segment.outputs.index(source.value), source, piece.box)
                if before is None:
                    raise UnresolvedError(
                        "a stage reads only part of another stage's result",
                        maker_of(source.value),
                        5,
                    )
                pending.append(before)
        # `_find_zeros` needs earlier ticks first.
        return sorted(instances, key=lambda i: (i.tick, i.rank, i.row)), list(more)


def _in_loop(tracer: Tracer, inputs: Iterable[Pieces]) -> list[SourceBox]:
    """Returns the pieces that a tick of the tracer's own loop computed."""
    return [
        piece
        for pieces in inputs
        for piece in pieces
        if isinstance(source := piece.source, Computed)
        and source.tick >= 0
        and tracer.region.is_inside(maker_of(source.value))
    ]


def _instance(rows: StageRows, output: int, source: Computed, box: Box) -> Instance | None:
    """Returns the instance that computed a box of an output; None if no single stage computes
    it."""
    sizes, dim = rows.output_box(source.value, output, 0).sizes, rows.outputs[output]
    if box.sizes != sizes:
        return None
    row = 0 if dim is None else box.starts[dim] // sizes[dim]
    return Instance(source.rank, source.tick, row)


def _find_zeros(
    segment: Segment,
    rows: StageRows,
    inputs: dict[Instance, tuple[Pieces, ...]],
    instances: Sequence[Instance],
) -> Zero:
    """Returns the outputs of each instance that are zero because they are linear in zeros. The
    instances are in the order of ticks."""
    graph = Graph.from_block(rows.block)

    @cache
    def linear_in(numbers: frozenset[int]) -> frozenset[int]:
        sums = PartialSums(propagate(graph, {}, 1))
        sums.terms.update({graph.root.arguments[number]: "add" for number in numbers})
        sums.visit(graph.root.nodes)
        return frozenset(i for i, n in enumerate(graph.root.returned) if sums.is_term(n, "add"))

    computed = [
        (number, source)
        for taken in inputs.values()
        for number, pieces in enumerate(taken)
        for piece in pieces
        if isinstance(source := piece.source, Computed)
    ]
    # Inputs that stages pass to each other. Outputs are tested for linearity in these alone: the
    # product of a cotangent and a residual is not linear in both.
    cotangents = frozenset(n for n, source in computed if source.value in segment.outputs)
    # Inputs that ticks of the pipeline have kept for its backward. They may be zero if cotangents
    # are, too: a product of both is linear in only one of them.
    left = frozenset(
        n for n, source in computed if source.tick >= 0 and source.value not in segment.outputs
    )
    zero: Zero = {}
    for instance in instances:
        numbers = frozenset(
            number
            for number, pieces in enumerate(inputs[instance])
            if is_float(segment.inputs[number].type)
            and all(is_zero(piece, segment, rows, zero) for piece in pieces)
        )
        kept = linear_in(numbers - left)
        zero[instance] = linear_in(numbers & cotangents) | linear_in(numbers) | kept
    return zero


def is_zero(piece: SourceBox, segment: Segment, rows: StageRows, zero: Zero) -> bool:
    """Returns True if a piece is zero, or is of an output that is."""
    source = piece.source
    if not isinstance(source, Computed) or source.value not in segment.outputs:
        return piece.is_zero
    output = segment.outputs.index(source.value)
    instance = _instance(rows, output, source, piece.box)
    return instance is not None and output in zero.get(instance, ())
