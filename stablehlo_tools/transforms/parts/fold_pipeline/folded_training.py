"""Replaces a differentiated pipeline by two loops over its layers, one forward and one backward.

    %y, %kept = while ticks { ... stage ..., residuals of this tick }
    %g = while ticks { ... backward of a stage, on the residuals of a tick; %sum + gradient }
  ==>
    %y, %kept = while layers { layer, its residuals }
    %g = while layers, in reverse { backward of a layer, on its residuals; its gradient }

Both are grids of cells with the same number of microbatches and stages. A cell of the backward may
use two kinds of forward values: those of the cell of the same microbatch and stage, and the stage's
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite, prod

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import RESHAPE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import fold_reshapes
from stablehlo_tools.ir.inline import copy_body
from stablehlo_tools.ir.values import has_uses, is_float, maker_of, producer, skip_constraints
from stablehlo_tools.transforms.parts.fold_pipeline.batch_layout import (
    BatchedStage,
    BatchLayout,
    DividedSamples,
    batch_stage,
)
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, no_sources
from stablehlo_tools.transforms.parts.fold_pipeline.folding import FoldSite, Output, outputs_of
from stablehlo_tools.transforms.parts.fold_pipeline.grid_writing import GridPlan, GridWriter
from stablehlo_tools.transforms.parts.fold_pipeline.grids import End, GridFinder, StageGrid
from stablehlo_tools.transforms.parts.fold_pipeline.layer_scans import LayerBlock, layer_of
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments, erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import Pieces, StageInputs
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Convert,
    Known,
    SourceBox,
    Splat,
    Summed,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import MOVING, repeated_number
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import BackwardTracer, Tracer
from stablehlo_tools.transforms.parts.fold_pipeline.written_layers import by_layer

_MOST_INTEGERS = 1 << 16  # of a tensor whose values are computed


def fold_training(forward: LoopRegion, backward: LoopRegion, module: ir.Module) -> int:
    """Replaces a pipeline and its backward by two loops over layers; returns the number of its
    stages.

    Raises UnresolvedError; do not use the module afterwards.
    """
    _refuse_infinite(forward)
    scratch = Scratch(module)
    before = Tracer(forward)
    sites = FoldSite(forward), FoldSite(backward)
    left = list(outputs_of(sites[0].anchor, but=_leads_to(sites[1].anchor)))
    made = list(outputs_of(sites[1].anchor))
    of_forward = [before.left(output.result, output.box) for output in left]
    segments = Segments(forward, scratch)
    writer = GridWriter(before, scratch, sites[0], segments)
    of_backward, after, second, sums = _find_backward(
        BackwardTracer(backward, before), made, writer, sites[1], scratch
    )

    reached = list(_reachable_pieces(after, of_backward))
    inputs = [list(taken) for row in second.inputs for cell in row for taken in cell]
    reached += _reachable_pieces(after, [*of_forward, *inputs])
    ends = [end for end in _ends(reached) if after.owner_of(end[0]) is writer]
    first = GridFinder(before, segments, scratch).cells(ends).grid()
    # Residuals are stacked by microbatch, so both grids need the same order.
    second = second.reorder_microbatches(_order(first, second, after))
    ends = _ends(
        p for pieces in [*of_forward, *of_backward] for p in _reachable_pieces(after, [pieces])
    )
    divided = DividedSamples(before, segments)

    def plan_grids(grids: tuple[StageGrid, StageGrid]) -> _Plans:
        return _TrainingFoldPlanner(*grids, scratch, sums, divided).plans(ends, after)

    layers = by_layer(first, second, sites[0].anchor.block, scratch)
    plans = plan_grids((first, second) if layers is None else layers)
    if layers is not None and not plans.is_batched:
        # Prefer whole stages if they can compute the microbatches as one batch.
        whole = plan_grids((first, second))
        plans = whole if whole.is_batched else plans
    writer.write_grid(plans.forward, {})
    cells = {
        number: writer.kept(plans.rows[number].number, is_input=plans.rows[number].is_input)
        if number in plans.rows
        else after.stacked_cells(table, plans.backward, number)
        for number, table in plans.backward.inputs.cells.items()
    }
    after.write_grid(plans.backward, cells)
    gradients = _write_outputs(made, of_backward, after, sites[1])
    results = _write_outputs(left, of_forward, writer, sites[0])
    _replace(left, results)
    _replace(made, gradients)
    # The backward first, because it uses results of the pipeline.
    erase_unused(sites[1].anchor.block, sites[1].anchor)
    erase_unused(sites[0].anchor.block)
    if any(map(has_uses, sites[0].anchor.results)):
        raise UnresolvedError(
            "residuals of the pipeline are used outside of its backward", forward.loop, 6
        )
    block = sites[0].anchor.block
    sites[0].anchor.erase()
    scratch.clear()
    fold_reshapes(module)
    erase_unused(block)
    return first.stages


def _find_backward(
    tracer: BackwardTracer,
    outputs: Sequence[Output],
    before: GridWriter,
    site: FoldSite,
    scratch: Scratch,
) -> tuple[list[list[SourceBox]], GridWriter, StageGrid, list[Summed]]:
    """Returns the pieces of a backward's outputs, its writer, its grid, and the sums over ticks
    among those pieces. `tracer` follows the backward.

    In a circular pipeline, the first stage reads the last stage's result again in the ticks of
    ramp-down, but its own result is not used. Only the grid shows that the cotangent of that result
    is zero. An addition to it is then a merge, and the backward is traced again. The same holds for
    a sum over some of the ticks, such as that of the last microbatch's cotangents, which ramp-down
    uses again.
    """
    while True:
        pieces = [tracer.left(output.result, output.box) for output in outputs]
        segments = Segments(tracer.region, scratch, tracer.is_merge)
        writer = GridWriter(tracer, scratch, site, segments, before)
        reached = list(_reachable_pieces(writer, pieces))
        ends = [end for end in _ends(reached) if writer.owner_of(end[0]) is writer]
        sums = [p.source for p in reached if isinstance(p.source, Summed)]
        cells = GridFinder(tracer, segments, scratch).cells(ends, sums)
        partial = any(len(summed.ticks) < tracer.region.ticks for summed in sums)
        asked = partial or cells.adds_inputs()
        informed = tracer.with_zeros(cells.zeros) if asked else None
        if informed is None:
            return pieces, writer, cells.grid(), sums
        tracer = informed


def settle_integers(forward: LoopRegion, anchor: ir.Operation) -> None:
    """Replaces known integers that a pipeline keeps for its backward by constants. In the backward
    they may decide which elements are moved, as predicates of selects do."""
    tracer, pipeline = Tracer(forward), forward.manual or forward.loop
    for number, operand in enumerate(anchor.operands):
        value = skip_constraints(operand)
        maker = producer(value)
        if maker is None or maker != pipeline:
            continue
        result, element = ir.OpResult(value).result_number, element_of(value)
        shape = forward.leaving_shape(result)
        if not isinstance(element, ir.IntegerType) or prod(shape) > _MOST_INTEGERS:
            continue
        try:
            pieces = tracer.left(result, Box.whole(shape))
        except UnresolvedError:
            continue
        if all(isinstance(piece.source, Known | Splat) for piece in pieces):
            build = Builder(ir.InsertionPoint(anchor), anchor.location)
            known = Composer(build, no_sources).compose(pieces, build.tensor(shape, element))
            anchor.operands[number] = known
    erase_unused(anchor.block)  # sharding constraints on the old operands


def _refuse_infinite(forward: LoopRegion) -> None:
    """Raises UnresolvedError if a carry of a pipeline starts from NaN or infinity. Its gradients
    would then be NaN: ramp-up adds zero times such values to them."""
    for operand, argument, end in zip(
        forward.loop.operands, forward.block.arguments, forward.ends, strict=True
    ):
        number = repeated_number(operand) if is_float(operand.type) else None
        if argument != end and isinstance(number, float) and not isfinite(number):
            raise UnresolvedError(
                f"a carry of the pipeline starts from {number}: gradients would be NaN, since they "
                "include zero times the results of ramp-up; start the carry from finite numbers",
                forward.loop,
                6,
            )


def _leads_to(anchor: ir.Operation) -> Callable[[ir.Operation], bool]:
    """Returns a predicate: True for this op, and for an op that only moves elements to it."""

    def leads(op: ir.Operation) -> bool:
        if op == anchor:
            return True
        if op.name not in MOVING or not len(op.results):
            return False
        users = [use.owner.operation for result in op.results for use in result.uses]
        return bool(users) and all(map(leads, users))

    return leads


def _reachable_pieces(
    writer: GridWriter, groups: Iterable[Sequence[SourceBox]]
) -> Iterator[SourceBox]:
    """Yields the pieces, and those of the values computed around the loops that they are parts
    of."""
    pending = [piece for pieces in groups for piece in pieces]
    seen: set[Computed] = set()
    while pending:
        piece = pending.pop()
        yield piece
        source = piece.source
        if isinstance(source, Computed) and source.tick < 0 and source not in seen:
            seen.add(source)
            _, inputs = writer.owner_of(source).around(source)
            pending += [inner for pieces in inputs for inner in pieces]


def _ends(pieces: Iterable[SourceBox]) -> list[End]:
    """Returns the sources and boxes of the pieces that ticks computed."""
    found = dict.fromkeys(
        (piece.source, piece.box)
        for piece in pieces
        if isinstance(piece.source, Computed) and piece.source.tick >= 0
    )
    return list(found)


def _order(first: StageGrid, second: StageGrid, after: GridWriter) -> list[int]:
    """Returns the order that puts the backward's microbatches into the order of the pipeline's.
    Raises UnresolvedError if they do not correspond one to one."""
    number_of: dict[int, int] = {}
    for microbatch, row in enumerate(second.inputs):
        pieces = [piece for cell in row for taken in cell for piece in taken]
        places = [
            first.place_of(source, box)
            for source, box in _ends(pieces)
            if after.owner_of(source) is not after
        ]
        numbers = {place[1] for place in places if place is not None}
        if len(numbers) != 1 or None in places or numbers & number_of.keys():
            raise UnresolvedError(
                f"a microbatch of the backward reads residuals of {len(numbers)} microbatches of "
                "the pipeline",
                maker_of(second.segment.outputs[0]),
                6,
            )
        number_of[numbers.pop()] = microbatch
    if len(number_of) != len(first.cells) or first.length != second.length:
        raise UnresolvedError(
            f"the pipeline has {len(first.cells)} microbatches and {first.length} stages, but its "
            f"backward has {len(second.cells)} and {second.length}",
            maker_of(second.segment.outputs[0]),
            6,
        )
    return [number_of[number] for number in range(len(first.cells))]


@dataclass(frozen=True)
class _ResidualRow:
    """The residual of a layer that the backward of the layer reads: an input that is passed from
    layer to layer, or an output."""

    is_input: bool
    number: int


@dataclass(frozen=True)
class _Plans:
    forward: GridPlan
    backward: GridPlan
    rows: dict[int, _ResidualRow]

    @property
    def is_batched(self) -> bool:
        """True if all microbatches are computed as one batch."""
        return self.forward.layout.stage is not None


class _TrainingFoldPlanner:
    """Decides the layouts in which both loops are written, and their residuals."""

    def __init__(
        self,
        first: StageGrid,
        second: StageGrid,
        scratch: Scratch,
        sums: Sequence[Summed],
        divided: DividedSamples,
    ) -> None:
        self._divided = divided
        self._first = first
        self._second = second
        self._scratch = scratch
        self._sums = frozenset(
            number for summed in sums if (number := second.output_number(summed.value)) is not None
        )

    def plans(self, ends: Sequence[End], after: GridWriter) -> _Plans:
        """Returns the plans. `ends` are values computed in ticks that the rest of the program uses.
        Raises UnresolvedError."""
        first, second = self._first, self._converting()
        self._second = second
        taken = StageInputs.sort_by_dependence(first.inputs, first.handoffs)
        if taken.cells:
            raise UnresolvedError(
                "an operand of a stage depends on both the stage and the microbatch",
                maker_of(first.segment.outputs[0]),
                5,
            )
        given = StageInputs.sort_by_dependence(second.inputs, second.handoffs)
        rows = {n: row for n, table in given.cells.items() if (row := self._row(n, table))}
        # All inputs except rows of the pipeline's residuals.
        groups = [*given.fixed.values()]
        groups += chain.from_iterable((*given.batch.values(), *given.layered.values()))
        for number, table in given.cells.items():
            groups += [] if number in rows else chain.from_iterable(table)
        ends = [*ends, *_ends(_reachable_pieces(after, groups))]
        kept = {row.number for row in rows.values() if not row.is_input}
        layers = self._layers(taken, given, rows)
        stages = self._stages(taken, given, rows, layers)
        count = len(first.cells)
        taken, given = (
            taken_once.for_each(count, stage.inputs) if stage else taken_once
            for taken_once, stage in zip((taken, given), stages, strict=True)
        )
        divided = self._divided.are_in(taken.batch)
        layout = BatchLayout.from_inputs(count, taken.batch, stages[0], divided=divided)
        inputs = {row.number for row in rows.values() if row.is_input}
        forward = GridPlan(
            first, taken, layout, tuple(sorted(inputs)), (), frozenset(), False, layers[0]
        )
        forward = replace(forward, kept_outputs=_layer_outputs(forward, ends, kept))
        layout = BatchLayout(count, stages[1], layout.minor)
        backward = GridPlan(second, given, layout, (), (), self._sums, True, layers[1])
        backward = replace(backward, kept_outputs=_layer_outputs(backward, ends, self._sums))
        return _Plans(forward, backward, rows)

    def _converting(self) -> StageGrid:
        """Returns the backward's grid with the conversions of residuals moved into its cells. The
        cells then read each residual in the type in which the pipeline keeps it."""
        second = self._second
        block = second.rows.block
        raw: dict[int, ir.Type] = {}
        for number, argument in enumerate(block.arguments):
            taken = [cell[number] for row in second.inputs for cell in row]
            sources = {
                str(element_of(piece.source.value))
                for pieces in taken
                for piece in pieces
                if isinstance(piece.source, Computed)
                and self._first.place_of(piece.source, piece.box) is not None
            }
            if len(sources) != 1 or any(len(pieces) != 1 for pieces in taken):
                continue
            ops = [piece.view.ops for pieces in taken for piece in pieces]
            if any(len(own) != 1 or not isinstance(own[0], Convert) for own in ops):
                continue
            element = ir.Type.parse(sources.pop(), block.owner.context)
            shape = shape_of(argument)
            raw[number] = ir.RankedTensorType.get(shape, element, loc=ir.Location.unknown())
        if not raw:
            return second

        def fill(inner: ir.Block, arguments: Sequence[ir.Value]) -> Sequence[ir.Value]:
            build = Builder(ir.InsertionPoint(inner), block.owner.operation.location)
            given = [
                build.convert(value, element_of(block.arguments[n])) if n in raw else value
                for n, value in enumerate(arguments)
            ]
            return copy_body(block, given, build.point)[1]

        types = list(({n: a.type for n, a in enumerate(block.arguments)} | raw).values())

        def drop_view_ops(number: int, pieces: Pieces) -> Pieces:
            if number not in raw:
                return pieces
            return tuple(replace(piece, view=replace(piece.view, ops=())) for piece in pieces)

        function = self._scratch.function(types, fill)
        rows = replace(second.rows, function=function)
        return replace(second.with_pieces(drop_view_ops), rows=rows)

    def _row(self, number: int, table: Sequence[Sequence[Pieces]]) -> _ResidualRow | None:
        """Returns the residual of the pipeline's layers that an input of the backward is; None if
        it is anything else."""
        first = self._first
        cells = [
            (pieces, microbatch, first.length - 1 - n)
            for microbatch, row in enumerate(table)
            for n, pieces in enumerate(row)
        ]
        for handoff in first.handoffs:
            if all(pieces == first.inputs[m][n][handoff.input] for pieces, m, n in cells):
                return _ResidualRow(True, handoff.input)
        block = self._second.rows.block
        whole = Box.whole(shape_of(block.arguments[number]))
        outputs: set[int | None] = set()
        for pieces, *place in cells:
            piece = next(iter(pieces))
            source, view = piece.source, piece.view
            if len(pieces) > 1 or view.ops or view.target != whole:
                return None
            if not isinstance(source, Computed):
                return None
            found = first.place_of(source, piece.box)
            outputs.add(found[0] if found and list(found[1:]) == place else None)
        output = outputs.pop()
        return None if outputs or output is None else _ResidualRow(False, output)

    def _layers(
        self, taken: StageInputs, given: StageInputs, rows: dict[int, _ResidualRow]
    ) -> tuple[LayerBlock, LayerBlock]:
        """Returns the blocks that compute a layer, forward and backward. These are the bodies of
        the stages' scans, or the whole stages if one of them is not a scan."""
        first, second = self._first, self._second
        stages = [grid.rows.block for grid in (first, second)]
        whole = LayerBlock(stages[0]), LayerBlock(stages[1])
        if rows.keys() != given.cells.keys() or any(row.is_input for row in rows.values()):
            return whole
        forward = layer_of(stages[0], first.handoffs, taken.layered, self._scratch, reverse=False)
        stacked = {*given.layered, *given.cells}
        backward = layer_of(stages[1], second.handoffs, stacked, self._scratch, reverse=True)
        if forward is None or backward is None or forward.each != backward.each:
            return whole
        if any(forward.outputs.get(row.number) != backward.inputs[n] for n, row in rows.items()):
            return whole
        return forward, backward

    def _stages(
        self,
        taken: StageInputs,
        given: StageInputs,
        rows: dict[int, _ResidualRow],
        layers: tuple[LayerBlock, LayerBlock],
    ) -> tuple[BatchedStage | None, BatchedStage | None]:
        """Returns how the stages compute all microbatches as one batch, forward and backward.
        Returns None for both if one of them mixes samples."""
        first, second = self._first, self._second
        blocks = [each.block for each in layers]
        stage = batch_stage(
            blocks[0], taken.batch, first.handoffs, self._scratch, fixed=taken.fixed
        )
        if stage is None:
            return None, None
        along = {
            number: stage.inputs[row.number] if row.is_input else stage.output_dim(row.number)
            for number, row in rows.items()
        }
        batch = {*given.batch, *given.cells}
        back = batch_stage(
            blocks[1],
            batch,
            second.handoffs,
            self._scratch,
            along=along,
            sums=self._sums,
            fixed=given.fixed,
        )
        return (None, None) if back is None else (stage, back)


def _layer_outputs(plan: GridPlan, ends: Sequence[End], kept: Iterable[int]) -> tuple[int, ...]:
    """Returns the outputs to keep for each layer. These are `kept`, and outputs in `ends` that are
    not passed on, or that a layer before the last computes."""
    stacked = set(kept)
    for source, box in ends:
        place = plan.grid.place_of(source, box)
        if place is None:
            continue
        output, _, application = place
        if application < plan.grid.length - 1 or plan.last_input(output) is None:
            stacked.add(output)
    return tuple(sorted(stacked))


def _write_outputs(
    outputs: Sequence[Output], pieces: Sequence[list[SourceBox]], writer: GridWriter, site: FoldSite
) -> list[ir.Value]:
    """Returns the outputs of a region, written at its site."""
    return [
        writer.compose_output(consists_of, site.type_of(output))
        for output, consists_of in zip(outputs, pieces, strict=True)
    ]


def _replace(outputs: Sequence[Output], values: Sequence[ir.Value]) -> None:
    """Replaces a region's outputs by values."""
    for output, value in zip(outputs, values, strict=True):
        output.value.replace_all_uses_with(value)
        # Let reshapes of a reshaped value start from the value itself. Otherwise the microbatches
        # would be split off the batch and joined to one batch again.
        op = producer(value)
        if op is not None and op.name == RESHAPE:
            for user in [use.owner.operation for use in value.uses]:
                if user.name == RESHAPE:
                    user.operands[0] = op.operands[0]
