"""How long ops take, roughly: what stages are balanced by.

Matrix products by the roofline of `cost/kernels.py`; of all else the bytes that it writes, since
compilers fuse it with what it reads. What is launched and what is hidden plays no part.
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.tasks.op_work import bytes_of, op_work, short_name
from stablehlo_tools.analysis.trip_counts import constant_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import kernel_ns
from stablehlo_tools.cost.work import Work, WorkKind

_ENTERED = frozenset({"stablehlo.while", "stablehlo.if", "stablehlo.case"})
_PRODUCTS = frozenset({WorkKind.MATMUL, WorkKind.CONVOLUTION})


class Weigher:
    """Weighs ops on one device of a kind."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._classify: Callable[[ir.Operation], Collective | None] | None = None

    def ns(self, op: ir.Operation) -> float:
        """Nanoseconds of an op; of a loop, of all its iterations; of branches, of the longest."""
        if op.name in _ENTERED:
            inside = [self._block(region.blocks[0]) for region in op.regions]
            return max(inside) * _times(op)
        written = sum(bytes_of(result) for result in op.results)
        if self._is_collective(op):  # its region says how two numbers are put together
            return written / self.hardware.memory_rate
        work = op_work(op, short_name(op))
        if work.kind in _PRODUCTS and work.matmul is not None:
            return kernel_ns(
                Work(work.kind, written, work.vector_flops, (work.matmul,), work.dtype),
                self.hardware,
            )
        return max(
            written / self.hardware.memory_rate, work.vector_flops / self.hardware.vector_flops
        )

    def _is_collective(self, op: ir.Operation) -> bool:
        if self._classify is None:
            self._classify = classify_communication(op.context)
        return self._classify(op) is not None

    def _block(self, block: ir.Block) -> float:
        return sum(self.ns(view.operation) for view in list(block.operations)[:-1])


def _times(op: ir.Operation) -> int:
    """How often the regions of an op run; of a loop of which that is not known, once."""
    trips = constant_trips(op) if op.name == "stablehlo.while" else None
    return 1 if trips is None else trips
