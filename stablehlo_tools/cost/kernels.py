"""The work of a kernel and its time: a roofline whose matrix peak depends on the shape.

The readers of StableHLO and of HLO text build a `KernelWork`, for any device; `kernel_ns` times it:

    time   = max(memory, steps + max(matrix products, vector operations), launch)
    memory = bytes / (bandwidth · memory_efficiency · share of the kind)
    matrix = max(flops / (peak · efficiency · depth · utilisation), flops / (peak · sustained))
        depth       = k / (k + half_depth / (1 + (waves - 1) / 25)): waves hide each other's ends
        utilisation = m n batch / (waves · units · tile_m · tile_n)
        waves       = tiles / units, rounded up;  tiles = batch · ⌈m / tile_m⌉ · ⌈n / tile_n⌉
    vector = vector_flops / vector peak
    steps  = the ns of steps that depend on each other, such as the columns of a factorisation

If there are fewer tiles than units, k is split among the units ("split-k"), down to six times
half_depth. A product is then tiles · splits tiles of depth k / splits.

A product that fills little of the matrix units (a depthwise convolution, a matrix by a vector) has
the time of the vector units if that is shorter, because compilers then choose those.

Sources: Williams, Waterman and Patterson, "Roofline", 2009; NVIDIA, "Matrix Multiplication
Background User's Guide" (tile and wave quantisation, and how the share of the peak grows with k);
NVIDIA, "Efficient GEMM in CUDA", CUTLASS documentation (parallelised reductions: split-k).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Hardware

# Operations per element of a reduction in XLA:TPU's tiled arrays, which crosses the rows and lanes
# of registers; fitted to libtpu 0.0.51's estimated_cycles (benchmarks/tpu_validity.py).
TILED_REDUCTION = 36


class WorkKind(enum.Enum):
    """The kind of a kernel, which decides the figures of a device that apply to it."""

    FREE = "free"  # a view: no kernel at all
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    GATHER = "gather"  # gathers and scatters: reads or writes of rows here and there
    COPY = "copy"  # transposes, slices, concatenations, copies
    SORT = "sort"
    LIBRARY = "library"  # a call whose operations are known
    OTHER = "other"  # custom calls and other kernels that are timed only by their bytes


@dataclass(frozen=True, slots=True)
class Matmul:
    """A batched `[m, k] x [k, n]`; also a convolution, as the matrix product it is lowered to."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """The floating-point operations: two for each multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class KernelWork:
    """One kernel on one device.

    `bytes` counts reads from and writes to device memory. `vector_flops` run outside the matrix
    unit, `matmuls` in it (a fusion may hold several). `matrix_flops` also run in it, but their
    shapes are unknown: they reach the share of the peak that huge products reach. `dtype` is the
    element type of the matrix operands in StableHLO's spelling (`bf16`, `f32`, `f8E4M3FN`, `i8`),
    else of the result. `steps_ns` is the time of steps that wait for each other.
    """

    kind: WorkKind
    bytes: float = 0.0
    vector_flops: float = 0.0
    matmuls: tuple[Matmul, ...] = ()
    dtype: str = "f32"
    matrix_flops: float = 0.0
    steps_ns: float = 0.0

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.vector_flops + self.matrix_flops + sum(m.flops for m in self.matmuls)


# Shares of the bandwidth that a copy reaches. Scattered rows are read in whole sectors; a gather
# uses about half of each (NVIDIA, "CUDA C++ Best Practices Guide", scattered accesses).
# A sort reads and writes its keys several times: 29.4 G keys of 32 bits a second on an A100
# (Adinets and Merrill, "Onesweep", arXiv 2206.01784).
_SHARE = {WorkKind.GATHER: 0.5, WorkKind.SORT: 0.14}

# Fitted to cuBLAS: after so many more waves, half the cost of a tile's start and end is hidden.
_HIDING_WAVES = 25.0
_LEAST_DEPTH = 6  # in half depths; fitted to cuBLAS, whose shortest parts reach 6/7 of the peak


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of a kernel in ns, and the times of its operations and its memory accesses alone."""

    ns: float
    operations_ns: float
    memory_ns: float

    @property
    def shares(self) -> tuple[float, float]:
        """The times of the operations and of the memory accesses, as shares of `ns`."""
        return (self.operations_ns / self.ns, self.memory_ns / self.ns) if self.ns else (0.0, 0.0)


def kernel_ns(work: KernelWork, hardware: Hardware) -> float:
    """Returns the ns of one kernel on one device; 0 for a view."""
    return kernel_time(work, hardware).ns


def kernel_time(work: KernelWork, hardware: Hardware) -> KernelTime:
    """Returns the time of one kernel on one device; 0 for a view."""
    if work.kind is WorkKind.FREE:
        return KernelTime(0.0, 0.0, 0.0)
    memory = work.bytes / (hardware.memory_rate * _SHARE.get(work.kind, 1.0))
    vector = work.vector_flops / hardware.vector_flops
    matrix = 0.0
    if work.matmuls or work.matrix_flops:
        peak = hardware.peak(work.dtype)
        model = hardware.matmul_model
        # A program multiplies matrices for so long that the power limit lowers the clock.
        matrix = work.matrix_flops / (peak * min(model.efficiency, model.sustained))
        for product in work.matmuls:
            limited = product.flops / (peak * model.sustained)
            in_units = max(_matmul_ns(product, hardware, peak), limited)
            matrix += min(in_units, product.flops / hardware.vector_flops)
    operations = work.steps_ns + max(matrix, vector)
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
