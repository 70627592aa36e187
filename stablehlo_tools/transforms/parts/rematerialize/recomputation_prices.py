"""Estimates the cost of keeping a value, and of running an op again, on one device.

The prices are coarser than kernel times, because fusions are not known before the program is
written. A fusible op is assumed to write a share of its result to memory. A collective is assumed
to be exposed for a share of its time. Plans are compared by kernel times later (`choosing`).

For a program that is not partitioned yet, the prices are those of the partitioned ops. Ops are
numbered and a copy is partitioned. An added collective counts towards the op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, classify_communication
from stablehlo_tools.analysis.loops import expected_trips
from stablehlo_tools.analysis.tasks.nodes import KernelRole
from stablehlo_tools.analysis.tasks.op_work import bytes_of, op_work, short_name, transfer_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import KernelWork, WorkKind, kernel_ns
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import COMPOSITE, WHILE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import drop_attributes, walk

_FUSED = 0.1  # share of a fused op's bytes that reach memory: most users are in the same kernel
_EXPOSED = 0.5  # share of a repeated collective's time: other work hides the rest
_FREE = (KernelRole.VIEW, KernelRole.RESHAPE, KernelRole.NOTHING, KernelRole.CHEAP)
_KERNELS = (KernelRole.KERNEL, KernelRole.REDUCTION)
_ORIGIN = "stablehlo_tools.origin"  # the number of an op, which copies of it keep


@dataclass
class RecomputationPrices:
    """Costs in ns and bytes for a module that one device runs."""

    hardware: Hardware
    facts: ModuleFacts
    classify: Callable[[ir.Operation], Collective | None]

    @classmethod
    def from_module(cls, module: ir.Module, hardware: Hardware) -> RecomputationPrices:
        """Returns the prices for a module with explicit collectives."""
        return cls(
            hardware, ModuleFacts.from_module(module), classify_communication(module.context)
        )

    def bytes(self, value: ir.Value) -> float:
        """Returns the bytes of a value; infinite if no stack can hold it."""
        return bytes_of(value) if isinstance(value.type, ir.RankedTensorType) else inf

    def traffic_ns(self, size: float) -> float:
        """Returns the ns to write `size` bytes and to read them again."""
        return 2.0 * size / self.hardware.memory_rate

    def is_fusible(self, op: ir.Operation) -> bool:
        """Returns True if compilers fuse an op into the kernels that read it."""
        if len(op.regions) or self.classify(op) is not None:
            return False
        return op_work(op, short_name(op)).role not in _KERNELS

    def ns(self, op: ir.Operation) -> float:
        """Returns the ns of an op; infinite if they cannot be estimated."""
        try:
            return self._ns(op)
        except ToolError:
            return inf

    def _ns(self, op: ir.Operation) -> float:
        collective = self.classify(op)
        if collective is not None:
            groups = self.facts.groups(collective) or ()
            clock = Clock(self.hardware, self.facts.grid.size)
            return _EXPOSED * clock.collective(transfer_of(collective, groups), ()).ns
        name = short_name(op)
        if op.name == WHILE:
            return expected_trips(op, 1) * self._inside(op.regions[1])
        if op.name == COMPOSITE or op.name in ("stablehlo.case", "stablehlo.if"):
            return max((self._inside(region) for region in op.regions), default=inf)
        work = op_work(op, name)
        if work.role in _FREE:
            return 0.0
        if work.known is not None:
            return kernel_ns(work.known, self.hardware)
        read = sum(
            bytes_of(value) if limit is None else limit
            for value, limit in zip_longest(op.operands, work.reads)
        )
        written = sum(bytes_of(result) for result in op.results)
        if work.role not in _KERNELS:
            return _FUSED * written / self.hardware.memory_rate
        if work.kind is WorkKind.REDUCTION:
            read *= _FUSED
        products = (work.matmul,) if work.matmul is not None else ()
        kernel = KernelWork(work.kind, read + written, work.vector_flops, products, work.dtype)
        return kernel_ns(kernel, self.hardware)

    def _inside(self, region: ir.Region) -> float:
        return sum(self.ns(view.operation) for view in region.blocks[0].operations)


@dataclass
class PartitionedPrices(RecomputationPrices):
    """Prices of a module that is yet to be partitioned, from its partitioned ops."""

    op_ns: dict[int, float] = field(default_factory=dict[int, float])
    sizes: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def bytes(self, value: ir.Value) -> float:
        """Returns the bytes of a value on a device.

        For an argument, the bytes of the smallest reader's result of the same type.
        """
        maker = producer(value)
        if maker is not None:
            sizes = self.sizes.get(op_number(maker), [])
            number = ir.OpResult(value).result_number
            return sizes[number] if number < len(sizes) else super().bytes(value)
        readers = (use.owner.operation for use in value.uses)
        alike = [r.results[0] for r in readers if r.results and r.results[0].type == value.type]
        whole = super().bytes(value)
        return min([whole, *(self.bytes(result) for result in alike)])

    def ns(self, op: ir.Operation) -> float:
        """Returns the ns of the partitioned form of an op."""
        return self.op_ns.get(op_number(op), 0.0)


def number_ops(module: ir.Module) -> None:
    """Numbers all ops with results, to find them again in copies."""
    type_ = ir.IntegerType.get_signless(64, module.context)
    count = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal count
        if len(op.results):
            op.attributes[_ORIGIN] = ir.IntegerAttr.get(type_, count)
            count += 1
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def partitioned_prices(local: ir.Module, hardware: Hardware) -> PartitionedPrices:
    """Returns the prices of a module with numbered ops from `local`, its partitioned copy."""
    plain = RecomputationPrices.from_module(local, hardware)
    prices = PartitionedPrices(hardware, plain.facts, plain.classify)
    waiting: dict[ir.Value, float] = {}  # ns of ops without a number, by first result

    def visit(op: ir.Operation) -> ir.WalkResult:
        if not len(op.results):
            return ir.WalkResult.ADVANCE
        ns = plain.ns(op) + sum(waiting.pop(value, 0.0) for value in op.operands)
        number = op_number(op)
        if number < 0:
            waiting[op.results[0]] = ns
        else:
            prices.op_ns[number] = prices.op_ns.get(number, 0.0) + ns
            prices.sizes[number] = [plain.bytes(result) for result in op.results]
        return ir.WalkResult.ADVANCE

    walk(local.operation, visit)
    return prices


def forget_numbers(module: ir.Module) -> None:
    """Removes the attributes of `number_ops`."""
    drop_attributes(module.operation, (_ORIGIN,))


def op_number(op: ir.Operation) -> int:
    """Returns the number of an op; -1 if it has none."""
    return ir.IntegerAttr(op.attributes[_ORIGIN]).value if _ORIGIN in op.attributes else -1
