"""What it takes to keep a value, and to run an op again, on one device.

Coarser than the times of kernels: what becomes one kernel is not known before it is written. Of an
op that compilers fuse, a part of what it writes is taken to go to memory; of a collective, a part
of its time to be exposed. The plans that come of it are compared by the times of kernels
(`choosing`).

Of a program that a partitioner has yet to divide, the prices are those of what it makes of each op:
ops are numbered, a copy is partitioned, and a collective that is added counts with the op that
reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    classify_communication,
)
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.tasks.nodes import Role
from stablehlo_tools.analysis.tasks.op_work import (
    bytes_of,
    op_work,
    short_name,
    transfer_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import Work, WorkKind, kernel_ns
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import COMPOSITE, WHILE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import drop_attributes, walk

_FUSED = 0.1  # of the bytes that a fused op writes: mostly its users are in the same kernel
_EXPOSED = 0.5  # of a collective that is repeated: other work hides the rest
_FREE = (Role.VIEW, Role.RESHAPE, Role.NOTHING, Role.CHEAP)
_KERNELS = (Role.KERNEL, Role.REDUCTION)
_ORIGIN = "stablehlo_tools.origin"  # the number of an op, which copies of it keep


@dataclass
class Prices:
    """Nanoseconds and bytes of a module that one device runs."""

    hardware: Hardware
    facts: ModuleFacts
    classify: Callable[[ir.Operation], Collective | None]

    @classmethod
    def of(cls, module: ir.Module, hardware: Hardware) -> Prices:
        """The prices of a module whose collectives are explicit."""
        return cls(hardware, ModuleFacts.of(module), classify_communication(module.context))

    def bytes(self, value: ir.Value) -> float:
        """What a value takes; endless of one that no stack can hold."""
        return bytes_of(value) if isinstance(value.type, ir.RankedTensorType) else inf

    def traffic_ns(self, size: float) -> float:
        """To write so many bytes and to read them."""
        return 2.0 * size / self.hardware.memory_rate

    def is_fusible(self, op: ir.Operation) -> bool:
        """Whether compilers make an op part of the kernels that read it."""
        if len(op.regions) or self.classify(op) is not None:
            return False
        return op_work(op, short_name(op)).role not in _KERNELS

    def ns(self, op: ir.Operation) -> float:
        """How long an op takes; endless where nobody can tell."""
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
            return (constant_trips(op) or 1) * self._inside(op.regions[1])
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
        kernel = Work(work.kind, read + written, work.vector_flops, products, work.dtype)
        return kernel_ns(kernel, self.hardware)

    def _inside(self, region: ir.Region) -> float:
        return sum(self.ns(view.operation) for view in region.blocks[0].operations)


@dataclass
class PartitionedPrices(Prices):
    """Prices of a module that is yet to be partitioned: those of what became of each op."""

    op_ns: dict[int, float] = field(default_factory=dict[int, float])
    sizes: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def bytes(self, value: ir.Value) -> float:
        """What a device holds of a value; of one that is an argument, as much as of what reads it
        at the same type."""
        maker = producer(value)
        if maker is not None:
            sizes = self.sizes.get(origin_of(maker), [])
            number = ir.OpResult(value).result_number
            return sizes[number] if number < len(sizes) else super().bytes(value)
        readers = (use.owner.operation for use in value.uses)
        alike = [r.results[0] for r in readers if r.results and r.results[0].type == value.type]
        whole = super().bytes(value)
        return min([whole, *(self.bytes(result) for result in alike)])

    def ns(self, op: ir.Operation) -> float:
        """How long what became of an op takes."""
        return self.op_ns.get(origin_of(op), 0.0)


def number_ops(module: ir.Module) -> None:
    """Numbers all ops, so that they are known in copies."""
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
    """The prices of a module by what its partitioned copy has become, whose ops have numbers."""
    plain = Prices.of(local, hardware)
    prices = PartitionedPrices(hardware, plain.facts, plain.classify)
    waiting: dict[ir.Value, float] = {}  # ns of ops without a number, by what they make

    def visit(op: ir.Operation) -> ir.WalkResult:
        if not len(op.results):
            return ir.WalkResult.ADVANCE
        ns = plain.ns(op) + sum(waiting.pop(value, 0.0) for value in op.operands)
        number = origin_of(op)
        if number < 0:
            waiting[op.results[0]] = ns
        else:
            prices.op_ns[number] = prices.op_ns.get(number, 0.0) + ns
            prices.sizes[number] = [plain.bytes(result) for result in op.results]
        return ir.WalkResult.ADVANCE

    walk(local.operation, visit)
    return prices


def forget_numbers(module: ir.Module) -> None:
    """Removes what `number_ops` has left."""
    drop_attributes(module.operation, (_ORIGIN,))


def origin_of(op: ir.Operation) -> int:
    """The number of an op; -1 of one that has none."""
    return ir.IntegerAttr(op.attributes[_ORIGIN]).value if _ORIGIN in op.attributes else -1
