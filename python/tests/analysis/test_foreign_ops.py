"""Ops of MHLO, and what runs regions: timed like StableHLO's, or refused by name and place."""

from __future__ import annotations

import pytest
from module_tasks import kernels, tasks_of

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.artifacts.artifact import ArtifactForm, encode, parse
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.pipeline import Diagnostics, Pipeline

_CONVOLUTION = """
  func.func @main(%x: tensor<8x32x32x64xf32>, %k: tensor<3x3x64x64xf32>)
      -> tensor<8x30x30x64xf32> {
    %0 = DIALECT.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
         window = {stride = [1, 1]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
         : (tensor<8x32x32x64xf32>, tensor<3x3x64x64xf32>) -> tensor<8x30x30x64xf32>
    return %0 : tensor<8x30x30x64xf32>
  }"""
_PRODUCT = """
  func.func @main(%x: tensor<4x10x3000xf32>, %y: tensor<4x3000x20xf32>) -> tensor<4x10x20xf32> {
    %0 = "DIALECT.dot_general"(%x, %y) <{dot_dimension_numbers = #DIALECT.dot<
           lhs_batching_dimensions = [0], rhs_batching_dimensions = [0],
           lhs_contracting_dimensions = [2], rhs_contracting_dimensions = [1]>}>
         : (tensor<4x10x3000xf32>, tensor<4x3000x20xf32>) -> tensor<4x10x20xf32>
    return %0 : tensor<4x10x20xf32>
  }"""
_WINDOW = """
  func.func @main(%x: tensor<512x64xf32>, %z: tensor<f32>) -> tensor<512x63xf32> {
    %0 = "DIALECT.reduce_window"(%x, %z) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = DIALECT.add %a, %b : tensor<f32>
      "DIALECT.return"(%s) : (tensor<f32>) -> ()
    }) {window_dimensions = NUMBERS} : (tensor<512x64xf32>, tensor<f32>) -> tensor<512x63xf32>
    return %0 : tensor<512x63xf32>
  }"""
_NUMBERS = {"stablehlo": "array<i64: 1, 2>", "mhlo": "dense<[1, 2]> : tensor<2xi64>"}


def _written(text: str, dialect: str) -> str:
    return text.replace("DIALECT", dialect).replace("NUMBERS", _NUMBERS[dialect])


@pytest.mark.parametrize("text", [_CONVOLUTION, _PRODUCT, _WINDOW], ids=["conv", "dot", "window"])
def test_an_op_of_mhlo_costs_what_that_of_stablehlo_does(text: str):
    assert kernels(tasks_of(_written(text, "mhlo"))) == kernels(
        tasks_of(_written(text, "stablehlo"))
    )


@pytest.mark.parametrize("text", [_CONVOLUTION, _PRODUCT, _WINDOW], ids=["conv", "dot", "window"])
@pytest.mark.parametrize("name", ["bucket-collectives", "schedule-overlap"])
def test_passes_that_time_a_program_take_ops_of_mhlo(text: str, name: str):
    module = parse(_written(text, "mhlo").encode()).module
    Pipeline.parse(name).run(module, Diagnostics(), None)
    assert "mhlo." in str(module)


def test_control_flow_of_mhlo_is_refused_by_name_and_place():
    text = """
      func.func @main(%x: tensor<8xf32>, %p: tensor<i1>) -> tensor<8xf32> {
        %0 = "mhlo.if"(%p) ({
          "mhlo.return"(%x) : (tensor<8xf32>) -> ()
        }, {
          %s = mhlo.add %x, %x : tensor<8xf32>
          "mhlo.return"(%s) : (tensor<8xf32>) -> ()
        }) : (tensor<i1>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }"""
    with pytest.raises(ToolError, match=r"<module>:\d+:\d+: error: mhlo\.if cannot be timed"):
        tasks_of(text)


def test_a_named_computation_costs_what_is_in_it():
    body = "%0 = stablehlo.tanh %a : tensor<800xf32>"
    plain = f"""
      func.func @main(%a: tensor<800xf32>) -> tensor<800xf32> {{
        {body}
        return %0 : tensor<800xf32>
      }}"""
    named = f"""
      func.func @main(%x: tensor<800xf32>) -> tensor<800xf32> {{
        %1 = sdy.named_computation<"layer">(%x) (%a: tensor<800xf32>) {{
          {body}
          sdy.return %0 : tensor<800xf32>
        }} : (tensor<800xf32>) -> tensor<800xf32>
        return %1 : tensor<800xf32>
      }}"""
    assert kernels(tasks_of(named)) == kernels(tasks_of(plain))


@pytest.mark.parametrize("name", ["thread-tokens{scope=group}", "bucket-collectives"])
def test_a_mesh_that_is_a_function_is_refused_at_the_collective(name: str):
    module = parse(b"""
      func.func private @mesh()
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = "stablehlo.all_reduce"(%x) <{replica_groups = #stablehlo.replica_group_mesh_axes<
              mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %s = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %s : tensor<f32>
        }) : (tensor<8xf32>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }""").module
    with pytest.raises(ToolError, match=r":4:14: error: stablehlo.all_reduce: .* no mesh @mesh"):
        Pipeline.parse(name).run(module, Diagnostics(), None)


def test_a_cross_replica_sum_goes_into_a_composite_and_comes_back():
    text = b"""
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = "stablehlo.cross-replica-sum"(%x) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}
             : (tensor<8xf32>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }"""
    module: ir.Module = parse(text).module
    before = str(module)
    Pipeline.parse("thread-tokens{form=composite}").run(module, Diagnostics(), None)
    assert 'stablehlo.composite "stablehlo_tools.cross_replica_sum"' in str(module)
    Pipeline.parse("strip-tokens").run(module, Diagnostics(), None)
    assert str(module) == before


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("tensor<3xindex>", 24),
        ("tensor<3x!quant.uniform<i8:f32, 2.0:1>>", 3),
        ("tensor<3x!quant.uniform<i4:f32:0, {2.0,3.0,4.0}>>", 2),
    ],
)
def test_indices_and_quantized_elements_have_a_size(kind: str, size: int):
    portable = encode(parse(b"func.func @main() { return }"), ArtifactForm.PORTABLE)
    context = parse(portable).module.context  # reading one is what makes those types known
    assert tensor_bytes(ir.ShapedType(ir.Type.parse(kind, context))) == size
