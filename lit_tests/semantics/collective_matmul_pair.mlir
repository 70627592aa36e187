// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=RINGS --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Two replicas, in the reference interpreter: rows that are gathered, multiplied, and the products
// scattered, of integers.
// RINGS-NOT: stablehlo.all_gather
// RINGS-COUNT-2: "stablehlo.collective_permute"
// RINGS-NOT: stablehlo.reduce_scatter
// CHECK: same: 1 output, 12 elements, bitwise
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<2x3xi32>, %w: tensor<3x4xi32>, %v: tensor<4x3xi32>) -> tensor<2x3xi32> {
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x3xi32>) -> tensor<4x3xi32>
  %h = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<4x3xi32>, tensor<3x4xi32>) -> tensor<4x4xi32>
  %n = stablehlo.negate %h : tensor<4x4xi32>
  %p = stablehlo.dot_general %n, %v, contracting_dims = [1] x [0] : (tensor<4x4xi32>, tensor<4x3xi32>) -> tensor<4x3xi32>
  %y = "stablehlo.reduce_scatter"(%p) ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.add %a, %b : tensor<i32>
    stablehlo.return %c : tensor<i32>
  }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xi32>) -> tensor<2x3xi32>
  return %y : tensor<2x3xi32>
}
}
