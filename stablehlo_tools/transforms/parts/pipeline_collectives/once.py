"""Runs collectives once that a loop over microbatches repeats: weights are gathered before it,
gradients are reduced after it.

The collectives are in an inner loop over layers, and each of its iterations gathers other weights.
But over all its iterations it gathers the same for every microbatch:

    while (%microbatch) {
      while (%layer) {
        %s = stablehlo.dynamic_slice %weights, %layer
        %g = "stablehlo.all_gather"(%s)
      }
    }
  ==>
    %all = "stablehlo.all_gather"(%weights)           // the rows of all layers, stacked
    while (%microbatch) {
      while (%layer) {
        %g = stablehlo.dynamic_slice %all, %layer
      }
    }

A row of `%all` is the result of the ops between `%weights` and `%g` on that row. This holds for any
index, if all devices of a group use the same one. So rows need not be in order, and some may be
unused. A pipeline that runs a chunk of its layers only in some iterations gathers its weights once,
too. The rewrite pays if there are fewer rows than iterations.

Gradients leave in the other direction. An iteration reduces a gradient and stores it in a row: it
stores the local gradient instead. The stack is reduced after the inner loop (`sinking.rows`), and
the sum over microbatches after the outer one (`sinking.sums`). A gradient that is added to a row of
sums is added unreduced (`sinking.rows`, too).

Loops are rewritten from the inside out, and each gives up what can leave it. Only collectives that
leave a loop that repeats them are worth it. So `liftable` tries all on a copy and compares the
traffic. For that, collectives have numbers in an attribute, which copies keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    channel_number,
    find_collectives,
)
from stablehlo_tools.analysis.loop_carries import row_dims
from stablehlo_tools.analysis.loops import FORMATTING, LoopBody, expected_trips
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.dialect.names import BARRIER, DYNAMIC_SLICE, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.structural_key import op_key
from stablehlo_tools.ir.values import has_uses, key_of, maker_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import drop_attributes, ops_around, walk
from stablehlo_tools.transforms.parts.bucket_collectives.merged_writing import reshape_if_needed
from stablehlo_tools.transforms.parts.pipeline_collectives.branch_collectives import (
    bring_out,
    put_back,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import frame_before, is_the_same
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    has_sharding,
    is_static_tensor,
    loops_of,
    next_loop,
    survey_loop,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.rows import (
    captured_by,
    has_rule,
    parameters_of,
    run_stacked,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sink_plan import (
    Sinking,
    sinkings,
    write_sinkings,
)

_NUMBER = "stablehlo_tools.number"  # of a collective
_TO_LIFT = "stablehlo_tools.to_lift"  # on the loops that are not done yet
_LIFTED = "stablehlo_tools.lifted"  # on ops written before a loop
_NOT_FULL = 0.9  # of a device's memory: beyond it, XLA:GPU gives up overlap
_LITTLE_MORE = 1.05
_REPEATED = 2  # assumed trips of a loop with an unknown trip count


@dataclass(frozen=True)
class Lifted:
    """A collective that can leave loops that repeat it.

    `saved`: bytes that a device sends less in a run. `kept`: bytes that stay live for it, from
    before the loops or until after them. `is_ahead`: it runs before them. `is_nested`: it leaves
    more than one loop, or runs on stacked rows.
    """

    number: int
    saved: float
    kept: float
    is_ahead: bool
    is_nested: bool
    note: Diagnostic


def number_collectives(module: ir.Module) -> None:
    """Numbers the collectives in loops whose results are used, to find them again in copies."""
    type_ = ir.IntegerType.get_signless(64, module.context)
    for number, found in enumerate(find_collectives(module)):
        if ops_around(found.op, WHILE) and any(map(has_uses, found.op.results)):
            found.op.attributes[_NUMBER] = ir.IntegerAttr.get(type_, number)


def forget_numbers(module: ir.Module) -> None:
    """Removes the attributes of `number_collectives` and `lift`."""
    drop_attributes(module.operation, (_NUMBER, _LIFTED))


def liftable(module: ir.Module, facts: ModuleFacts) -> list[Lifted]:
    """Returns the numbered collectives that `lift` can take out of loops that repeat them.

    Sorted by bytes saved for each byte kept, highest first.
    """
    before, after = _traffic(module), dict[int, _Traffic]()
    chosen = frozenset(before)
    while chosen:
        copy = copy_module(module)
        lift(copy, facts, chosen)
        after = _traffic(copy)
        less = frozenset(n for n in chosen if n not in after or after[n].sent < before[n].sent)
        if less == chosen:
            break
        # A collective that stays may keep others in its loop, so the rest is tried again.
        chosen = less
    found = [_describe_lifting(number, before[number], after.get(number)) for number in chosen]
    return sorted(found, key=lambda each: (-each.saved / max(each.kept, 1.0), each.number))


def lift(module: ir.Module, facts: ModuleFacts, chosen: frozenset[int]) -> None:
    """Takes the chosen collectives out of loops, each as far out as possible."""
    for loop in loops_of(module):
        loop.attributes[_TO_LIFT] = ir.UnitAttr.get(loop.context)
    while (loop := next_loop(module, _TO_LIFT)) is not None:
        surveyed = survey_loop(loop, module, facts)
        opened = bring_out(surveyed.body, lambda op: _number_of(op) in chosen)
        if opened:
            surveyed = survey_loop(loop, module, facts)
        if surveyed.fewest >= 1:
            _hoist(surveyed, chosen)
        while _run_on_all_rows(survey_loop(loop, module, facts), chosen):
            # Each collective that leaves makes the survey invalid, so the loop is surveyed again.
            erase_unused(While(loop).body)
        loop = _sunk(survey_loop(loop, module, facts), chosen)
        if opened:
            put_back(survey_loop(loop, module, facts).body)
        del loop.attributes[_TO_LIFT]
    _share(module)


def _number_of(op: ir.Operation) -> int | None:
    return ir.IntegerAttr(op.attributes[_NUMBER]).value if _NUMBER in op.attributes else None


@dataclass(frozen=True)
class _Traffic:
    """The bytes that a collective sends in a run of one device (`sent`), and that it holds at once
    (`held`).

    `held` is the larger of operands and results. Copies of a collective are summed up.
    """

    collective: Collective
    loops: int
    sent: float
    held: float


def _traffic(module: ir.Module) -> dict[int, _Traffic]:
    """Returns the traffic of the collectives that have numbers."""
    traffic: dict[int, _Traffic] = {}
    for found in find_collectives(module):
        number = _number_of(found.op)
        if number is None:
            continue
        loops = ops_around(found.op, WHILE)
        held = float(max(found.bytes_in or 0, found.bytes_out or 0))
        sent = held * prod(expected_trips(loop, _REPEATED) for loop in loops)
        if number in traffic:
            sent, held = sent + traffic[number].sent, held + traffic[number].held
        traffic[number] = _Traffic(found, len(loops), sent, held)
    return traffic


def _describe_lifting(number: int, before: _Traffic, after: _Traffic | None) -> Lifted:
    """Describes a lifted collective; `after` is None if another collective replaced it."""
    ranks = [len(shape_of(each.collective.op.operands[0])) for each in (before, after) if each]
    is_stacked = after is None or ranks[0] < ranks[1]
    is_ahead = after is None or _LIFTED in after.collective.op.attributes
    where = "before" if is_ahead else "after"
    rows = ", on all rows at once" if is_stacked else ""
    text = f"{before.collective.kind} runs once, {where} the loop that repeats it{rows}"
    return Lifted(
        number,
        before.sent - (after.sent if after else 0.0),
        after.held if after else 0.0,
        is_ahead,
        before.loops > 1 or is_stacked,
        note(text, before.collective.op.location),
    )


def _hoist(surveyed: LoopSurvey, chosen: frozenset[int]) -> None:
    """Moves ops that compute the same in all iterations before the loop."""
    body = surveyed.body
    moves = [m for m in surveyed.ahead if m.ops and _number_of(m.collective.op) in chosen]
    needed = {key_of(op) for m in moves if is_the_same(body, m.ops) for op in m.ops}
    moved = [op for op in body.ops if key_of(op) in needed]
    frame = frame_before(body)
    for op in moved:
        frame.run(op, 0)
    for op in reversed(moved):
        for value in op.results:
            there = frame.get(value, 0)
            value.replace_all_uses_with(there)
            _mark(there)
        op.erase()


def _mark(value: ir.Value) -> None:
    """Marks the producer of a value as written before a loop."""
    maker = maker_of(value)
    maker.attributes[_LIFTED] = ir.UnitAttr.get(maker.context)


def _sunk(surveyed: LoopSurvey, chosen: frozenset[int]) -> ir.Operation:
    """Sinks those of the chosen collectives that can run after the loop; returns the loop.

    Rows that an iteration stores are stacked only in an inner loop, because the outer loop may add
    up the stacks.
    """
    body = surveyed.body
    ways = {"sum", "row sum", "batch"} if ops_around(body.loop, WHILE) else {"sum", "row sum"}
    plans = [plan for plan in sinkings(surveyed).values() if isinstance(plan, Sinking)]
    kept = {plan.group for plan in plans if _number_of(plan.collective.op) not in chosen}
    taken = [plan for plan in plans if plan.group not in kept and plan.way in ways]
    return write_sinkings(body, taken)[0] if taken else body.loop


def _run_on_all_rows(surveyed: LoopSurvey, chosen: frozenset[int]) -> bool:
    """Runs one collective on all rows before the loop; returns True if there was one.

    An outermost loop needs fewer rows than iterations for that.
    """
    body = surveyed.body
    most = inf if ops_around(body.loop, WHILE) else (surveyed.trips or 0) - 1
    for collective in surveyed.collectives:
        row = _row_of(body, collective) if _number_of(collective.op) in chosen else None
        if row is not None and row.count <= most and surveyed.alike(body.loop, row.ops, row.index):
            row.run_on_all()
            return True
    return False


@dataclass(frozen=True)
class _IterationRow:
    """The computation of an iteration on the row at `index` of the first dimensions, of `sizes`.

    `ops` lead, in order, to a collective, which is the last of them. `slices` maps each slice of a
    row to the sliced operand, `behind` a result of a barrier to its operand.
    """

    body: LoopBody
    ops: Sequence[ir.Operation]
    slices: Mapping[ir.Value, ir.Value]
    behind: Mapping[ir.Value, ir.Value]
    index: Sequence[ir.Value]
    sizes: Sequence[int]

    @property
    def count(self) -> int:
        """The number of rows."""
        return prod(self.sizes)

    def run_on_all(self) -> None:
        """Runs the ops on all rows before the loop; iterations slice their row of the result."""
        loop, collective = self.body.loop, self.ops[-1]
        point = ir.InsertionPoint(loop)
        frame = frame_before(self.body)
        stacked: dict[ir.Value, ir.Value] = {}
        for value, whole in self.slices.items():
            builder = Builder(point, maker_of(value).location)
            shape = [self.count, *shape_of(value)]
            stacked[value] = builder.reshape(frame.get(whole, 0), shape)
            _mark(stacked[value])
        for op in self.ops:
            given: list[tuple[ir.Value, bool]] = []
            for value in op.operands:
                source = value
                while source in self.behind:
                    source = self.behind[source]
                is_row = source in stacked
                given.append((stacked[source] if is_row else frame.get(source, 0), is_row))
            captured = {v: frame.get(v, 0) for v in captured_by(self.body, op)}
            new = run_stacked(op, self.count, given, captured, point)
            for old, value in zip(op.results, new, strict=True):
                stacked[old] = value
                _mark(value)
        result = collective.results[0]
        builder = Builder(ir.InsertionPoint(collective), collective.location)
        shape = shape_of(result)
        zero = builder.splat(0, [], element_of(self.index[0]))
        starts = [*self.index, *[zero] * len(shape)]
        there = Builder(point, collective.location)
        rows = reshape_if_needed(there, stacked[result], [*self.sizes, *shape])
        _mark(rows)
        row = builder.dynamic_slice(rows, starts, [*[1] * len(self.sizes), *shape])
        result.replace_all_uses_with(builder.reshape(row, shape))
        collective.erase()


def _row_of(body: LoopBody, collective: Collective) -> _IterationRow | None:
    """Traces a collective back to the row that an iteration slices; None if it does not follow from
    one."""
    ops: dict[int, ir.Operation] = {}
    slices: dict[ir.Value, ir.Value] = {}
    behind: dict[ir.Value, ir.Value] = {}
    indices: set[tuple[ir.Value, ...]] = set()
    sizes: set[tuple[int, ...]] = set()
    pending: list[ir.Value] = [collective.op.results[0]]
    while pending:
        value = pending.pop()
        maker = producer(value)
        if _is_fixed(body, value) or value in slices or value in behind:
            continue
        if maker is None or not body.is_inside(value):
            return None
        if maker.name == BARRIER:  # it kept gathers from merging that now become one
            behind[value] = maker.operands[ir.OpResult(value).result_number]
            pending.append(behind[value])
        elif dims := _row_dims(body, maker):
            slices[value] = maker.operands[0]
            indices.add(tuple(maker.operands[1 + dim] for dim in dims))
            sizes.add(tuple(shape_of(maker.operands[0])[dim] for dim in dims))
        elif not _runs_on_rows(body, maker):
            return None
        else:
            ops[body.position_of[key_of(maker)]] = maker
            pending += maker.operands
    if len(indices) != 1 or len(sizes) != 1:
        return None
    ordered = [ops[place] for place in sorted(ops)]
    return _IterationRow(body, ordered, slices, behind, indices.pop(), sizes.pop())


def _is_fixed(body: LoopBody, value: ir.Value) -> bool:
    return body.is_indexed(value) and not body.is_moving(value)


def _row_dims(body: LoopBody, op: ir.Operation) -> list[int] | None:
    """Returns the indexed dimensions of a slice that reads one row of an invariant operand.

    None if the op is not such a slice.
    """
    if op.name != DYNAMIC_SLICE or has_sharding(op) or not _is_fixed(body, op.operands[0]):
        return None
    if not is_static_tensor(op.operands[0].type):
        return None
    return row_dims(shape_of(op.operands[0]), shape_of(op.results[0]))


def _runs_on_rows(body: LoopBody, op: ir.Operation) -> bool:
    """Returns True if an op can run on all rows at once."""
    if not has_rule(op) or has_sharding(op) or len(op.results) != 1:
        return False
    if body.communicates(op) and len(op.operands) != 1:
        return False
    if not all(is_static_tensor(value.type) for value in (*op.operands, *op.results)):
        return False
    fixed = [op.operands[i] for i in parameters_of(op)] + captured_by(body, op)
    return all(_is_fixed(body, value) for value in fixed)


def _share(module: ir.Module) -> None:
    """Merges equal ops that were written before a loop: forward and backward gather the same
    weights."""
    known: dict[tuple[object, ...], ir.Operation] = {}
    unused: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if _LIFTED not in op.attributes:
            return ir.WalkResult.ADVANCE
        first = known.setdefault((op.block, *_equality_key(op)), op)
        if first is not op:
            for old, new in zip(op.results, first.results, strict=True):
                old.replace_all_uses_with(new)
            unused.append(op)
        return ir.WalkResult.SKIP

    walk(module.operation, visit)
    for op in reversed(unused):
        op.erase()


def _equality_key(op: ir.Operation) -> tuple[object, ...]:
    """Returns a key that is equal for ops that compute the same; their channels may differ."""
    ours = (_NUMBER, _LIFTED, "channel_handle")
    key = op_key(op, is_said=lambda name: name not in ours)
    has_region = [key_of(op)] if len(op.regions) else []
    operands = tuple(_origin(value) for value in op.operands)
    return (key, operands, channel_number(op) > 0, *has_region)


def _origin(value: ir.Value) -> object:
    """Returns a key for a value: a description of its formatting ops, or else the value itself.

    Two loops may each have a reshape of the same weights.
    """
    maker = producer(value)
    if maker is None or maker.name not in FORMATTING or _LIFTED in maker.attributes:
        return value
    return _equality_key(maker)


def best_lifting(
    module: ir.Module, facts: ModuleFacts, hardware: Hardware, limit: float | None
) -> list[Lifted]:
    """Chooses the collectives to lift out of several loops so that the predicted time is shortest.

    Returns an empty list if no choice is faster within `limit` bytes. Without a limit, it is most
    of the device's memory, or a little more than the program needs anyway.

    Tries all collectives, only those that go before the loops, and only those that go after them.
    If the program does not fit, drops those that save least for the memory that they need.

    Raises ToolError if the program cannot be timed.
    """
    found = [each for each in liftable(module, facts) if each.is_nested]
    if not found:
        return []
    own = expected_run(module, hardware)
    best, least = list[Lifted](), own.contended_ns
    sensible = max(_NOT_FULL * hardware.memory_bytes, _LITTLE_MORE * own.peak_bytes)
    most = sensible if limit is None else max(limit, own.peak_bytes)
    tried: list[list[Lifted]] = []
    for kinds in ((True, False), (True,), (False,)):
        chosen = [each for each in found if each.is_ahead in kinds]
        while chosen and chosen not in tried:
            tried.append(chosen)
            copy = copy_module(module)
            lift(copy, facts, frozenset(each.number for each in chosen))
            run = expected_run(copy, hardware)
            if run.peak_bytes > most:
                # Drops collectives from the end until they free the excess, at least one.
                excess, left = run.peak_bytes - most, list(chosen)
                while left and (excess > 0 or len(left) == len(chosen)):
                    excess -= left.pop().kept
                chosen = left
            elif run.contended_ns < least:
                best, least = chosen, run.contended_ns
    return best
