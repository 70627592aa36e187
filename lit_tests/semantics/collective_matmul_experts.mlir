// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=RINGS --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend both | filecheck %s

// Two replicas, in the reference interpreter and on XLA:CPU: tokens of integers to their experts and
// back, in a group that is not in the order of its numbers.
// RINGS-NOT: stablehlo.all_to_all
// RINGS-COUNT-2: "stablehlo.collective_permute"
// CHECK: same: 1 output, 24 elements, bitwise
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<2x2x3xi32>, %w: tensor<1x3x5xi32>, %v: tensor<1x5x3xi32>) -> tensor<2x2x3xi32> {
  %t = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>} : (tensor<2x2x3xi32>) -> tensor<1x4x3xi32>
  %h = stablehlo.dot_general %t, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<1x4x3xi32>, tensor<1x3x5xi32>) -> tensor<1x4x5xi32>
  %a = stablehlo.negate %h : tensor<1x4x5xi32>
  %p = stablehlo.dot_general %a, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<1x4x5xi32>, tensor<1x5x3xi32>) -> tensor<1x4x3xi32>
  %y = "stablehlo.all_to_all"(%p) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>} : (tensor<1x4x3xi32>) -> tensor<2x2x3xi32>
  return %y : tensor<2x2x3xi32>
}
}
