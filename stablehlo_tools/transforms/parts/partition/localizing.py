"""Converts a body on global tensors to the body that one device runs on its parts.

    %0 = stablehlo.slice %x [0:64, 2:4] : (tensor<64x8xf32>) -> tensor<64x2xf32>   // dim 0 over "x"
    ==>
    %0 = stablehlo.slice %x [0:16, 2:4] : (tensor<16x8xf32>) -> tensor<16x2xf32>   // of 4 devices

Every op fits its sharding rule by now, so most ops only change their types. Ops whose attributes
have sizes or indices are rewritten. Shardy's collectives become StableHLO's. Manual computations
are inlined, because the whole body is manual now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from stablehlo_tools.analysis.shardings import RULE, SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.dimensions import static_shapes
from stablehlo_tools.dialect.kernels.table import resize_kernel
from stablehlo_tools.dialect.names import CUSTOM_CALL, MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with_any
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.rewriter import inline_block
from stablehlo_tools.ir.values import CONSTANTS, has_uses, producer
from stablehlo_tools.ir.views import ManualComputation
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.partition.local_body import WRITTEN, LocalBody
from stablehlo_tools.transforms.parts.partition.local_ops import REWRITERS, constant

_WITH_BODIES = ops_with_any(Trait.BRANCH | Trait.LOOP)


class Localizer(LocalBody):
    """Localizes the body of one function."""

    def run(self) -> None:
        """Localizes the arguments and all ops. Raises a located ToolError for an unsupported Shardy
        op."""
        # The first op is the partition_id that `DeviceGroup` wrote.
        self._block(self._body, [*self._body.operations][1:])
        dropped: set[ir.Value] = set()
        # Later values may have been made of earlier ones.
        for value in reversed(self._moved):
            _drop_unused(value, dropped)
        self.devices.finish()

    def _block(self, block: ir.Block, ops: Sequence[ir.Operation | ir.OpView]) -> None:
        for argument in block.arguments:
            self.localize(argument)
        for view in ops:
            self._op(view.operation)

    def _op(self, op: ir.Operation) -> None:
        if op.name in CONSTANTS:
            constant(self, op)
        elif op.name == MANUAL_COMPUTATION:
            self._dissolve(op)
        elif op.name in WRITTEN:
            self.replace(op, self.collectives.write(op, self.sharding_of(op.operands[0])))
        elif op.name.startswith("sdy."):
            if op.name != "sdy.return":
                raise ToolError(f"partition: {op.name} is not supported here", op.location)
        else:
            before = static_shapes(op.results)
            for result in op.results:
                self.localize(result)
            if op.name == CUSTOM_CALL and before is not None:
                operands = [tuple(self.whole_shape(value)) for value in op.operands]
                resize_kernel(op, tuple(operands), before)
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

    def _dissolve(self, op: ir.Operation) -> None:
        """Localizes the ops of a manual computation, and inlines them."""
        block = ManualComputation(op).body
        end, known = terminator(block), len(self._moved)
        self._block(block, list(block.operations))
        shardings = [self.shardings.axes_by_dim(result) for result in op.results]
        # Each result needs a value of its own, because outside each has its own sharding.
        seen: set[ir.Value] = set(block.arguments)
        for number, value in enumerate(end.operands):
            if value in seen:
                build = Builder(ir.InsertionPoint(end), end.location)
                end.operands[number] = build.reshape(value, shape_of(value))
            seen.add(value)
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            argument.replace_all_uses_with(operand)
        outside: dict[ir.Value, ir.Value] = dict(zip(block.arguments, op.operands, strict=True))
        for value in list(islice(self._moved, known, None)):
            dim, axes, moved = self._moved[value]
            self._moved[value] = dim, axes, moved.replace_values(outside)
        for result, dims, returned in zip(op.results, shardings, list(end.operands), strict=True):
            self._divided[returned] = dims
            if any(dims):
                self._whole[returned] = shape_of(result)
        self.forget(op)
        inline_block(block, op)


_PURE = full_names(
    "and broadcast_in_dim collective_permute compare concatenate constant convert dynamic_slice "
    "iota pad reshape reverse select slice"
)


def _drop_unused(value: ir.Value, dropped: set[ir.Value]) -> None:
    """Erases the op that makes a value if it is pure and unused, then does the same for its
    operands."""
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
    """Removes an op's sharding and sharding rule."""
    for name in (SHARDING, RULE):
        if name in op.attributes:
            del op.attributes[name]
