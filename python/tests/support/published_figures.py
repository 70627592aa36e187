"""Times and rates that others have measured, each table with the address it is copied from."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
type Groups = tuple[tuple[int, ...], ...]

# The figures are bus bandwidths in GB/s: bytes per time, times 2 (n - 1) / n for an all_reduce.
# https://github.com/Azure/AI-benchmarking-guide, Azure_Results: nccl-tests on one node, in place.
AZURE_ALL_REDUCE = {
    "h100": {
        MIB: 43.70,
        2 * MIB: 81.93,
        4 * MIB: 128.73,
        8 * MIB: 172.13,
        16 * MIB: 234.45,
        32 * MIB: 295.53,
        64 * MIB: 361.78,
        128 * MIB: 400.61,
        256 * MIB: 423.38,
        512 * MIB: 438.46,
        GIB: 466.35,
        8 * GIB: 478.87,
    },
    "h200": {
        2 * MIB: 88.78,
        4 * MIB: 138.44,
        8 * MIB: 181.94,
        16 * MIB: 240.41,
        32 * MIB: 300.91,
        64 * MIB: 368.11,
        256 * MIB: 432.24,
        GIB: 467.58,
        8 * GIB: 479.98,
    },
    "a100": {
        512 * KIB: 19.24,
        MIB: 36.22,
        2 * MIB: 53.54,
        64 * MIB: 166.63,
        128 * MIB: 174.18,
        256 * MIB: 213.87,
        512 * MIB: 221.58,
        GIB: 228.10,
        8 * GIB: 231.58,
    },
}

# Of the same tables, with bounds: A100's protocols differ more than H100's, and H200's NCCL starts
# sooner than H100's does.
AZURE_MISSED = [
    ("a100", 4 * MIB, 71.43, 0.35),
    ("a100", 8 * MIB, 89.99, 0.40),
    ("a100", 16 * MIB, 109.22, 0.40),
    ("a100", 32 * MIB, 132.77, 0.40),
    ("h200", 256 * KIB, 14.75, 0.40),
    ("h200", 512 * KIB, 29.38, 0.40),
    ("h200", MIB, 52.96, 0.30),
]

# Milliseconds of all_reduces on two nodes of eight H100 each, and bus bandwidths in GB/s:
# https://github.com/drmysore/nebius-h100-16gpu-benchmark, README.md, timed from PyTorch.
TWO_NODES = (4.520, 434.99)
TWO_NODES_MISSED = [(0.088, 22.30, 0.35), (0.157, 124.92, 0.40), (0.647, 304.03, 0.35)]

ONE = (tuple(range(8)),)
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
TWOS = ((0, 1), (2, 3), (4, 5), (6, 7))
ACROSS = ((0, 4), (1, 5), (2, 6), (3, 7))
SWAPS = ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (6, 7), (7, 6))

# Bytes per time in GB/s on eight H100 (sm_90) as XLA itself measures them for its own cost model:
# https://github.com/openxla/xla/blob/main/xla/service/gpu/model/collective_interpolator_data.h
XLA_H100: list[tuple[str, Groups, int, float]] = [
    ("all_gather", ONE, MIB, 42.67),
    ("all_gather", ONE, 2 * MIB, 62.59),
    ("all_gather", ONE, 4 * MIB, 87.32),
    ("all_gather", ONE, 8 * MIB, 134.43),
    ("all_gather", ONE, 256 * MIB, 368.0),
    ("all_gather", ONE, GIB, 391.04),
    ("all_gather", ONE, 2 * GIB, 400.12),
    ("reduce_scatter", ONE, MIB, 35.12),
    ("reduce_scatter", ONE, 4 * MIB, 116.92),
    ("reduce_scatter", ONE, 64 * MIB, 306.96),
    ("reduce_scatter", ONE, 256 * MIB, 347.9),
    ("reduce_scatter", ONE, 2 * GIB, 373.84),
    ("all_reduce", ONE, MIB, 22.44),
    ("all_reduce", ONE, 4 * MIB, 63.91),
    ("all_reduce", ONE, 256 * MIB, 208.69),
    ("all_reduce", ONE, GIB, 222.03),
    ("all_reduce", ONE, 2 * GIB, 224.42),
    ("all_to_all", ONE, 4 * MIB, 112.12),
    ("all_to_all", ONE, 128 * MIB, 325.27),
    ("all_to_all", ONE, 256 * MIB, 353.65),
    ("all_to_all", ONE, GIB, 383.96),
    ("all_gather", FOURS, 32 * MIB, 296.12),
    ("all_gather", FOURS, 512 * MIB, 423.4),
    ("all_gather", FOURS, 2 * GIB, 443.09),
    ("reduce_scatter", FOURS, 2 * MIB, 93.09),
    ("reduce_scatter", FOURS, 2 * GIB, 383.18),
    ("all_to_all", FOURS, 256 * MIB, 400.22),
    ("all_gather", TWOS, 128 * MIB, 454.42),
    ("all_gather", TWOS, 512 * MIB, 511.59),
    ("all_reduce", TWOS, MIB, 50.03),
    ("all_reduce", TWOS, 32 * MIB, 178.66),
    ("all_reduce", TWOS, GIB, 242.24),
    ("all_to_all", TWOS, 32 * MIB, 317.94),
    ("all_to_all", TWOS, 256 * MIB, 519.13),
    ("collective_permute", ACROSS, 512 * MIB, 269.25),
    ("collective_permute", ACROSS, 2 * GIB, 271.99),
    ("collective_permute", SWAPS, 512 * MIB, 286.69),
    ("collective_permute", SWAPS, 2 * GIB, 292.41),
]

# The model has one rate for messages of all sizes, where NCCL's grows up to about 256 MiB, slowest
# for sends of one pair, which use few channels; and latency of the protocol for middling sizes,
# which is more than small messages and less than large ones pay.
MISSED: list[tuple[str, Groups, int, float, float]] = [
    ("all_reduce", ONE, 256 * KIB, 10.01, 0.65),
    ("all_reduce", ONE, 8 * MIB, 74.45, 0.40),
    ("reduce_scatter", ONE, 2 * MIB, 82.64, 0.30),
    ("all_reduce", FOURS, 16 * MIB, 109.82, 0.45),
    ("reduce_scatter", FOURS, 32 * MIB, 271.58, 0.35),
    ("all_to_all", FOURS, 16 * MIB, 191.35, 0.45),
    ("all_to_all", FOURS, 64 * MIB, 288.55, 0.40),
    ("collective_permute", ACROSS, 4 * MIB, 77.32, 0.45),
    ("collective_permute", SWAPS, 32 * MIB, 111.47, 0.55),
]


# TFLOP/s of cuBLAS that XLA measured on H100 (sm_90) for its own cost model, as batch, m, n, k:
# https://github.com/openxla/xla/blob/main/xla/service/gpu/model/matmul_interpolator_data.h
XLA_MATMUL_H100 = [
    (1, 4096, 4096, 4096, 783.3),
    (2, 4096, 2048, 4096, 783.2),
    (2, 4096, 4096, 2048, 763.0),
    (2, 4096, 1024, 4096, 750.6),
    (2, 4096, 512, 4096, 729.7),
    (4, 2048, 2048, 2048, 725.7),
    (4, 1024, 2048, 2048, 712.7),
    (2, 2048, 4096, 1024, 678.7),
    (4, 4096, 1024, 1024, 673.8),
    (1, 2048, 2048, 2048, 632.0),
    (4, 1024, 1024, 2048, 626.1),
    (4, 2048, 512, 2048, 621.4),
    (2, 2048, 2048, 1024, 600.2),
    (2, 1024, 4096, 1024, 596.5),
    (4, 512, 4096, 1024, 592.2),
    (4, 4096, 512, 1024, 589.0),
    (4, 4096, 256, 2048, 588.7),
    (4, 4096, 1024, 512, 542.0),
    (2, 512, 2048, 2048, 525.3),
    (1, 1024, 2048, 2048, 524.3),
    (1, 2048, 1024, 2048, 523.3),
    (4, 1024, 512, 2048, 514.2),
    (2, 1024, 2048, 1024, 493.4),
    (4, 512, 2048, 1024, 487.2),
    (1, 4096, 2048, 512, 447.0),
    (4, 4096, 512, 512, 441.5),
    (1, 4096, 4096, 256, 392.2),
    (1, 1024, 1024, 2048, 350.0),
    (1, 2048, 512, 2048, 347.7),
    (1, 4096, 1024, 512, 343.7),
    (1, 256, 4096, 2048, 324.6),
    (1, 4096, 256, 2048, 304.7),
    (2, 1024, 256, 4096, 306.4),
    (1, 256, 2048, 4096, 285.9),
    (1, 256, 1024, 4096, 172.3),
    (1, 512, 256, 4096, 91.1),
    (4, 4096, 4096, 256, 503.9),
    (4, 4096, 4096, 512, 619.9),
    (2, 4096, 1024, 256, 301.6),
]

# Of the same table: one wave less a few tiles.
MISSED_MATMUL = [(1, 512, 4096, 1024, 373.3, 0.40), (1, 4096, 512, 1024, 370.8, 0.40)]

# Azure_Results of https://github.com/Azure/AI-benchmarking-guide: cuBLASLt, random values.
AZURE_MATMUL = [
    ("a100", "f16", 1024, 119.4),
    ("a100", "f16", 2048, 221.8),
    ("a100", "f16", 4096, 228.0),
    ("a100", "f16", 8192, 253.7),
    ("a100", "f16", 16384, 256.5),
    ("h100", "f8E4M3FN", 4096, 1216.9),
    ("h100", "f8E4M3FN", 8192, 1290.1),
    ("h100", "f8E4M3FN", 16384, 1377.3),
    ("h200", "f8E4M3FN", 8192, 1300.6),
]

# https://pyptx.dev/performance: cuBLAS on B200, bf16.
B200_MATMUL = [(2048, 2048, 2048, 1006), (4096, 4096, 4096, 1532), (8192, 8192, 8192, 1610)]

# The best of many shapes: https://github.com/stas00/ml-engineering, compute/accelerator/README.md.
BEST_MATMUL = [
    ("h100", (2048, 2048, 13312), 794.5),
    ("b200", (1792, 16128, 3072), 1745.0),
    ("mi300x", (10240, 15360, 8192), 668.4),
]
