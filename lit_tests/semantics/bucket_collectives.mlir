// RUN: stablehlo-tools opt %s -p bucket-collectives -o %t.after.mlir
// RUN: filecheck %s --check-prefix=MERGED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// What three collectives give is what the two before each of them gave, bit for bit.
// MERGED: "stablehlo.all_gather"
// MERGED-NOT: "stablehlo.all_gather"
// MERGED: "stablehlo.all_to_all"
// MERGED-NOT: "stablehlo.all_to_all"
// MERGED: "stablehlo.reduce_scatter"
// MERGED-NOT: "stablehlo.reduce_scatter"
// CHECK: same: 6 outputs, 98 elements, bitwise

// Another's elements are seen.
// RUN: sed 's/\[0:2, 0:4\]/[0:2, 1:5]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 2,
module @semantics attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<3x2xf32>) -> (tensor<4x4xf32>, tensor<6x2xf32>, tensor<2x4xf32>, tensor<6x1xf32>, tensor<4x1xf32>, tensor<3x1xf32>) {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>) -> tensor<4x4xf32>
  %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<3x2xf32>) -> tensor<6x2xf32>
  %c = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
  %d = "stablehlo.all_to_all"(%y) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<3x2xf32>) -> tensor<6x1xf32>
  %e = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>) -> tensor<4x1xf32>
  %f = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<3x2xf32>) -> tensor<3x1xf32>
  return %a, %b, %c, %d, %e, %f : tensor<4x4xf32>, tensor<6x2xf32>, tensor<2x4xf32>, tensor<6x1xf32>, tensor<4x1xf32>, tensor<3x1xf32>
}
}
