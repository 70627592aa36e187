"""Rewrites manual computations and loops that only move elements as moves of whole tensors.

A pipeline in one program may shift its state by a `collective_permute`, in a manual computation in
the loop over all axes of the mesh. MaxText's pipeline does so. The elements that every device
receives are traced back to the shards that they come from. If nothing is computed on the way, the
result is a concatenation of slices of the operands, as in other pipelines in one program:

    %next = sdy.manual_computation(%state) { collective_permute ... }
  ==>
    %next = stablehlo.concatenate %last, %others, dim = 0

Integers that differ from tick to tick may decide which elements are moved: the slot of a buffer
with several microbatches for each stage, for instance. Then there is one such tensor for each of
their values, and the tick selects one of them.

Before a pipeline that it differentiates, jax computes all values that depend on the weights of a
layer alone, in a separate loop. If the weights of a layer are packed in one array, the loop copies
each part:

    %first, %second = stablehlo.while {                 // over the layers
      %row = stablehlo.dynamic_slice %weights, %layer
      %first = stablehlo.dynamic_update_slice (slice %row [0:1]), %layer
      %second = stablehlo.dynamic_update_slice (slice %row [1:2]), %layer
    }
  ==>
    %first = stablehlo.slice %weights [0:8, 0:1]
    %second = stablehlo.slice %weights [0:8, 1:2]

Otherwise each stage would contain such a loop, besides the one over all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues, Values
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_values import ControlValues
from stablehlo_tools.analysis.loops import is_integer_scalar
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import (
    MeshAxes,
    dimension_axes,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, COLLECTIVE_PERMUTE, MANUAL_COMPUTATION, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.views import ManualComputation, While
from stablehlo_tools.ir.walk import ops_named, terminator
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, Located
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion, Ranks, ticks_of
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import region_of
from stablehlo_tools.transforms.parts.fold_pipeline.segments import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    BoxView,
    Computed,
    Known,
    Outside,
    Source,
    SourceBox,
    UnresolvedError,
    zeros,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import MOVING, follow_move
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer, known_piece, only_nonzero

_MOST_PIECES = 1 << 12  # of one result
_MOST_PHASES = 64  # of a loop
_LONGEST_TABLE = 1 << 14  # of phases


def permutes_inside(loop: ir.Operation) -> bool:
    """Returns True if a manual computation in a loop's body moves elements between devices."""
    return any(
        ops_named(op.operation, {COLLECTIVE_PERMUTE})
        for op in While(loop).body.operations
        if op.operation.name == MANUAL_COMPUTATION
    )


def write_moves_globally(module: ir.Module, block: ir.Block) -> None:
    """Rewrites results that are only moved, of the manual computations of a block and of its
    loops."""
    for manual in _manual_computations(block):
        # Read again for each computation: results of the one before may be replaced.
        facts = ModuleFacts.from_module(module)
        values = DeviceValues(module, facts)
        phases = _TickIntegers.from_computation(manual, values) or _TickIntegers()
        shards = [
            _ResultShards(manual, facts, DeviceValues(module, facts, given))
            for given in phases.given
        ]
        for number, result in enumerate(manual.results):
            value = _globally(manual, number, phases, shards)
            if value is not None:
                result.replace_all_uses_with(value)
        if not any(map(has_uses, manual.results)):
            manual.erase()


def _manual_computations(block: ir.Block) -> list[ir.Operation]:
    found: list[ir.Operation] = []
    for view in block.operations:
        op = view.operation
        if op.name == MANUAL_COMPUTATION and not ops_named(op, {WHILE}):
            found.append(op)
        elif op.name == WHILE:
            found += _manual_computations(While(op).body)
    return found


def _globally(
    manual: ir.Operation, number: int, phases: _TickIntegers, shards: Sequence[_ResultShards]
) -> ir.Value | None:
    """Returns a result of a manual computation as moves of its operands; None if it is computed."""
    try:
        pieces = [of_phase.pieces(number) for of_phase in shards]
    except UnresolvedError:
        return None
    build = Builder(ir.InsertionPoint(manual), manual.location)
    composer, type_ = Composer(build, _locate_outside), manual.results[number].type
    if all(own == pieces[0] for own in pieces):
        return composer.compose(pieces[0], type_)
    return phases.select_phase(build, [composer.compose(own, type_) for own in pieces])


@dataclass(frozen=True)
class _TickIntegers:
    """The ticks of a loop, grouped by the integers that a manual computation in its body uses.

    `given` holds the integers of each phase. `number_at` holds the phase for each value of the
    loop's counter, from `first` on. Outside of a loop, or if no integer changes, there is one
    phase.
    """

    given: Sequence[Mapping[ir.Value, Values]] = ({},)
    counter: ir.Value | None = None
    first: int = 0
    number_at: Sequence[int] = ()

    @staticmethod
    def from_computation(manual: ir.Operation, values: DeviceValues) -> _TickIntegers | None:
        """Returns the phases of the loop whose body contains a manual computation. Returns None if
        there is only one, or if the integers are unknown."""
        loop = manual.block.owner.operation
        ticks = ticks_of(loop, values) if loop.name == WHILE else 0
        if isinstance(ticks, str) or not ticks:
            return None
        control = ControlValues(loop, ticks, values.known_tensor)
        changing = [
            value
            for value in manual.operands
            if control.value_at_tick(value, 0) is not None and control.constant(value) is None
        ]
        given = [
            {v: known for v in changing if (known := control.value_at_tick(v, tick)) is not None}
            for tick in range(ticks)
        ]
        phases: dict[tuple[bytes, ...], int] = {}
        numbers = [
            phases.setdefault(tuple(known.tobytes() for known in row.values()), len(phases))
            for row in given
        ]
        if not 1 < len(phases) <= _MOST_PHASES:
            return None
        counting = _counter(loop, control, ticks)
        if counting is None:
            return None
        counter, counts = counting
        number_at = [0] * (max(counts) - min(counts) + 1)
        for count, number in zip(counts, numbers, strict=True):
            number_at[count - min(counts)] = number
        firsts = [given[numbers.index(number)] for number in range(len(phases))]
        return _TickIntegers(firsts, counter, min(counts), number_at)

    def select_phase(self, build: Builder, values: Sequence[ir.Value]) -> ir.Value:
        """Returns the one of `values`, one for each phase, that belongs to the phase of the
        tick."""
        assert self.counter is not None, "one phase selects nothing"
        place = build.same("subtract", self.counter, build.splat_like(self.first, self.counter))
        row = build.dynamic_slice(build.table(self.number_at), [place], [1])
        number, chosen = build.reshape(row, []), values[0]
        for phase, value in enumerate(values[1:], 1):
            is_own = build.compare("EQ", number, build.i32(phase))
            chosen = build.same("select", is_own, value, chosen)
        return chosen


def _counter(
    loop: ir.Operation, control: ControlValues, ticks: int
) -> tuple[ir.Value, list[int]] | None:
    """Returns a carry that has a different value in every tick, the same on all devices, and these
    values; None if there is none."""
    for argument in While(loop).body.arguments:
        if not is_integer_scalar(argument.type):
            continue
        rows = [control.value_at_tick(argument, tick) for tick in range(ticks)]
        counts = [int(row[0]) for row in rows if row is not None and len(row) == 1]
        if len(set(counts)) == ticks and max(counts) - min(counts) < _LONGEST_TABLE:
            return argument, counts
    return None


def _locate_outside(source: Source, box: Box) -> Located:
    assert isinstance(source, Outside)
    return Located(source.value, box)


class _ResultShards:
    """Traces the results of a manual computation, as each device's shard of them, to its
    operands."""

    def __init__(self, manual: ir.Operation, facts: ModuleFacts, values: DeviceValues) -> None:
        self._manual = manual
        self._facts = facts
        self._values = values
        self._block: ir.Block = ManualComputation(manual).body

    def pieces(self, result: int) -> list[SourceBox]:
        """Returns the pieces of a whole result. Raises UnresolvedError."""
        sharding = sharding_per_value(self._manual.attributes["out_shardings"])[result]
        end = terminator(self._block).operands[result]
        whole: dict[Box, list[SourceBox]] = {}
        for device in range(self._facts.grid.size):
            target = self._shard(sharding, shape_of(end), device)
            query = BoxQuery(end, device, -1, Box.whole(shape_of(end)), BoxView(target))
            found = list(self._trace_pieces(query))
            if whole.setdefault(target, found) != found:
                raise UnresolvedError("devices hold different copies", self._manual, 3)
        return [piece for found in whole.values() for piece in found]

    def _shard(self, sharding: ir.Attribute, shape: Sequence[int], device: int) -> Box:
        """Returns the box of a whole tensor that a device's shard holds."""
        mesh: DeviceMesh | None = self._facts.meshes.get(sharding_axes(sharding)[0])
        if mesh is None or mesh.size != self._facts.grid.size:
            raise UnresolvedError("its mesh is not the program's", self._manual, 3)
        axes, starts = MeshAxes(mesh), list[int]()
        for size, (refs, _) in zip(shape, dimension_axes(sharding), strict=True):
            if any(ref.size is not None for ref in refs):
                raise UnresolvedError("a part of an axis divides it", self._manual, 3)
            starts.append(size * int(axes.positions(refs)[device]) if refs else 0)
        return Box(tuple(starts), tuple(shape))

    def _known(self, value: ir.Value, device: int) -> Values | None:
        known = self._values.known_tensor(value)
        return None if known is None else known[device % len(known)]

    def _trace_pieces(self, query: BoxQuery) -> Iterator[SourceBox]:
        pending, count = [query], 0
        while pending:
            asked, count = pending.pop(), count + 1
            if count > _MOST_PIECES:
                raise UnresolvedError("it is in too many pieces", self._manual, 3)
            answer = self._step(asked)
            if isinstance(answer, SourceBox):
                yield answer
            else:
                pending += answer

    def _step(self, query: BoxQuery) -> Sequence[BoxQuery] | SourceBox:
        """Returns the queries one step back on one device, or the piece that the trace ends in."""
        value, device = query.value, query.rank
        known = known_piece(query, self._known(value, device))
        if known is not None:
            return known
        op = producer(value)
        if op is None:
            # A device's shard of an operand, as a box of the whole operand.
            argument = ir.BlockArgument(query.value)
            if argument.owner != self._block:
                raise UnresolvedError("it captures a value from outside", self._manual, 3)
            number = argument.arg_number
            sharding = sharding_per_value(self._manual.attributes["in_shardings"])[number]
            shard = self._shard(sharding, shape_of(query.value), query.rank)
            box = query.box.shift_by(shard.starts)
            return SourceBox(Outside(self._manual.operands[number]), box, query.view)
        if op.name == COLLECTIVE_PERMUTE:
            pairs = self._facts.groups(Collective(op, op, "collective_permute")) or ()
            sender = next((source for source, target in pairs if target == device), None)
            if sender is None:
                return query.ending_in(zeros(element_of(value)))
            return [replace(query, value=op.operands[0], rank=sender)]
        if op.name == ADD:
            terms = [query.in_value(operand, query.box) for operand in op.operands]

            def pieces(term: BoxQuery) -> Iterator[SourceBox]:
                return self._trace_pieces(replace(term, view=BoxView(Box.whole(term.box.sizes))))

            more = only_nonzero(op, terms, pieces)
        else:
            more = follow_move(op, query, lambda v: self._known(v, device))
        if more is None:
            raise UnresolvedError(f"{op.name} computes", op, 3)
        return more


def write_copying_loops_as_moves(module: ir.Module, block: ir.Block) -> None:
    """Rewrites the loops of a block, nested ones too, whose used results are all moved."""
    effects = Effects({})
    # Inner loops first: once they are moves, the loop around them may be one.
    for loop in reversed(ops_named(block.owner.operation, {WHILE})):
        ends = While(loop).yields
        used = [end for end, result in zip(ends, loop.results, strict=True) if has_uses(result)]
        is_moved = all((op := producer(end)) is not None and op.name in MOVING for end in used)
        if effects.has_effect(loop) or not used or not is_moved:
            continue
        facts = ModuleFacts.from_module(module)
        region = region_of(loop, Ranks.single(facts), DeviceValues(module, facts))
        moved = None if isinstance(region, str) else _result_pieces(region)
        if moved is None:
            continue
        composer = Composer(Builder(ir.InsertionPoint(loop), loop.location), _locate_outside)
        for result, pieces in moved:
            result.replace_all_uses_with(composer.compose(pieces, result.type))
        around = loop.block
        loop.erase()
        erase_unused(around)


def _result_pieces(region: LoopRegion) -> list[tuple[ir.Value, list[SourceBox]]] | None:
    """Returns the pieces of the used results of a loop; None if it computes one of them."""
    tracer = _MoveTracer(region)
    moved: list[tuple[ir.Value, list[SourceBox]]] = []
    for number, result in enumerate(region.loop.results):
        if not has_uses(result):
            continue
        whole = Box.whole(shape_of(result))
        try:
            moved.append(
                (result, tracer.trace_boxes(tracer.leaving(number, whole, BoxView(whole))))
            )
        except UnresolvedError:
            return None
    return moved


class _MoveTracer(Tracer):
    """Traces elements that a loop moves. Raises UnresolvedError for elements that it computes."""

    def _beyond(self, piece: SourceBox) -> list[SourceBox]:
        if isinstance(piece.source, Computed | Known):
            raise UnresolvedError("the loop computes it", self.region.loop, 4)
        return super()._beyond(piece)
