"""What the rest of a program uses of a pipeline, and where the loop over layers goes that gives it.

  %r = sdy.manual_computation(%x) manual_axes={"stage"} { ... the pipeline ... }
==>
  %r = ... what is written here ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT, SLICE
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box


def _no(_: ir.Operation) -> bool:
    return False


class Output(NamedTuple):
    """A value to be replaced, which is a box of a result."""

    value: ir.Value
    result: int
    box: Box


def outputs_of(op: ir.Operation, *, but: Callable[[ir.Operation], bool] = _no) -> Iterator[Output]:
    """The results of an op that are used; or the slices where nothing else is of one.

    The pipeline's last ticks give the outputs, and the others garbage that must not be traced. Uses
    by ops that `but` names do not count.
    """
    for number, result in enumerate(op.results):
        users = [user for user in _users(result) if not but(user)]
        if not users:
            continue
        boxes = [_sliced(user) for user in users]
        if None in boxes:
            yield Output(result, number, Box.whole(shape_of(result)))
            continue
        for user, box in zip(users, boxes, strict=True):
            assert box is not None
            yield Output(user.results[0], number, box)


def _users(value: ir.Value) -> Iterator[ir.Operation]:
    """The ops that use a value, or slices of what is only constrained before it is sliced."""
    for op in [use.owner.operation for use in value.uses]:
        behind = list(_users(op.results[0])) if op.name == SHARDING_CONSTRAINT else []
        yield from behind if behind and all(map(_sliced, behind)) else [op]


def _sliced(op: ir.Operation) -> Box | None:
    """The box that a slice without strides takes."""
    if op.name != SLICE or any(stride != 1 for stride in integers(op, "strides")):
        return None
    return Box(integers(op, "start_indices"), tuple(shape_of(op.results[0])))


class FoldSite:
    """Where the loop over layers goes: in front of the pipeline's loop, or of the manual
    computation around it."""

    def __init__(self, region: LoopRegion) -> None:
        self.anchor = region.manual or region.loop
        self.point = ir.InsertionPoint(self.anchor)
        self._entering: dict[ir.Value, ir.Value] = {}
        if region.manual is not None:
            arguments = region.manual.regions[0].blocks[0].arguments
            self._entering.update(zip(arguments, region.manual.operands, strict=True))

    def entering(self, value: ir.Value) -> ir.Value:
        """What stands here for a value from outside of the region."""
        return self._entering.get(value, value)

    def type_of(self, output: Output) -> ir.Type:
        """The type that an output has here."""
        return ir.RankedTensorType.get(
            output.box.sizes, element_of(output.value), loc=self.anchor.location
        )
