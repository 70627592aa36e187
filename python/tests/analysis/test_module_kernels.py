"""Modules as kernels: what is fused, what is read and written, what products take."""

from __future__ import annotations

import pytest
from module_tasks import kernels, tasks_of

from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile

START, WAIT, VIEW, LOOP = (TaskKind.COLLECTIVE_START, TaskKind.WAIT, TaskKind.VIEW, TaskKind.LOOP)


def test_elementwise_ops_are_one_kernel_that_pays_its_boundary():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %y: tensor<1000xf32>) -> tensor<1000xf32> {
        %0 = stablehlo.add %x, %y : tensor<1000xf32>
        %1 = stablehlo.negate %0 : tensor<1000xf32>
        %2 = stablehlo.multiply %1, %x : tensor<1000xf32>
        return %2 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("multiply fusion of 3", 12_000)]


def test_a_value_of_two_kernels_goes_through_memory():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<1000xf32>, tensor<f32>, tensor<f32>) {
        %0 = stablehlo.negate %x : tensor<1000xf32>
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %1 = stablehlo.reduce(%0 init: %z) applies stablehlo.add across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        %2 = stablehlo.reduce(%0 init: %z) applies stablehlo.maximum across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        return %0, %1, %2 : tensor<1000xf32>, tensor<f32>, tensor<f32>
      }""")
    assert kernels(graph) == [("negate", 8000), ("reduce", 4004), ("reduce", 4004)]


def test_a_kernel_may_write_what_the_program_returns_as_well():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<1000xf32>, tensor<1000xf32>) {
        %0 = stablehlo.negate %x : tensor<1000xf32>
        %1 = stablehlo.add %0, %x : tensor<1000xf32>
        return %0, %1 : tensor<1000xf32>, tensor<1000xf32>
      }""")
    assert kernels(graph) == [("add fusion of 2", 12_000)]


def test_broadcasts_are_made_anew_where_a_kernel_can_and_written_where_not():
    graph = tasks_of("""
      func.func @main(%x: tensor<100xf32>) -> (tensor<100x100xf32>, tensor<100x100xf32>) {
        %0 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<100xf32>) -> tensor<100x100xf32>
        %1 = stablehlo.negate %0 : tensor<100x100xf32>
        %2 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [0]
             : (tensor<100x100xf32>, tensor<100x100xf32>) -> tensor<100x100xf32>
        return %1, %2 : tensor<100x100xf32>, tensor<100x100xf32>
      }""")
    assert kernels(graph) == [
        ("negate", 40_400),
        ("broadcast_in_dim", 40_400),
        ("dot_general", 80_000),
    ]


def test_a_product_takes_its_operations_or_its_bytes():
    graph = tasks_of("""
      func.func @main(%x: tensor<4x10x3000xbf16>, %y: tensor<4x3000x20xbf16>)
          -> tensor<4x10x20xf32> {
        %0 = stablehlo.dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [2] x [1]
             : (tensor<4x10x3000xbf16>, tensor<4x3000x20xbf16>) -> tensor<4x10x20xf32>
        return %0 : tensor<4x10x20xf32>
      }""")
    assert kernels(graph) == [("dot_general", 2 * 4 * 3000 * 30 + 4 * 4 * 200)]
    graph = tasks_of("""
      func.func @main(%x: tensor<8000x8000xbf16>) -> tensor<8000x8000xbf16> {
        %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
             : (tensor<8000x8000xbf16>, tensor<8000x8000xbf16>) -> tensor<8000x8000xbf16>
        return %0 : tensor<8000x8000xbf16>
      }""")
    assert kernels(graph) == [("dot_general", 2 * 8000**3 / 1000)]


def test_a_convolution_is_the_product_it_is_lowered_to():
    graph = tasks_of("""
      func.func @main(%x: tensor<64x128x128x256xf32>, %k: tensor<7x7x256x512xf32>)
          -> tensor<64x128x128x512xf32> {
        %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
             window = {pad = [[3, 3], [3, 3]]}
             {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
             : (tensor<64x128x128x256xf32>, tensor<7x7x256x512xf32>) -> tensor<64x128x128x512xf32>
        return %0 : tensor<64x128x128x512xf32>
      }""")
    assert kernels(graph) == [("convolution", 2 * 64 * 128**2 * 512 * 49 * 256 / 1000)]


def test_slices_are_charged_by_what_is_read_and_updates_by_what_is_written():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000x100xf32> {jax.buffer_donor = true}, %i: tensor<i32>)
          -> tensor<1000x100xf32> {
        %z = stablehlo.constant dense<0> : tensor<i32>
        %0 = stablehlo.dynamic_slice %x, %i, %z, sizes = [10, 100]
             : (tensor<1000x100xf32>, tensor<i32>, tensor<i32>) -> tensor<10x100xf32>
        %1 = stablehlo.negate %0 : tensor<10x100xf32>
        %2 = stablehlo.dynamic_update_slice %x, %1, %i, %z
             : (tensor<1000x100xf32>, tensor<10x100xf32>, tensor<i32>, tensor<i32>)
             -> tensor<1000x100xf32>
        return %2 : tensor<1000x100xf32>
      }""")
    assert kernels(graph) == [("dynamic_update_slice fusion of 3", 4000 + 4000 + 4)]
    assert memory_profile(graph).peak_bytes == 400_004  # written in place


def test_several_slices_of_a_value_add_up():
    graph = tasks_of("""
      func.func @main(%x: tensor<4000xf32>) -> tensor<1000xf32> {
        %0 = stablehlo.slice %x [0:1000] : (tensor<4000xf32>) -> tensor<1000xf32>
        %1 = stablehlo.slice %x [1000:2000] : (tensor<4000xf32>) -> tensor<1000xf32>
        %2 = stablehlo.add %0, %1 : tensor<1000xf32>
        return %2 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("add fusion of 3", 12_000)]


def test_an_update_copies_what_must_not_be_overwritten():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %u: tensor<10xf32>) -> tensor<1000xf32> {
        %z = stablehlo.constant dense<0> : tensor<i32>
        %0 = stablehlo.dynamic_update_slice %x, %u, %z
             : (tensor<1000xf32>, tensor<10xf32>, tensor<i32>) -> tensor<1000xf32>
        return %0 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("dynamic_update_slice", 4000 + 40 + 4000)]
    assert memory_profile(graph).peak_bytes == 8040


def test_what_a_broadcast_in_memory_is_made_of_is_made_before():
    graph = tasks_of("""
      func.func @main(%x: tensor<100xf32>, %y: tensor<100x100xf32>)
          -> (tensor<100x100xf32>, tensor<100x100xf32>) {
        %0 = stablehlo.exponential %x : tensor<100xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<100xf32>) -> tensor<100x100xf32>
        %2 = stablehlo.add %1, %y : tensor<100x100xf32>
        return %1, %2 : tensor<100x100xf32>, tensor<100x100xf32>
      }""")
    assert [name for name, _ in kernels(graph)] == ["exponential", "add", "broadcast_in_dim"]


def test_constants_are_read_from_memory_unless_they_are_one_number():
    graph = tasks_of(
        """
      func.func @main(%x: tensor<100xf32>) -> tensor<100xf32> {
        %0 = stablehlo.constant dense<2.0> : tensor<100xf32>
        %1 = stablehlo.constant dense<"0xTABLE"> : tensor<100xf32>
        %2 = stablehlo.multiply %x, %0 : tensor<100xf32>
        %3 = stablehlo.add %2, %1 : tensor<100xf32>
        return %3 : tensor<100xf32>
      }""".replace("TABLE", "".join(f"{i:08X}" for i in range(100)))
    )
    assert kernels(graph) == [("add fusion of 2", 1200)]
    assert memory_profile(graph).peak_bytes == 1200


def test_scalars_that_meet_again_and_again_are_followed_once():
    """Forty doublings: two to the fortieth paths lead from the sum to its first term."""
    doublings = (
        "\n".join(f"%{i + 1} = stablehlo.add %{i}, %{i} : tensor<f32>" for i in range(40))
        .replace("%0,", "%s,")
        .replace("%0 ", "%s ")
    )
    graph = tasks_of(f"""
      func.func @main(%s: tensor<f32>, %x: tensor<100xf32>) -> tensor<100xf32> {{
        {doublings}
        %b = stablehlo.broadcast_in_dim %40, dims = [] : (tensor<f32>) -> tensor<100xf32>
        %r = stablehlo.add %b, %x : tensor<100xf32>
        return %r : tensor<100xf32>
      }}""")
    assert kernels(graph) == [("add", 804)]


def test_the_zeros_of_a_dilated_image_are_not_multiplied():
    graph = tasks_of("""
      func.func @main(%x: tensor<8x32x32x256xf32>, %k: tensor<2x2x256x256xf32>)
          -> tensor<8x64x64x256xf32> {
        %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
             window = {pad = [[1, 1], [1, 1]], lhs_dilate = [2, 2]}
             {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
             : (tensor<8x32x32x256xf32>, tensor<2x2x256x256xf32>) -> tensor<8x64x64x256xf32>
        return %0 : tensor<8x64x64x256xf32>
      }""")
    bytes_ = 4 * (8 * 32 * 32 * 256 + 2 * 2 * 256 * 256 + 8 * 64 * 64 * 256)
    assert kernels(graph) == [("convolution", max(bytes_, 2 * 8 * 64 * 64 * 256 * 256 / 1000))]


def test_an_op_of_few_kernels_is_repeated_where_that_moves_less():
    reduced = """
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %1 = stablehlo.reduce(%0 init: %z) applies stablehlo.add across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        %2 = stablehlo.reduce(%0 init: %z) applies stablehlo.maximum across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        return %1, %2 : tensor<f32>, tensor<f32>
      }"""
    graph = tasks_of(f"""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<f32>, tensor<f32>) {{
        %0 = stablehlo.negate %x : tensor<1000xf32>
        {reduced}""")
    assert kernels(graph) == [("reduce fusion of 2", 4004)] * 2
    graph = tasks_of(f"""
      func.func @main(%a: tensor<1000xf32>, %b: tensor<1000xf32>, %c: tensor<1000xf32>)
          -> (tensor<f32>, tensor<f32>) {{
        %0 = stablehlo.clamp %a, %b, %c : tensor<1000xf32>
        {reduced}""")
    assert kernels(graph) == [("clamp", 16_000), ("reduce", 4004), ("reduce", 4004)]


def test_a_product_of_nothing_takes_no_time_to_compute():
    graph = tasks_of("""
      func.func @main(%x: tensor<0x8xf32>, %y: tensor<8x4xf32>) -> tensor<0x4xf32> {
        %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0]
             : (tensor<0x8xf32>, tensor<8x4xf32>) -> tensor<0x4xf32>
        return %0 : tensor<0x4xf32>
      }""")
    assert kernels(graph) == [("dot_general", 128)]


def test_a_product_is_as_dear_as_the_precision_that_it_asks_for():
    def text(precision: str) -> str:
        return f"""
      func.func @main(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {{
        %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0], precision = {precision}
             : (tensor<4096x4096xf32>, tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
        return %0 : tensor<4096x4096xf32>
      }}"""

    def ns(hardware: str, precision: str) -> float:
        ((_, found),) = kernels(tasks_of(text(precision), hardware=hardware))
        return found

    default, high, highest = "[DEFAULT, DEFAULT]", "[HIGH, HIGH]", "[HIGHEST, HIGHEST]"
    assert ns("tpu-v5e", high) == pytest.approx(3 * ns("tpu-v5e", default), rel=1e-3)
    assert ns("tpu-v5e", highest) == pytest.approx(6 * ns("tpu-v5e", default), rel=1e-3)
    assert ns("h100", high) == ns("h100", default)
    assert ns("h100", highest) == pytest.approx(2 * 4096**3 / 66.9e3)  # ns on its f32 units


def test_a_long_window_is_reduced_in_steps():
    graph = tasks_of("""
      func.func @main(%x: tensor<8192xf32>) -> tensor<8192xf32> {
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = "stablehlo.reduce_window"(%x, %z) <{window_dimensions = array<i64: 8192>,
             padding = dense<[[8191, 0]]> : tensor<1x2xi64>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %s = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %s : tensor<f32>
        }) : (tensor<8192xf32>, tensor<f32>) -> tensor<8192xf32>
        return %0 : tensor<8192xf32>
      }""")
    assert kernels(graph) == [("reduce_window", pytest.approx(8192 * 16 * 13 / 4))]
