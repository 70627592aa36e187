// RUN: stablehlo-tools opt %s -p 'pipeline{schedule=gpipe}' | filecheck %s

// A named pipeline is its passes, in order: of a training step, eager 1F1B.
// RUN: stablehlo-tools opt %S/../transforms/expand_pipeline_1f1b.mlir -p pipeline --split-input-file > %t.named
// RUN: stablehlo-tools opt %S/../transforms/expand_pipeline_1f1b.mlir -p 'expand-pipeline{schedule=eager-1f1b},partition,create-reduce-scatter,schedule-overlap' --split-input-file | diff -u %t.named -

// Its options go to the passes that have them, in the place of what it says itself.
// RUN: stablehlo-tools opt %s -p 'pipeline{axis=stage microbatches=4 repeats=2 schedule=circular hardware=h200}' > %t.options
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{axis=stage microbatches=4 repeats=2 schedule=circular},partition,create-reduce-scatter,schedule-overlap{hardware=h200}' | diff -u %t.options -

// Without the axis there is no pipeline, and no 1F1B without a backward.
// RUN: not stablehlo-tools opt %s -p 'pipeline{axis=pp}' 2>&1 | filecheck %s --check-prefix=AXIS
// RUN: not stablehlo-tools opt %s -p pipeline 2>&1 | filecheck %s --check-prefix=FORWARD
// AXIS: error: {{.*}}pp
// FORWARD: error: expand-pipeline: schedule=eager-1f1b needs {{.*}}use schedule=gpipe or schedule=circular, which run each loop separately

// Two layers a rank, handed on by a permute in each tick.
// CHECK-LABEL: func.func @main
// CHECK: sdy.manual_computation
// CHECK: stablehlo.while
// CHECK: "stablehlo.collective_permute"
// CHECK-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 0]]>
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%w: tensor<4x3x3xf32>, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %layers = stablehlo.constant dense<4> : tensor<i32>
    %loop:3 = stablehlo.while(%i = %zero, %ws = %w, %h = %x) : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    cond {
      %0 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %0 : tensor<i1>
    } do {
      %1 = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 3, 3] : (tensor<4x3x3xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x3x3xf32>
      %2 = stablehlo.reshape %1 : (tensor<1x3x3xf32>) -> tensor<3x3xf32>
      %3 = stablehlo.dot_general %h, %2, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x3xf32>) -> tensor<4x3xf32>
      %out = stablehlo.tanh %3 : tensor<4x3xf32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %next, %ws, %out : tensor<i32>, tensor<4x3x3xf32>, tensor<4x3xf32>
    }
    return %loop#2 : tensor<4x3xf32>
  }
}
