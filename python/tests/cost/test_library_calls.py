"""What library calls and hand-written kernels compute: formulas, and the exports of jax."""

from __future__ import annotations

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.kernels import KernelWork, WorkKind, kernel_ns
from stablehlo_tools.cost.library_calls import LibraryCall, Tensor, call_work
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import Question, exposure
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph


def tensor(*dims: int, dtype: str = "f32") -> Tensor:
    return Tensor(dims, dtype, 4.0 * math.prod(dims))


def flops(target: str, *operands: Tensor, results: tuple[Tensor, ...] = (), config: str = ""):
    work = call_work(LibraryCall(target, operands, results or operands[:1], config))
    assert work is not None
    return work.flops


A, B = tensor(4, 512, 512), tensor(2, 600, 200)
U, V, VALUES = tensor(2, 600, 200), tensor(2, 200, 200), tensor(2, 200)


@pytest.mark.parametrize(
    "target", ["cholesky", "Cholesky", "cusolver_potrf_ffi", "lapack_spotrf_ffi"]
)
def test_a_cholesky_is_a_third_of_a_cube(target: str):
    assert flops(target, A) == pytest.approx(4 * 512**3 / 3)
    complex_ = tensor(4, 512, 512, dtype="complex<f32>")
    assert flops(target, complex_) == pytest.approx(4 * flops(target, A))


def test_factorisations_are_counted_as_in_the_textbook():
    m, n = 600, 200
    assert flops("cusolver_getrf_ffi", B) == pytest.approx(2 * (m * n**2 - n**3 / 3))
    assert flops("Qr", B) == pytest.approx(2 * (2 * m * n**2 - 2 * n**3 / 3))
    assert flops("cusolver_orgqr_ffi", B, VALUES) == flops("Qr", B)
    assert flops("Eigh", A, results=(A, tensor(4, 512))) == pytest.approx(4 * 9 * 512**3)
    assert flops("lapack_sgeev_ffi", A, results=(A, A), config="compute_right = 78 : ui8") == (
        pytest.approx(4 * 10 * 512**3)
    )


def test_values_alone_are_less_work_than_vectors():
    svd = functools.partial(flops, "cusolver_gesvdj_ffi", B, results=(B, VALUES, U, V))
    assert svd(config="{compute_uv = true}") == pytest.approx(2 * (6 * 600 * 200**2 + 20 * 200**3))
    assert svd(config="{compute_uv = false}") == pytest.approx(2 * (2 * 600 * 200**2 + 2 * 200**3))


def test_solves_transforms_and_selections():
    triangle, right = tensor(512, 512), tensor(512, 64)
    for target in ("triangular_solve", "triangular-solve", "__cublas$triangularSolve"):
        assert flops(target, triangle, right) == 512 * 512 * 64
    points = tensor(64, 4096, dtype="complex<f32>")
    fft = call_work(LibraryCall("fft", (points,), (points,), lengths=(4096,)))
    assert fft is not None
    assert fft.flops == 5 * 64 * 4096 * 12
    assert flops("__gpu$TopK", tensor(64, 4096), results=(tensor(64, 8),)) == 64 * 4096 * 3
    ragged = call_work(
        LibraryCall("ragged_dot", (tensor(4096, 256), tensor(8, 256, 512)), (tensor(4096, 512),))
    )
    assert ragged is not None
    assert (ragged.kind, ragged.flops) == (WorkKind.MATMUL, 2 * 4096 * 256 * 512)


def attention(
    target: str, mask: str, *shapes: tuple[int, ...], layout: str = "BTNH", window: int = 0
):
    heads = ["0", "2"] if layout == "BTNH" else ["0", "1"]
    config = {
        "mask_type": mask,
        "sliding_window_length": window,
        "bmm1_dot_dimension_numbers": {"lhs_batch_dimensions": heads},
    }
    arrays = [tensor(*shape, dtype="bf16") for shape in shapes]
    call = LibraryCall(
        target, arrays, arrays[:1], json.dumps({"cudnn_fmha_backend_config": config})
    )
    work = call_work(call)
    assert work is not None
    return work


def matrix_flops(work: KernelWork) -> float:
    return sum(product.flops for product in work.matmuls)


def test_attention_is_two_products_forward_and_five_backward():
    q, kv = (2, 1024, 8, 64), (2, 2048, 2, 64)
    product = 2 * 2 * 8 * 1024 * 2048 * 64  # grouped queries: as many heads as the queries have
    forward = attention("__cudnn$fmhaSoftmax", "NO_MASK", q, kv, kv)
    assert (matrix_flops(forward), forward.dtype) == (2 * product, "bf16")
    backward = attention("__cudnn$fmhaScaleBiasSoftmaxBackward", "NO_MASK", q, kv, kv)
    assert matrix_flops(backward) == 5 * product
    other = attention(
        "__cudnn$fmhaSoftmax",
        "NO_MASK",
        (2, 8, 1024, 64),
        (2, 2, 2048, 64),
        (2, 2, 2048, 64),
        layout="BNTH",
    )
    assert matrix_flops(other) == 2 * product


@pytest.mark.parametrize(
    ("kernel", "shape", "products"),
    [
        ("_flash_attention_dkv_kernel", (2, 8, 1024, 64), 4),
        ("splash_mha_fwd_no_residuals", (2, 8, 1024, 64), 2),
        ("splash_mqa_dq", (2, 8, 1024, 64), 3),
        ("mha_forward", (2, 1024, 8, 64), 2),
        ("mha_backward", (2, 1024, 8, 64), 5),
    ],
)
def test_kernels_of_attention_are_known_by_their_names(
    kernel: str, shape: tuple[int, ...], products: int
):
    arrays = [tensor(1, 8, dtype="i32"), *[tensor(*shape, dtype="bf16")] * 3]
    target = "__gpu$xla.gpu.triton" if kernel.startswith("mha") else "tpu_custom_call"
    work = call_work(LibraryCall(target, arrays, arrays[1:2], kernel=kernel))
    assert work is not None
    assert matrix_flops(work) == products * 2 * 2 * 8 * 1024**2 * 64
    config = f'{{debug = false, grid_x = 8 : i32, name = "{kernel}"}}'  # of a schedule
    assert call_work(LibraryCall(target, arrays, arrays[1:2], config, "custom-call.3")) == work
    assert call_work(LibraryCall(target, arrays, arrays[1:2], kernel="mha_preprocess")) is None


def test_a_mask_leaves_out_what_it_hides():
    q = (2, 1024, 8, 64)
    whole = matrix_flops(attention("__cudnn$fmhaSoftmax", "NO_MASK", q, q, q))
    causal = matrix_flops(attention("__cudnn$fmhaSoftmax", "PADDING_CAUSAL", q, q, q))
    assert causal == pytest.approx(whole / 2, rel=2e-3)
    window = matrix_flops(attention("__cudnn$fmhaSoftmax", "CAUSAL", q, q, q, window=128))
    seen = (128 * 129 / 2 + (1024 - 128) * 128) / 1024
    assert window == pytest.approx(whole * seen / 1024, rel=1e-2)


def test_flops_without_a_shape_reach_the_share_of_huge_products():
    h100 = load_hardware("h100")
    work = KernelWork(WorkKind.LIBRARY, 1.0, 0.0, (), "bf16", matrix_flops=1e12)
    assert kernel_ns(work, h100) == pytest.approx(1e12 / (989.4e3 * 0.70))  # sustained
    assert work.flops == 1e12


def timed(step: object, *shapes: tuple[int, ...], platform: str, targets: tuple[str, ...] = ()):
    """The program as exported for a platform and timed there."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    checks = [
        export.DisabledSafetyCheck.custom_call(name)
        for name in ("tpu_custom_call", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    ]
    made = export.export(jax.jit(step), platforms=[platform], disabled_checks=checks)(*arguments)  # pyright: ignore[reportArgumentType]
    hardware = load_hardware("tpu-v5e" if platform == "tpu" else "h100")
    (report,) = exposure([artifact.from_exported(made)], Question(hardware))
    return report


def kernels(report: ProgramReport) -> list[float]:
    return [row.ns for row in report.kernels if row.name.startswith("custom_call")]


def _add(x_ref, y_ref, o_ref):  # pyright: ignore
    o_ref[...] = x_ref[...] + y_ref[...]


def test_a_pallas_kernel_that_states_its_cost_takes_that():
    cost = pl.CostEstimate(flops=2 * 10**10, bytes_accessed=1000, transcendentals=0)

    def add(x: jax.Array, y: jax.Array, cost: pl.CostEstimate | None = None) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(_add, out_shape=shape, cost_estimate=cost, name="my_add")(x, y)

    size = (256, 256)
    stated = timed(functools.partial(add, cost=cost), size, size, platform="tpu")
    assert kernels(stated) == [pytest.approx(2e10 / (197e3 * 0.95))]
    assert not stated.notes
    silent = timed(add, size, size, platform="tpu")
    assert silent.notes == ("timed by their bytes alone: 1 custom_call @tpu_custom_call my_add",)


def test_jax_s_flash_attention_is_known_by_name_where_it_states_no_cost():
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    shape = (2, 8, 1024, 128)
    report = timed(jax.grad(loss, argnums=(0, 1, 2)), shape, shape, shape, platform="tpu")
    product = 2 * 2 * 8 * 1024**2 * 128
    assert not report.notes
    forward, keys, queries = sorted(kernels(report))
    assert forward == pytest.approx(2 * product / (197e3 * 0.95), rel=0.05)  # 2, as it states
    assert queries / keys == pytest.approx(4 / 3, rel=0.05)
    assert queries > 4 * product / 197e3


def test_cudnn_s_attention_in_a_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        made = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return made.astype(jnp.float32).sum()

    shape = (2, 4096, 16, 128)
    times: list[list[float]] = []
    for causal in (False, True):
        step = jax.grad(functools.partial(loss, causal=causal), argnums=(0, 1, 2))
        report = timed(step, shape, shape, shape, platform="cuda")
        assert not report.notes
        times.append(sorted(kernels(report)))
    (forward, backward), causals = times
    assert forward > 2 * (2 * 2 * 16 * 4096**2 * 128) / 989.4e3
    assert backward / forward == pytest.approx(2.5, rel=0.1)
    assert 0.5 < causals[1] / backward < 0.65  # half of the products, in fewer waves


def test_a_solver_in_a_program_is_no_longer_timed_by_its_bytes():
    def step(x: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(x.astype(jnp.float32))

    report = timed(step, (64, 1024, 1024), platform="cuda")
    columns = 1024 * 700  # of all matrices at once
    assert kernels(report) == [pytest.approx(columns + 64 * 1024**3 / 3 / 66.9e3)]
    assert not report.notes


def test_calls_in_a_schedule_are_known_and_named():
    """Lines as XLA:TPU and XLA:GPU print them: numbers of protos are strings."""
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %stated.1 = f32[512,512]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"flag_configs":[],"custom_call_config":{"body":"AA==","cost_estimate":{"flops":"20000000000","transcendentals":"0","bytes_accessed":"1000","remote_bytes_transferred":"0"}},"retry_config":{"retry_count":"0"}}
  %padd.7 = f32[512,512]{1,0} custom-call(%stated.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/pallas_call"}, backend_config={"custom_call_config":{"body":"AA=="}}
  %c = (f32[512,512]{0,1}, s32[]) custom-call(%padd.7), custom_call_target="cusolver_potrf_ffi", api_version=API_VERSION_TYPED_FFI, backend_config={lower = true}
  %d = f32[512,512]{0,1} get-tuple-element(%c), index=0
  ROOT %e = f32[512,512]{1,0} custom-call(%d), custom_call_target="my_ffi"
}
"""  # noqa: E501
    tasks = {task.name: task for task in hlo_task_graph(text, load_hardware("tpu-v5e"), 1).tasks}
    assert tasks["stated.1"].ns == pytest.approx(2e10 / (197e3 * 0.95))
    operations = 512**3 / 3 / load_hardware("tpu-v5e").vector_flops
    assert tasks["c"].ns == pytest.approx(512 * 700 + operations)
    by_bytes = {name: task.by_bytes for name, task in tasks.items() if task.by_bytes}
    assert by_bytes == {"padd.7": "custom_call @tpu_custom_call padd", "e": "custom_call @my_ffi e"}


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "hardware", "measured_us"),
    [
        # pytorch/pytorch, pull 173515: torch.linalg.cholesky
        ("cusolver_potrf_ffi", (512, 512), "f32", "h100", 376),
        ("cusolver_potrf_ffi", (2048, 2048), "f32", "h100", 1954),
        ("cusolver_potrf_ffi", (16, 128, 128), "f32", "h100", 158),
        # jax-ml/jax, issue 9694: lax.linalg.lu
        ("cusolver_getrf_ffi", (4096, 4096), "f32", "a100", 44e3),
        # pytorch/pytorch, pull 56887: two matrices in 19.7 ms, on a V100
        ("cusolver_getrf_ffi", (2, 1024, 1024), "f64", "a100", 19.7e3),
        # ml-explore/mlx, pull 975: torch.linalg.qr is this and its Q
        ("cusolver_geqrf_ffi", (2000, 2000), "f32", "a100", 6.3e3 / 2),
        # tensor4all/tenferro-rs, issue 1720
        ("cusolver_gesvd_ffi", (256, 256), "f64", "a100", 23.3e3),
        # pytorch/pytorch, issue 174674: one of 500
        ("cusolver_syevd_ffi", (100, 100), "f32", "h100", 1830),
    ],
)
def test_factorisations_take_about_as_long_as_measured(
    target: str, shape: tuple[int, ...], dtype: str, hardware: str, measured_us: float
):
    matrix = Tensor(shape, dtype, 8 * math.prod(shape))
    work = call_work(LibraryCall(target, (matrix,), (matrix,)))
    assert work is not None
    predicted = kernel_ns(work, load_hardware(hardware)) / 1e3
    assert measured_us / 2.2 < predicted < 2.2 * measured_us


def test_a_tall_qr_moves_its_panels():
    """Each column reads and writes its panel of 32: TSQR gains by parts with fewer rows."""

    def ns(rows: int) -> float:
        matrix = Tensor((rows, 256), "f64", 8.0 * rows * 256)
        work = call_work(LibraryCall("cusolver_geqrf_ffi", (matrix,), (matrix,)))
        assert work is not None
        return kernel_ns(work, load_hardware("h100"))

    assert ns(65536) > 2 * ns(8192)
    assert ns(8192) == pytest.approx(256 * 3e3, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        "",
        "not JSON",
        '{"custom_call_config": 3}',
        '{"custom_call_config": {"cost_estimate": {"flops": "many"}}}',
        '{"custom_call_config": {"cost_estimate": {"flops": 1e999}}}',
        "[" * 100_000,
    ],
)
def test_a_cost_that_cannot_be_read_is_none(config: str):
    assert call_work(LibraryCall("tpu_custom_call", (A,), (A,), config)) is None
    assert call_work(LibraryCall("__cudnn$fmhaSoftmax", (A,), (A,), config)) is None
