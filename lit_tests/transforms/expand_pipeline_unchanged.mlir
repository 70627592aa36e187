// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file | tee %t.once.mlir | filecheck %s

// A program without a loop over layers is refused, not handed back; so is one that is expanded, and
// no file is written.
// RUN: rm -f %t.twice.mlir
// RUN: not stablehlo-tools opt %S/expand_pipeline_1f1b.mlir -p 'expand-pipeline{microbatches=2},expand-pipeline{microbatches=2}' -o %t.twice.mlir 2>&1 | filecheck %s --check-prefix=TWICE
// RUN: not ls %t.twice.mlir
// TWICE: error: expand-pipeline: the program has no loop over layers

// The same input and options give the same bytes.
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2}' --split-input-file | diff -u %t.once.mlir -

// Near misses: loops that count but take no rows of weights, and rows of numbers that are no
// matrices, stay as they are beside the loop that is expanded; as does the signature.
// CHECK-LABEL: func.func public @main(
// CHECK-SAME: %arg0: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %arg1: tensor<4x3xf32> {jax.buffer_donor = true})
// CHECK-SAME: -> (tensor<4x3xf32> {jax.result_info = "result"})
// CHECK: %[[POWER:[^ :]+]]:2 = stablehlo.while(
// CHECK-NEXT: cond {
// CHECK: stablehlo.multiply %{{.+}}, %{{.+}} : tensor<4x3xf32>
// CHECK: sdy.manual_computation(%{{.+}}, %[[POWER]]#1)
// CHECK: sdy.return
// CHECK-NOT: sdy.manual_computation
// CHECK: stablehlo.while(
// CHECK: stablehlo.dynamic_slice {{.+}}sizes = [1] : (tensor<4xf32>, tensor<i32>)
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func public @main(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xf32> {jax.buffer_donor = true}) -> (tensor<4x3xf32> {jax.result_info = "result"}) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %rates = stablehlo.constant dense<[1.0, 0.5, 0.25, 0.125]> : tensor<4xf32>
    %power:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.multiply %h, %h : tensor<4x3xf32>
      %2 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %2, %1 : tensor<i32>, tensor<4x3xf32>
    }
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %power#1) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %4 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %4, %ws, %3 : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    %damped:3 = stablehlo.while(%i = %zero, %rs = %rates, %h = %loop#2) : tensor<i32>, tensor<4xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %rs, %i, sizes = [1] : (tensor<4xf32>, tensor<i32>) -> tensor<1xf32>
      %2 = stablehlo.reshape %1 : (tensor<1xf32>) -> tensor<f32>
      %3 = stablehlo.broadcast_in_dim %2, dims = [] : (tensor<f32>) -> tensor<4x3xf32>
      %4 = stablehlo.multiply %h, %3 : tensor<4x3xf32>
      %5 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %5, %rs, %4 : tensor<i32>, tensor<4xf32>, tensor<4x3xf32>
    }
    return %damped#2 : tensor<4x3xf32>
  }
}
