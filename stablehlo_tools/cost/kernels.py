"""What a kernel has to do, and for how long: a roofline whose matrix peak depends on the shape.

The readers of StableHLO and of HLO text state the work, for any device; `kernel_ns` times it:

    time   = max(memory, matrix products, vector operations, launch)
    memory = bytes / (bandwidth · memory_efficiency · share of the kind)
    matrix = flops / (peak · efficiency · depth · utilisation), each product after the other
        depth       = k / (k + half_depth / (1 + (waves - 1) / 25)): waves hide each other's ends
        utilisation = m n batch / (waves · units · tile_m · tile_n)
        waves       = tiles / units, rounded up;  tiles = batch · ⌈m / tile_m⌉ · ⌈n / tile_n⌉
    vector = vector_flops / vector peak

Where there are fewer tiles than units, k is split among them ("split-k"), down to six times
half_depth; a product is then tiles · splits tiles of k / splits.

A product that fills so little of the matrix units that the vector units would be quicker takes the
latter's time, as compilers choose (a depthwise convolution, a matrix by a vector).

Sources: Williams, Waterman and Patterson, "Roofline", 2009; NVIDIA, "Matrix Multiplication
Background User's Guide" (tile and wave quantisation, and how the share of the peak grows with k);
NVIDIA, "Efficient GEMM in CUDA", CUTLASS documentation (parallelised reductions: split-k).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Hardware

# Operations an element of a reduction in XLA:TPU's tiled arrays, which goes across the rows and
# lanes of registers; fitted to libtpu 0.0.51's estimated_cycles (benchmarks/tpu_validity.py).
TILED_REDUCTION = 36


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
    LIBRARY = "library"  # a call whose operations are known
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
    matrix unit, `matmuls` those in it (a fusion may hold several), `matrix_flops` those in it whose
    shape nobody knows: they reach the share of the peak that huge products do. `dtype` is the
    element type of the matrix operands in StableHLO's spelling (`bf16`, `f32`, `f8E4M3FN`, `i8`),
    else of the result.
    """

    kind: WorkKind
    bytes: float = 0.0
    vector_flops: float = 0.0
    matmuls: tuple[Matmul, ...] = ()
    dtype: str = "f32"
    matrix_flops: float = 0.0

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.vector_flops + self.matrix_flops + sum(m.flops for m in self.matmuls)


# Of the bandwidth that a copy reaches: rows here and there are read in whole sectors, of which a
# gather uses about a half (NVIDIA, "CUDA C++ Best Practices Guide", scattered accesses).
# A sort reads and writes its keys several times: 29.4 G keys of 32 bits a second on an A100
# (Adinets and Merrill, "Onesweep", arXiv 2206.01784).
_SHARE = {WorkKind.GATHER: 0.5, WorkKind.SORT: 0.14}

_HIDING_WAVES = 25.0  # after so many more, half of what a tile's ends cost is hidden: fits cuBLAS
_LEAST_DEPTH = 6  # half depths: what fits cuBLAS, whose shortest parts reach six sevenths


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Nanoseconds of a kernel, and what its operations and its memory would take alone."""

    ns: float
    operations_ns: float
    memory_ns: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of the time: what the operations take, and the memory."""
        return (self.operations_ns / self.ns, self.memory_ns / self.ns) if self.ns else (0.0, 0.0)


def kernel_ns(work: Work, hardware: Hardware) -> float:
    """Nanoseconds of one kernel on one device; none for a view."""
    return kernel_time(work, hardware).ns


def kernel_time(work: Work, hardware: Hardware) -> KernelTime:
    """The time of one kernel on one device; none for a view."""
    if work.kind is WorkKind.FREE:
        return KernelTime(0.0, 0.0, 0.0)
    memory = work.bytes / (hardware.memory_rate * _SHARE.get(work.kind, 1.0))
    vector = work.vector_flops / hardware.vector_flops
    matrix = 0.0
    if work.matmuls or work.matrix_flops:
        peak = hardware.peak(work.dtype)
        matrix = work.matrix_flops / (peak * hardware.matmul_model.efficiency)
        for product in work.matmuls:
            matrix += min(
                _matmul_ns(product, hardware, peak), product.flops / hardware.vector_flops
            )
    operations = max(matrix, vector)
    return KernelTime(max(memory, operations, hardware.launch_ns), operations, memory)


def _matmul_ns(product: Matmul, hardware: Hardware, peak: float) -> float:
    if not product.flops:
        return 0.0
    model = hardware.matmul_model
    rows, columns = -(-product.m // model.tile_m), -(-product.n // model.tile_n)
    tiles = product.batch * rows * columns
    splits = 1.0
    if tiles < model.units:
        deepest = product.k / (_LEAST_DEPTH * model.half_depth) if model.half_depth else product.k
        splits = max(1.0, min(model.units // tiles, deepest))
    depth = product.k / splits
    waves = 1 if splits > 1 else -(-tiles // model.units)
    flops = 2.0 * waves * model.units * model.tile_m * model.tile_n * depth
    half = model.half_depth / (1 + (waves - 1) / _HIDING_WAVES)
    share = depth / (depth + half)
    return flops / (peak * model.efficiency * share)
