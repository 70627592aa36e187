"""What HLO's asynchronous instructions put on a stream: collectives, copies, kernels."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.collectives import TransferTime
from stablehlo_tools.cost.work import Work, WorkKind
from stablehlo_tools.overlap.task_graph import Communication
from stablehlo_tools.targets.hlo.collectives import Issued, result_shape
from stablehlo_tools.targets.hlo.module import Computation, HloInstruction, HloModule
from stablehlo_tools.targets.hlo.shapes import DEVICE_MEMORY, HOST_MEMORY, arrays
from stablehlo_tools.targets.hlo.work import work

ASYNC_COPIES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})
ASYNC_KERNELS = frozenset({"async", "fusion", "call", "custom-call"})
HOST = frozenset({"infeed", "outfeed"})

_COPY_STREAM = "dma"
_KERNEL_STREAM = "async"
_HOST_STREAM = "host"
_RECEIVING = "recv"


def communication(sent: Issued, time: TransferTime) -> Communication:
    """A collective on the stream of its links.

    A recv is the other side of a send: it takes as long, on a stream of its own and no link, for a
    link carries both directions.
    """
    receives = sent.instruction.opcode == _RECEIVING
    links = () if receives else time.links
    return Communication(
        kind=sent.transfer.kind,
        stream="+".join(links) or (_RECEIVING if receives else sent.transfer.kind),
        bytes=sent.transfer.bytes,
        latency_ns=time.latency_ns,
        links=links,
        groups=sent.transfer.groups,
        axes=sent.axes,
        dtype=sent.dtype,
        reduction=sent.reduction,
        algorithm=time.algorithm,
    )


def copied(
    start: HloInstruction, computation: Computation, clock: Clock, names: Sequence[str]
) -> tuple[Communication, float]:
    """A copy by the copy engines: bytes over the memory's bandwidth, those on the chip for free.

    Raises ToolError for a copy to or from the host's memory that was not measured.
    """
    results = arrays(result_shape(start))
    operand = computation.by_name[start.operands[0]].results
    size = sum(array.padded_bytes for array in results)
    spaces = {array.space for array in (*results, *operand)}
    known = clock.measured.ns(names) if clock.measured is not None else None
    if known is None and HOST_MEMORY in spaces:
        raise start.error("the time of a copy to or from the host is not known")
    moved = size * sum(
        any(array.space == DEVICE_MEMORY for array in side) for side in (results, operand)
    )
    hardware = clock.hardware
    modelled = moved / hardware.memory_rate
    sent = Communication(kind="copy", stream=_COPY_STREAM, bytes=float(size))
    return sent, modelled if known is None else known


def hosted(
    instruction: HloInstruction, clock: Clock, names: Sequence[str]
) -> tuple[Communication, float]:
    """A send to the host or a recv from it. Raises ToolError where it was not measured."""
    known = clock.measured.ns(names) if clock.measured is not None else None
    if known is None:
        raise instruction.error("the time of a transfer to or from the host is not known")
    size = sum(array.bytes for array in arrays(result_shape(instruction)))
    sent = Communication(kind=instruction.opcode, stream=_HOST_STREAM, bytes=float(size))
    return sent, known


def is_hosted(instruction: HloInstruction) -> bool:
    """Whether the other side of a send or recv is the host."""
    return "is_host_transfer=true" in instruction.line


def asynchronous(
    start: HloInstruction,
    computation: Computation,
    module: HloModule,
    clock: Clock,
    names: Sequence[str],
) -> tuple[Communication, float]:
    """A kernel beside the compute stream, of whatever it wraps."""
    if start.opcode == "fusion-start":
        parts = [work(start, computation, module)]
    else:
        parts = [
            work(inner, called, module)
            for name in start.calls
            for called in [module.computation(name, start)]
            for inner in called.instructions
        ]
    moved = sum(part.bytes for part in parts)
    known = clock.measured.ns(names) if clock.measured is not None else None
    ns = sum(clock.kernel(part, ()) for part in parts) if known is None else known
    only_copies = all(part.kind in (WorkKind.COPY, WorkKind.FREE) for part in parts)
    stream = _COPY_STREAM if only_copies else _KERNEL_STREAM
    return Communication(kind=_kind(parts), stream=stream, bytes=moved), ns


def _kind(parts: Sequence[Work]) -> str:
    dearest = max(parts, key=lambda part: (part.flops, part.bytes), default=None)
    return dearest.kind.value if dearest is not None else WorkKind.OTHER.value
