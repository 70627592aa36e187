// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 repeats=2 schedule=circular},canonicalize' | filecheck %s --check-prefix=LAYERS
// RUN: stablehlo-tools opt %s -p 'expand-pipeline{microbatches=2 repeats=2 schedule=circular layout=pipeline},canonicalize' | filecheck %s --check-prefix=PIPELINE

// Layers 0 and 2 run on rank 0, 1 and 3 on rank 1. In the order of the layers, rank 0 sends its
// layer 1 and gets layer 2, once; the chunks that stay take no permute.
// LAYERS-LABEL: func.func @main(%arg0: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}
// LAYERS: %[[APART:.+]] = stablehlo.reshape %arg0 : (tensor<4x3x3xf32>) -> tensor<2x2x1x1x3x3xf32>
// LAYERS: %[[SPREAD:.+]] = sdy.manual_computation({{.*}}%[[APART]]{{.*}}) in_shardings=[{{.*}}] out_shardings=[<@mesh, [{?}, {"stage", ?}, {?}, {?}, {?}, {?}]>] manual_axes={"stage"}
// LAYERS: "stablehlo.collective_permute"
// LAYERS-SAME: source_target_pairs = dense<{{\[\[}}0, 1], [1, 0]]>
// LAYERS-NOT: stablehlo.collective_permute
// LAYERS: sdy.return
// LAYERS: sdy.manual_computation({{.*}}%[[SPREAD]]

// In the order of the ranks nothing is sent but activations.
// PIPELINE-LABEL: func.func @main(%arg0: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}
// PIPELINE: %[[APART:.+]] = stablehlo.reshape %arg0 : (tensor<4x3x3xf32>) -> tensor<2x2x1x1x3x3xf32>
// PIPELINE-NEXT: %[[TURNED:.+]] = stablehlo.transpose %[[APART]], dims = [1, 0, 2, 3, 4, 5]
// PIPELINE: sdy.manual_computation({{.*}}%[[TURNED]]
// PIPELINE-COUNT-1: stablehlo.collective_permute
// PIPELINE-NOT: stablehlo.collective_permute
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["stage"=2]>
  func.func @main(%w: tensor<4x3x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"stage"}, {}, {}]>}, %x: tensor<4x3xf32>) -> tensor<4x3xf32> {
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
