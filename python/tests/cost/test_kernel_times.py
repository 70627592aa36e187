"""The time of a kernel: the formula's parts one by one, on a device with round figures."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from stablehlo_tools.cost.hardware import Hardware, MatmulModel, load_hardware
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind, kernel_ns

MODEL = MatmulModel(efficiency=1.0, tile_m=100, tile_n=100, units=10, half_depth=0.0)
DEVICE: Hardware = replace(
    load_hardware("h100"),
    memory_bandwidth=1000.0,
    memory_efficiency=0.5,
    launch_ns=2.0,
    vector_flops=100.0,
    matmul_flops={"bf16": 2000.0, "f32": 1000.0},
    matmul_model=MODEL,
)


def matmul(batch: int, m: int, n: int, k: int, dtype: str = "bf16") -> KernelWork:
    return KernelWork(WorkKind.MATMUL, 0.0, 0.0, (Matmul(batch, m, n, k),), dtype)


def test_a_view_is_free_and_a_kernel_takes_a_launch():
    assert kernel_ns(KernelWork(WorkKind.FREE), DEVICE) == 0
    assert kernel_ns(KernelWork(WorkKind.COPY, 10.0), DEVICE) == 2


def test_bytes_take_the_share_of_the_bandwidth_that_is_reached():
    assert kernel_ns(KernelWork(WorkKind.ELEMENTWISE, 5e4), DEVICE) == 100


def test_a_gather_reaches_half_of_it():
    assert kernel_ns(KernelWork(WorkKind.GATHER, 5e4), DEVICE) == 200


def test_vector_operations_bound_a_kernel_of_few_bytes():
    assert kernel_ns(KernelWork(WorkKind.REDUCTION, 5e4, 5e4), DEVICE) == 500


def test_a_product_of_whole_waves_reaches_the_peak():
    assert kernel_ns(matmul(1, 1000, 1000, 100), DEVICE) == 2 * 1000 * 1000 * 100 / 2000


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one():
    full = kernel_ns(matmul(1, 1000, 1000, 100), DEVICE)
    assert kernel_ns(matmul(1, 1000, 901, 100), DEVICE) == full
    assert kernel_ns(matmul(91, 100, 100, 100), DEVICE) == full
    assert kernel_ns(matmul(1, 1000, 1001, 100), DEVICE) == pytest.approx(full * 1.1)


def test_half_of_the_peak_at_half_depth():
    device = replace(DEVICE, matmul_model=replace(MODEL, half_depth=100.0))
    one_wave = matmul(1, 100, 1000, 100)
    assert kernel_ns(one_wave, device) == 2 * kernel_ns(one_wave, DEVICE)


def test_the_power_limit_bounds_large_products_only():
    device = replace(DEVICE, matmul_model=replace(MODEL, half_depth=100.0, sustained=0.75))
    small, large = matmul(1, 100, 1000, 100), matmul(1, 1000, 1000, 10_000)
    unlimited = replace(device, matmul_model=replace(MODEL, half_depth=100.0))
    assert kernel_ns(small, device) == kernel_ns(small, unlimited)  # half of the peak
    assert kernel_ns(large, device) == pytest.approx(kernel_ns(large, DEVICE) / 0.75)


def test_many_waves_hide_the_ends_of_their_tiles():
    device = replace(DEVICE, matmul_model=replace(MODEL, half_depth=100.0))
    many = matmul(26, 100, 1000, 100)  # a half of the half depth is left
    assert kernel_ns(many, device) == pytest.approx(1.5 * kernel_ns(many, DEVICE))


def test_a_deep_product_of_few_tiles_is_split_along_k():
    device = replace(DEVICE, matmul_model=replace(MODEL, half_depth=100.0))
    shallow = kernel_ns(matmul(1, 100, 100, 600), device)  # one tile, one unit
    assert kernel_ns(matmul(1, 100, 100, 6000), device) == pytest.approx(shallow)  # ten of them
    assert kernel_ns(matmul(1, 100, 100, 60_000), device) > 8 * shallow
    assert kernel_ns(matmul(10, 100, 100, 6000), device) > 8 * shallow  # no unit is idle


def test_the_products_of_a_fusion_come_one_after_the_other():
    one = matmul(1, 1000, 1000, 100)
    assert kernel_ns(replace(one, matmuls=one.matmuls * 3), DEVICE) == 3 * kernel_ns(one, DEVICE)


def test_the_element_type_sets_the_peak():
    bf16, f32 = (kernel_ns(matmul(1, 1000, 1000, 100, dtype), DEVICE) for dtype in ("bf16", "f32"))
    assert f32 == 2 * bf16


def test_a_product_too_thin_for_the_matrix_units_runs_on_the_vector_units():
    thin = matmul(1000, 100, 1, 4)
    assert kernel_ns(thin, DEVICE) == thin.flops / 100
    assert kernel_ns(thin, DEVICE) < kernel_ns(matmul(1000, 100, 100, 4), DEVICE)


@pytest.mark.parametrize("name", ["h100", "tpu-v5e"])
def test_more_work_never_takes_less_time(name: str):
    device = load_hardware(name)
    sizes = [64, 100, 128, 129, 256, 1000, 1024, 1025, 4096]
    for one, more in itertools.pairwise(sizes):
        for k in (64, 1000, 65_536):
            least = kernel_ns(matmul(1, one, one, k), device)
            for grown in ((1, more, one, k), (1, one, more, k), (1, one, one, 2 * k)):
                assert kernel_ns(matmul(*grown), device) >= least * (1 - 1e-9)
        smaller = kernel_ns(KernelWork(WorkKind.ELEMENTWISE, one * 1e5), device)
        assert kernel_ns(KernelWork(WorkKind.ELEMENTWISE, more * 1e5), device) > smaller


def test_a_big_product_nears_the_peak_and_stays_below_it():
    for name in ("h100", "tpu-v5e"):
        device = load_hardware(name)
        work = matmul(1, 8192, 8192, 8192)
        reached = work.flops / kernel_ns(work, device)
        assert 0.5 * device.peak("bf16") < reached <= device.peak("bf16")
