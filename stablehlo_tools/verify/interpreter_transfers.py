"""Makes sends and recvs of one program for all devices right in the StableHLO interpreter.

The interpreter knows a transfer by its channel alone: it does not read which devices meet, and a
device that executes a recv waits for a sender though no pair names it. So each pair gets a channel
of its own, and only its two devices use that; a device that receives from nobody has zeros, as on
XLA:GPU, whose runtime clears the buffer.

    %y, %u = "stablehlo.recv"(%t) {pairs = [[0, 1]]}
      ==>
    %y, %u = "stablehlo.if"(%id == 1) ({ "stablehlo.recv"(%t) }, { 0.0, %t })
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.rendezvous import is_host_transfer
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.verify.element_types import Kind, element_type

_DEVICE_TO_DEVICE = 1
_ENDS = ("send", "recv")  # in the order of a pair's ids


def separate_transfers(collectives: Sequence[Collective], facts: ModuleFacts, free: int) -> int:
    """Rewrites in place those of the collectives that are sends or recvs with pairs of devices.

    partition_id has to give flattened ids. Channels from `free` on are taken; returns the first
    that is left. Raises a located ToolError for elements that have no zeros.
    """
    channels: dict[tuple[int, tuple[int, ...]], int] = {}
    for transfer in collectives:
        if transfer.kind not in _ENDS or is_host_transfer(transfer):
            continue
        pairs = facts.groups(transfer) or ()
        for pair in pairs:
            channels.setdefault((transfer.channel_id, pair), free + len(channels))
        if pairs:
            end = _ENDS.index(transfer.kind)
            _for_each(transfer.op, [(p[end], channels[transfer.channel_id, p]) for p in pairs])
    return free + len(channels)


def _for_each(op: ir.Operation, taking: Sequence[tuple[int, int]]) -> None:
    """Replaces a send or recv by one for each of the devices that take part, on its channel."""
    build = Builder(ir.InsertionPoint(op), op.location)
    unsigned = ir.IntegerType.get_unsigned(32, op.context)
    own = build.op("partition_id", [], build.tensor([], unsigned))
    received = [result.type for result in op.results][:-1]
    values = [*(_zeros(build, kind) for kind in received), op.operands[-1]]
    for device, channel in taking:
        is_own = build.compare("EQ", own, build.splat(device, [], unsigned))
        values = _if_own(op, is_own, channel, values)
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _if_own(
    op: ir.Operation, is_own: ir.Value, channel: int, otherwise: Sequence[ir.Value]
) -> list[ir.Value]:
    """What a copy of the op gives where the predicate holds, elsewhere the given values."""
    choice = ir.Operation.create(
        "stablehlo.if",
        results=[value.type for value in otherwise],
        operands=[is_own],
        regions=2,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    taking, other = (region.blocks.append() for region in choice.regions)
    copy = op.clone(ip=ir.InsertionPoint(taking))
    copy.attributes["channel_handle"] = bindings.ChannelHandle.get(
        channel, _DEVICE_TO_DEVICE, op.context
    )
    for block, values in ((taking, copy.results), (other, otherwise)):
        ir.Operation.create(
            "stablehlo.return", operands=list(values), loc=op.location, ip=ir.InsertionPoint(block)
        )
    return list(choice.results)


def _zeros(build: Builder, kind: ir.Type) -> ir.Value:
    """A tensor whose bits are all zero, of whatever elements."""
    tensor = ir.RankedTensorType(kind)
    element = element_type(str(tensor.element_type))
    if element is None:
        raise ToolError(f"what a device receives from nobody is no {kind}", build.location)
    if element.kind is Kind.COMPLEX:
        part = build.tensor(tensor.shape, ir.ComplexType(tensor.element_type).element_type)
        return build.op("complex", [_zeros(build, part)] * 2, kind)
    zero = "00" * element.dtype.itemsize
    return build.op("constant", [], kind, value=ir.Attribute.parse(f'dense<"0x{zero}"> : {kind}'))
