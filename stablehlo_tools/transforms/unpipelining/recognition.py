"""The loops of a module that may be those of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.communication import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.analysis.trip_counts import counted, is_integer_scalar
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.building import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.unpipelining.loop_region import LoopRegion, Ranks

_PERMUTE = "stablehlo.collective_permute"
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
    return [op.operation for op in body.operations if _rotates(op.operation)]


def _rotates(op: ir.Operation) -> bool:
    if op.name not in _PUTTING:
        return False
    slices = [maker for value in op.operands if (maker := producer(value)) is not None]
    slices = [maker for maker in slices if maker.name == "stablehlo.slice"]
    whole = shape_of(op.results[0])
    return any(
        shape_of(maker.operands[0]) == whole and shape_of(maker.results[0]) != whole
        for maker in slices
    )


def axis_of(loop: ir.Operation, manual: ir.Operation, values: DeviceValues) -> Ranks | None:
    """The axis of a manual computation along which a loop's permutes move elements."""
    for axis in sorted(manual_axes(manual)):
        ranks = Ranks.of(axis, manual, values.facts)
        if ranks is None or ranks.count < 2:
            continue
        groups = Ranks.groups(axis, manual, values.facts)
        for op in permutes_of(loop):
            pairs = values.facts.groups(Collective(op, op, "collective_permute")) or ()
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
    return LoopRegion(loop, found.trips[0], ranks, values)
