"""The loops of a module that may be those of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.analysis.trip_counts import counted, is_integer_scalar
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer, unconstrained
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion, Ranks

_PERMUTE = "stablehlo.collective_permute"
_MOST = 1 << 14  # iterations that are gone through
_PUTTING = frozenset(
    f"stablehlo.{name}" for name in ("concatenate", "pad", "dynamic_update_slice", "scatter")
)


def loops_of(block: ir.Block) -> Iterator[ir.Operation]:
    """The loops of a block and of manual computations in it that are in no other loop, in order."""
    for view in block.operations:
        op = view.operation
        if op.name == WHILE:
            yield op
        elif op.name == MANUAL_COMPUTATION:
            yield from loops_of(op.regions[0].blocks[0])


def permutes_of(loop: ir.Operation) -> list[ir.Operation]:
    """The collective_permutes of a loop's body itself."""
    body = loop.regions[1].blocks[0]
    return [op.operation for op in body.operations if op.operation.name == _PERMUTE]


def manual_around(loop: ir.Operation) -> ir.Operation | None:
    """The manual computation whose body a loop is an op of."""
    owner = loop.block.owner.operation
    return owner if owner.name == MANUAL_COMPUTATION else None


def rotations_of(loop: ir.Operation) -> list[ir.Operation]:
    """Ops of a loop's body that shift a tensor along a dimension, as a pipeline in one program
    hands its state on: slices of it put together anew, padded, or written elsewhere."""
    body = loop.regions[1].blocks[0]
    changing: set[ir.Value] = set(body.arguments) - set(terminator(body).operands)
    return [op.operation for op in body.operations if _rotates(op.operation, changing)]


def _rotates(op: ir.Operation, changing: set[ir.Value]) -> bool:
    """Whether an op moves slices of a carry, or what of them becomes one."""
    if op.name not in _PUTTING:
        return False
    slices = [maker for value in op.operands if (maker := producer(value)) is not None]
    slices = [maker for maker in slices if maker.name == "stablehlo.slice"]
    whole = shape_of(op.results[0])
    return any(
        shape_of(maker.operands[0]) == whole
        and shape_of(maker.results[0]) != whole
        and (unconstrained(maker.operands[0]) in changing or _is_carried(op))
        for maker in slices
    )


def _is_carried(op: ir.Operation) -> bool:
    """Whether a result is handed on to the next iteration, past ops that only move elements."""
    pending = list(op.results)
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if user.name == "stablehlo.return":
                return True
            if user.name in FORMATTING or user.name in _PUTTING | {"stablehlo.select"}:
                pending += user.results
    return False


def may_be_pipeline(loop: ir.Operation) -> bool:
    """Whether a loop moves elements as a pipeline does, from rank to rank or along a dimension."""
    return bool(rotations_of(loop) if manual_around(loop) is None else permutes_of(loop))


def backward_of(anchor: ir.Operation, ticks: int) -> ir.Operation | None:
    """The loop that takes what a pipeline has kept of its ticks: the pipeline backwards.

    `anchor` is the pipeline's loop, or the manual computation around it; what it has kept of its
    ticks is stacked.
    """
    pending: list[ir.Value] = list(anchor.results)
    while pending:
        value = pending.pop()
        for use in value.uses:
            op = use.owner.operation
            loops: list[ir.Operation] = []
            if op.name == MANUAL_COMPUTATION:
                loops = [loop for loop in loops_of(op.regions[0].blocks[0]) if permutes_of(loop)]
            elif op.name == WHILE:
                loops = [op] if ticks in shape_of(value)[:1] else []
            elif op.name in FORMATTING:
                pending += op.results
            if loops:
                return loops[0]
    return None


def axis_of(loop: ir.Operation, manual: ir.Operation, facts: ModuleFacts) -> Ranks | None:
    """The axis of a manual computation along which a loop's permutes move elements."""
    for axis in sorted(manual_axes(manual)):
        ranks = Ranks.of(axis, manual, facts)
        if ranks is None or ranks.count < 2:
            continue
        groups = Ranks.groups(axis, manual, facts)
        for op in permutes_of(loop):
            pairs = facts.groups(Collective(op, op, "collective_permute")) or ()
            together = {device: number for number, g in enumerate(groups) for device in g}
            if pairs and all(together[a] == together[b] for a, b in pairs):
                return ranks
    return None


def region_of(loop: ir.Operation, ranks: Ranks, values: DeviceValues) -> LoopRegion | str:
    """The loop as the ranks run it, or why how often it runs is not known."""

    def known(value: ir.Value) -> list[int] | None:
        found = values.of(value) if is_integer_scalar(value.type) else None
        return None if found is None else [int(n) for n in found.ravel()]

    found = counted(loop, known)
    if isinstance(found, str):
        return found
    if len(set(found.trips)) > 1:
        return "devices run it different numbers of times"
    if found.trips[0] > _MOST:
        return f"it runs {found.trips[0]} times, which is more than is gone through"
    return LoopRegion(loop, found.trips[0], ranks, values)
