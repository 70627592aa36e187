"""Defines the ops of a program as the task graph sees them, before fusion into kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind


class KernelRole(enum.Enum):
    """The way in which an op becomes part of a kernel."""

    INPUT = "input"
    OUTPUT = "output"
    NOTHING = "nothing"  # constants and ids: they need neither time nor memory
    CHEAP = "cheap"  # broadcasts and iotas: recomputed in each kernel that reads them
    VIEW = "view"  # its result shares the operand's memory
    RESHAPE = "reshape"  # part of a kernel, otherwise a view
    FUSIBLE = "fusible"  # elementwise ops, and moves that a kernel can do while it reads
    REDUCTION = "reduction"  # ends a kernel; its operands are fused into it
    UPDATE = "update"  # writes into its first operand; the written value is fused into it
    KERNEL = "kernel"  # a separate kernel
    COLLECTIVE = "collective"
    DONE = "done"  # of an async pair
    HOST_COPY = "host copy"  # to or from the host's memory
    LOOP = "loop"
    DECISION = "decision"  # a value that the host must know before a loop continues


type Ref = tuple[int, int]  # a node of the block, and the number of its result


@dataclass(slots=True)
class NodeBody:
    """The nodes of a block that runs once or, in a loop, several times.

    For a loop, `carries` are pairs of an input's node and the ref of its value in the next
    iteration. `captured` are the refs outside of the loop of its first inputs.
    """

    nodes: list[TaskNode] = field(default_factory=list["TaskNode"])
    carries: list[tuple[int, Ref]] = field(default_factory=list[tuple[int, Ref]])
    captured: list[Ref] = field(default_factory=list[Ref])
    notes: list[str] = field(default_factory=list[str])  # about what was left out
    trips: int | None = None
    mean_runs: float | None = None  # if the count is not known


@dataclass(slots=True)
class TaskNode:
    """An op: the sources of its operands, its work, and the bytes of each result.

    `reads` are the bytes that it reads of each operand, None for all of it. `passes[i]` is the ref
    whose storage result i shares; None if it has its own. `made_of` are the refs that a kernel
    reads to recompute a CHEAP result. `share` is the mean number of runs each time that the op is
    reached: below 1 in a branch that is not always taken.
    """

    index: int
    role: KernelRole
    name: str  # of the op, without its dialect
    sources: tuple[Ref, ...] = ()
    result_bytes: tuple[float, ...] = ()
    kind: WorkKind = WorkKind.ELEMENTWISE
    vector_flops: float = 0.0
    matmul: Matmul | None = None
    dtype: str = "f32"
    known: KernelWork | None = None  # all work of a library call
    reads: tuple[float | None, ...] = ()
    passes: tuple[Ref | None, ...] = ()
    made_of: tuple[Ref, ...] = ()
    copied: float = 0.0  # bytes of carries that a loop may not overwrite
    location: ir.Location | None = None
    op: ir.Operation | None = None
    collective: Collective | None = None
    start: Ref | None = None  # of a DONE
    body: NodeBody | None = None
    persistent: bool = False
    share: float = 1.0
    reordered: bool = False  # transposed in memory (`layouts`)
    moved: float = 0.0  # bytes of a HOST_COPY
