"""One op of a program as the task graph sees it, before ops are fused into kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.kernels import Matmul, Work, WorkKind


class Role(enum.Enum):
    """How an op becomes part of a kernel."""

    INPUT = "input"
    OUTPUT = "output"
    NOTHING = "nothing"  # constants and ids: neither time nor memory
    CHEAP = "cheap"  # broadcasts and iotas: made anew in each kernel that reads them
    VIEW = "view"  # its result lies where its operand does
    RESHAPE = "reshape"  # part of a kernel, or else a view
    FUSIBLE = "fusible"  # elementwise ops, and moves that a kernel may do as it reads
    REDUCTION = "reduction"  # ends a kernel, with what it reads fused into it
    UPDATE = "update"  # writes into its first operand, with what it writes fused into it
    KERNEL = "kernel"  # a kernel by itself
    COLLECTIVE = "collective"
    DONE = "done"  # of an async pair
    HOST_COPY = "host copy"  # to the host's memory or from it
    LOOP = "loop"
    DECISION = "decision"  # what the host has to know before a loop goes on


type Ref = tuple[int, int]  # a node of the block, and which of its results


@dataclass(slots=True)
class Body:
    """The nodes of a block, as often as they run one after another.

    Of a loop: `carries` are pairs of an input's node and the ref of what it becomes in the next
    iteration; `captured` are the refs, outside, that its first inputs stand for.
    """

    nodes: list[Node] = field(default_factory=list["Node"])
    carries: list[tuple[int, Ref]] = field(default_factory=list[tuple[int, Ref]])
    captured: list[Ref] = field(default_factory=list[Ref])
    notes: list[str] = field(default_factory=list[str])  # what was left out
    trips: int | None = None
    mean_runs: float | None = None  # where the count is not known


@dataclass(slots=True)
class Node:
    """An op: where its operands come from, what it computes, and the bytes of each result.

    `reads` are the bytes that it reads of each operand where that is less than all of it.
    `passes[i]` is the ref in whose storage result i lies; None where it has its own. `made_of` is
    what a kernel reads that makes a CHEAP result anew. `share` is how often it runs each time that
    it is reached, below 1 in a branch that is not always taken.
    """

    index: int
    role: Role
    name: str  # of the op, without its dialect
    sources: tuple[Ref, ...] = ()
    result_bytes: tuple[float, ...] = ()
    kind: WorkKind = WorkKind.ELEMENTWISE
    vector_flops: float = 0.0
    matmul: Matmul | None = None
    dtype: str = "f32"
    known: Work | None = None  # all that a library call does
    reads: tuple[float | None, ...] = ()
    passes: tuple[Ref | None, ...] = ()
    made_of: tuple[Ref, ...] = ()
    copied: float = 0.0  # bytes of carries that a loop may not overwrite
    location: ir.Location | None = None
    op: ir.Operation | None = None
    collective: Collective | None = None
    start: Ref | None = None  # of a DONE
    body: Body | None = None
    persistent: bool = False
    share: float = 1.0
    reordered: bool = False  # transposed in memory (`layouts`)
    moved: float = 0.0  # bytes of a HOST_COPY
