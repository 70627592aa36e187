"""What one instruction of HLO computes, reads and writes."""

from __future__ import annotations

import pytest
from hlo_graphs import hlo

from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind
from stablehlo_tools.targets.hlo.module import parse_module
from stablehlo_tools.targets.hlo.work import FREE, work


def work_of(name: str, entry: str, *computations: str) -> KernelWork:
    module = parse_module(hlo(entry, *computations))
    return work(module.entry.by_name[name], module.entry, module)


def test_a_fusion_pays_its_boundary_and_reads_of_a_slice_what_it_takes():
    kernel = work_of(
        "f",
        """%p = f32[64,64]{1,0} parameter(0)
        %q = f32[64]{0} parameter(1)
        %i = s32[] parameter(2)
        ROOT %f = f32[1,64]{1,0} fusion(%p, %q, %i), kind=kLoop, calls=%sliced""",
        """sliced: %a = f32[64,64]{1,0} parameter(0)
        %b = f32[64]{0} parameter(1)
        %i = s32[] parameter(2)
        %s = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}
        %v = f32[1,64]{1,0} bitcast(%b)
        ROOT %m = f32[1,64]{1,0} multiply(%s, %v)""",
    )
    assert kernel == KernelWork(WorkKind.ELEMENTWISE, 3 * 256 + 4, 128, (), "f32")


def test_an_update_in_place_writes_the_update():
    kernel = work_of(
        "f",
        """%p = f32[64,64]{1,0} parameter(0)
        %q = f32[1,64]{1,0} parameter(1)
        ROOT %f = f32[64,64]{1,0} fusion(%p, %q), kind=kLoop, calls=%updated""",
        """updated: %a = f32[64,64]{1,0} parameter(0)
        %b = f32[1,64]{1,0} parameter(1)
        %i = s32[] constant(0)
        ROOT %u = f32[64,64]{1,0} dynamic-update-slice(%a, %b, %i, %i)""",
    )
    assert kernel.bytes == 2 * 256


@pytest.mark.parametrize(
    "line",
    [
        "f32[8,8]{1,0} bitcast(%p)",
        "(f32[64]{0}) tuple(%p)",
        'f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "s32[]{:T(128)} add(%i, %i)",  # on XLA:TPU's scalar core
    ],
)
def test_views_are_free(line: str):
    entry = f"""%p = f32[64]{{0}} parameter(0)
        %i = s32[]{{:T(128)}} parameter(1)
        ROOT %x = {line}"""
    assert work_of("x", entry) is FREE


def test_a_scalar_is_a_kernel_on_a_gpu():
    assert work_of("x", "%i = s32[] parameter(0)\nROOT %x = s32[] add(%i, %i)").bytes == 12


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "window", "expected"),
    [
        # an image convolution, its padding not counted
        ("8,32,32,16", "3,3,16,64", "8,32,32,64",
         "{size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", Matmul(1, 8 * 32 * 32, 64, 138)),
        # XLA:TPU's dots: a batch dimension, a contraction over a window, an outer product
        ("6,64,32", "6,32,16", "6,64,16", "{size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf",
         Matmul(6, 64, 16, 32)),
        ("5,64,32", "5,32,16", "64,16,1", "{size=5}, dim_labels=0bf_0io->bf0",
         Matmul(1, 64, 16, 160)),
        ("64,32,1", "32,16,8", "64,16,8",
         "{size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_io0->bf0", Matmul(1, 64, 128, 32)),
        # the gradient of a filter: images are the depth
        ("32,32,8,16", "32,32,8,64", "1,1,16,64", "{size=32x32}, dim_labels=01fb_01io->01bf",
         Matmul(1, 16, 64, 8 * 32 * 32)),
    ],
)  # fmt: skip
def test_the_product_that_a_convolution_is(
    lhs: str, rhs: str, out: str, window: str, expected: Matmul
):
    def shape(dims: str) -> str:
        order = ",".join(str(d) for d in reversed(range(dims.count(",") + 1)))
        return f"bf16[{dims}]{{{order}}}"

    kernel = work_of(
        "c",
        f"""%a = {shape(lhs)} parameter(0)
        %b = {shape(rhs)} parameter(1)
        ROOT %c = {shape(out)} convolution(%a, %b), window={window}""",
    )
    assert kernel.matmuls == (expected,)
    assert kernel.dtype == "bf16"


def test_a_depthwise_convolution_has_a_product_for_each_group():
    kernel = work_of(
        "c",
        """%a = bf16[4,100,64]{2,1,0} parameter(0)
        %b = bf16[4,1,64]{2,1,0} parameter(1)
        ROOT %c = bf16[4,97,64]{2,1,0} convolution(%a, %b), window={size=4},
            .. dim_labels=b0f_0io->b0f, feature_group_count=64""",
    )
    assert kernel.matmuls == (Matmul(64, 4 * 97, 1, 4),)


def test_products_in_library_calls_and_in_fusions():
    dims = (
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
        '"rhs_batch_dimensions":["0"]}'
    )
    expected = (Matmul(4, 64, 16, 32),)
    arguments = """%a = bf16[4,64,32]{2,1,0} parameter(0)
        %b = bf16[4,32,16]{2,1,0} parameter(1)"""
    for target in ("__cublas$gemm", "__cublas$lt$matmul"):
        gemm = f"""{arguments}
            ROOT %c = (bf16[4,64,16]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b),
                .. custom_call_target="{target}",
                .. backend_config={{"gemm_backend_config":{{{dims}}}}}"""
        assert work_of("c", gemm).matmuls == expected
    fusion = f"""{arguments}
        ROOT %c = bf16[4,64,16]{{2,1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm,
            .. backend_config={{"kind":"__triton_gemm"}}"""
    dot = f"""gemm: {arguments}
        ROOT %d = bf16[4,64,16]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}},
            .. lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}"""
    kernel = work_of("c", fusion, dot)
    assert kernel.matmuls == expected
    assert kernel.bytes == 2 * (4 * 64 * 32 + 4 * 32 * 16 + 4 * 64 * 16)


@pytest.mark.parametrize(
    ("target", "a", "b", "c"),
    [
        ("__cudnn$convForward", "8,32,32,16", "3,3,16,64", "8,32,32,64"),
        ("__cudnn$convBackwardInput", "8,32,32,64", "3,3,16,64", "8,32,32,16"),
        ("__cudnn$convBackwardFilter", "8,32,32,16", "8,32,32,64", "3,3,16,64"),
    ],
)
def test_cudnns_gradients_are_as_much_work_as_its_convolution(target: str, a: str, b: str, c: str):
    kernel = work_of(
        "x",
        f"""%a = f32[{a}]{{3,2,1,0}} parameter(0)
        %b = f32[{b}]{{3,2,1,0}} parameter(1)
        ROOT %x = (f32[{c}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b),
            .. window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f,
            .. custom_call_target="{target}" """,
    )
    assert kernel.flops == 2 * 8 * 32 * 32 * 16 * 64 * 9


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("size=1x3 pad=0_0x1_1", 3),
        ("size=1x255 pad=0_0x127_127", 36),  # every window has all of its row
        ("size=1x255 pad=0_0x127_127 rhs_dilate=1x2", 255),
        ("size=1x128 pad=0_0x127_0", 128),  # a prefix sum
        ("size=1x999 pad=0_0x127_871", 36),
    ],
)
def test_windows_from_end_to_end_reduce_a_row_once(window: str, expected: int):
    kernel = work_of(
        "r",
        f"""%p = f32[64,128]{{1,0:T(8,128)}} parameter(0)
        %z = f32[]{{:T(128)}} constant(0)
        ROOT %r = f32[64,128]{{1,0:T(8,128)}} reduce-window(%p, %z), window={{{window}}},
            .. to_apply=%add""",
    )
    assert kernel.vector_flops == expected * 64 * 128
