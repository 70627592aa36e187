"""Turns a body on global tensors into what one device runs on its parts.

    %0 = stablehlo.slice %x [0:64, 2:4] : (tensor<64x8xf32>) -> tensor<64x2xf32>   // dim 0 over "x"
    ==>
    %0 = stablehlo.slice %x [0:16, 2:4] : (tensor<16x8xf32>) -> tensor<16x2xf32>   // of 4 devices

Every op fits its sharding rule by now, so most change their types alone. Ops that know sizes or
places of elements are written anew; Shardy's collectives become StableHLO's; manual computations
dissolve, since the whole body is manual now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from stablehlo_tools.analysis.shardings import (
    RULE,
    SHARDING,
    Axes,
    Dims,
    ValueShardings,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with_any
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import CONSTANTS, has_uses, producer, stand_in
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.partition.local_body import (
    WRITTEN,
    CollectiveWriter,
    DeviceOffsets,
)
from stablehlo_tools.transforms.parts.partition.local_ops import REWRITERS, constant
from stablehlo_tools.transforms.parts.partition.moving import Moved

_WITH_BODIES = ops_with_any(Trait.BRANCH | Trait.LOOP)


class Localizer:
    """Localizes the body of one function, whose values are divided as `shardings` says."""

    def __init__(
        self, body: ir.Block, shardings: ValueShardings, first_channel: int, hardware: Hardware
    ) -> None:
        self._body = body
        self.shardings = shardings
        self._axes = shardings.axes
        self._divided: dict[ir.Value, Dims] = {}
        self._whole: dict[ir.Value, list[int]] = {}  # shapes, where divided
        self._moved: dict[ir.Value, tuple[int, Axes, Moved]] = {}
        self.offsets = DeviceOffsets(body, shardings.axes, body.owner.location)
        self.collectives = CollectiveWriter(shardings, self.offsets, first_channel, hardware)

    def run(self) -> None:
        """Localizes the arguments and all ops. Raises a located ToolError."""
        self._block(self._body, [*self._body.operations][1:])
        dropped: set[ir.Value] = set()
        for value in reversed(self._moved):
            _drop_unused(value, dropped)
        self.offsets.finish()

    def divided(self, value: ir.Value) -> Dims:
        """How a value, local or about to be, is divided; made by ops already passed."""
        return self._divided.get(value, ((),) * rank_of(value))

    def size(self, axes: Axes) -> int:
        """Into how many parts axes divide."""
        return self._axes.size(axes)

    def whole_shape(self, value: ir.Value) -> list[int]:
        """The global shape of a value that is local already."""
        if value in self._whole:
            return self._whole[value]
        dims = self.divided(value)
        return [n * self._axes.size(axes) for n, axes in zip(shape_of(value), dims, strict=True)]

    def moved(self, value: ir.Value) -> tuple[int, Axes, Moved] | None:
        """What a local value was put together from along a dimension; None for any other."""
        return self._moved.get(value)

    def note_moved(self, value: ir.Value, dim: int, axes: Axes, moved: Moved) -> None:
        """Keeps what a value was put together from, to be dropped where nobody uses it."""
        self._moved[value] = dim, axes, moved

    def _block(self, block: ir.Block, ops: Sequence[ir.Operation | ir.OpView]) -> None:
        for argument in block.arguments:
            self._localize(argument)
        for view in ops:
            self._op(view.operation)

    def _op(self, op: ir.Operation) -> None:
        if op.name in CONSTANTS:
            constant(self, op)
        elif op.name.startswith("sdy."):
            self._sdy(op)
        else:
            for result in op.results:
                self._localize(result)
            for region in op.regions:
                for block in region.blocks:
                    if op.name in _WITH_BODIES:
                        self._block(block, list(block.operations))
                    else:
                        for inner in block.operations:
                            _forget(inner.operation)
            _forget(op)
            if op.name in REWRITERS:
                REWRITERS[op.name](self, op)

    def _localize(self, value: ir.Value) -> None:
        """Gives a value the type of one device's part."""
        dims = self.shardings.of(value)
        self._divided[value] = dims
        if any(dims):
            self._whole[value] = shape_of(value)
            value.set_type(self.part_type(value, dims))

    def part_type(self, value: ir.Value, dims: Dims) -> ir.Type:
        """The type of one device's part of a global value."""
        whole = ir.RankedTensorType(value.type)
        shape = self.shardings.local_shape(whole.shape, dims)
        return ir.RankedTensorType.get(shape, whole.element_type, loc=self._body.owner.location)

    def replace(self, op: ir.Operation, value: ir.Value) -> None:
        """Puts a local value in the place of an op's one result, whose attributes still say how it
        is divided, and erases the op."""
        old = op.results[0]
        self._divided[value] = self.shardings.of(old)
        if any(self._divided[value]):
            self._whole[value] = shape_of(old)
        old.replace_all_uses_with(value)
        self.erase(op)

    def stand_in(self, old: ir.Value, new: ir.Value) -> None:
        """Lets a value made from another one, divided alike, take its place everywhere else."""
        self.like(new, old)
        stand_in(old, new)

    def adopt(self, old: ir.Value, new: ir.Value) -> None:
        """Puts a value in the place of one that is divided alike."""
        self.like(new, old)
        old.replace_all_uses_with(new)

    def like(self, new: ir.Value, old: ir.Value) -> None:
        """Says that a value is a part of a tensor of another one's shape, divided alike."""
        self._divided[new] = self._divided[old]
        if old in self._whole:
            self._whole[new] = self._whole[old]

    def erase(self, op: ir.Operation) -> None:
        """Erases an op, and what is known of its values: others will lie where they lay, and
        values are told apart by that."""
        block_arguments = (
            a for region in op.regions for block in region.blocks for a in block.arguments
        )
        for value in (*op.results, *block_arguments):
            self._divided.pop(value, None)
            self._whole.pop(value, None)
            self._moved.pop(value, None)
        op.erase()

    def _sdy(self, op: ir.Operation) -> None:
        if op.name == "sdy.return":
            return
        if op.name == MANUAL_COMPUTATION:
            self._dissolve(op)
            return
        if op.name not in WRITTEN:
            raise ToolError(f"partition: {op.name} is not supported here", op.location)
        self.replace(op, self.collectives.write(op, self.divided(op.operands[0])))

    def _dissolve(self, op: ir.Operation) -> None:
        """A manual computation's ops, in its place."""
        block = op.regions[0].blocks[0]
        ops = [view.operation for view in block.operations]
        end = terminator(block)
        known = len(self._moved)
        self._block(block, ops)
        shardings = [self.shardings.of(result) for result in op.results]
        # Gives each result a value of its own, since each is divided in its own way outside.
        seen: set[ir.Value] = set(block.arguments)
        for number, value in enumerate(end.operands):
            if value in seen:
                build = Builder(ir.InsertionPoint(end), end.location)
                end.operands[number] = build.reshape(value, shape_of(value))
            seen.add(value)
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            argument.replace_all_uses_with(operand)
        outside = dict(zip(block.arguments, op.operands, strict=True))
        for value in list(islice(self._moved, known, None)):
            dim, axes, moved = self._moved[value]
            self._moved[value] = dim, axes, moved.renamed(outside)
        point = ir.InsertionPoint(op)
        for view in list(block.operations):
            if view.operation != end:
                point.insert(view.operation.detach_from_parent())
        for result, dims, returned in zip(op.results, shardings, list(end.operands), strict=True):
            self._divided[returned] = dims
            if any(dims):
                self._whole[returned] = shape_of(result)
            result.replace_all_uses_with(returned)
        self.erase(op)


_PURE = full_names(
    "and broadcast_in_dim collective_permute compare concatenate constant convert dynamic_slice "
    "iota pad reshape reverse select slice"
)


def _drop_unused(value: ir.Value, dropped: set[ir.Value]) -> None:
    """Takes out what makes a value, as far as nobody uses it."""
    if value in dropped or has_uses(value):
        return
    maker = producer(value)
    if maker is None or maker.name not in _PURE:
        return
    dropped.add(value)
    operands = list(dict.fromkeys(maker.operands))
    maker.erase()
    for operand in operands:
        _drop_unused(operand, dropped)


def _forget(op: ir.Operation) -> None:
    """Drops what an op says of how it is divided."""
    for name in (SHARDING, RULE):
        if name in op.attributes:
            del op.attributes[name]
