"""What one kernel or one collective has to do on one device, whatever the device.

The readers of StableHLO and of HLO text make these; `kernels` and `collectives` time them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WorkKind(enum.Enum):
    """What bounds a kernel, and which figures of a device apply to it."""

    FREE = "free"  # a view: no kernel at all
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    GATHER = "gather"  # gathers and scatters: reads or writes of rows here and there
    COPY = "copy"  # transposes, slices, concatenations, copies
    SORT = "sort"
    OTHER = "other"  # a custom call and whatever else is timed by its bytes alone


@dataclass(frozen=True, slots=True)
class Matmul:
    """Batched `[m, k] x [k, n]`; a convolution as the matrix product that it is lowered to."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions, two for each multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel on one device.

    `bytes` are read from and written to device memory, `vector_flops` are operations outside of the
    matrix unit, `matmuls` those in it (a fusion may hold several). `dtype` is the element type of
    the matrix operands in StableHLO's spelling (`bf16`, `f32`, `f8E4M3FN`, `i8`), else of the
    result.
    """

    kind: WorkKind
    bytes: float = 0.0
    vector_flops: float = 0.0
    matmuls: tuple[Matmul, ...] = ()
    dtype: str = "f32"

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.vector_flops + sum(m.flops for m in self.matmuls)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one device sees it.

    `bytes` is NCCL's size: of the gathered result of an all_gather, of the operand of a
    reduce_scatter, of the operand of any other kind. `groups` are the participants' device numbers;
    of a collective_permute, the (source, target) pairs.
    """

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, …
    bytes: float
    groups: tuple[tuple[int, ...], ...]
