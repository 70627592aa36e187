// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.barrier.mlir
// RUN: stablehlo-tools verify %s %t.barrier.mlir --backend interpreter | filecheck %s
// RUN: stablehlo-tools opt %s -p 'thread-tokens{minimal scope=group}' -o %t.minimal.mlir
// RUN: stablehlo-tools verify %s %t.minimal.mlir --backend interpreter | filecheck %s

// Every kind of collective gives what it gave, bit for bit, on both participants.
// CHECK: same: 7 outputs, 60 elements, bitwise

// A change of one collective is seen.
// RUN: sed 's/stablehlo.minimum/stablehlo.maximum/' %t.barrier.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 1,
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<2x2xf32>, %y: tensor<4xi32>) -> (
      tensor<2x4xf32>, tensor<4xi32>, tensor<1x2xf32>, tensor<4x1xf32>, tensor<4xi32>, tensor<2x2xf32>, tensor<2x2xf32>) {
    %gathered = "stablehlo.all_gather"(%x) {
      all_gather_dim = 1 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<2x2xf32>) -> tensor<2x4xf32>
    %reduced = "stablehlo.all_reduce"(%y) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %least = stablehlo.minimum %a, %b : tensor<i32>
      stablehlo.return %least : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xi32>) -> tensor<4xi32>
    %scattered = "stablehlo.reduce_scatter"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {
      replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>,
      scatter_dimension = 0 : i64
    } : (tensor<2x2xf32>) -> tensor<1x2xf32>
    %exchanged = "stablehlo.all_to_all"(%x) {
      concat_dimension = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      split_count = 2 : i64,
      split_dimension = 1 : i64
    } : (tensor<2x2xf32>) -> tensor<4x1xf32>
    // One participant receives nothing: zeros.
    %shifted = "stablehlo.collective_permute"(%reduced) {
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xi32>) -> tensor<4xi32>
    %spread = "stablehlo.collective_broadcast"(%x) {
      replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>
    } : (tensor<2x2xf32>) -> tensor<2x2xf32>
    %swapped = "stablehlo.collective_permute"(%spread) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<2x2xf32>) -> tensor<2x2xf32>
    return %gathered, %reduced, %scattered, %exchanged, %shifted, %spread, %swapped
      : tensor<2x4xf32>, tensor<4xi32>, tensor<1x2xf32>, tensor<4x1xf32>, tensor<4xi32>, tensor<2x2xf32>, tensor<2x2xf32>
  }
}
