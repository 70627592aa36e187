// Integers on sixteen devices, in XLA:CPU before and after: gathers, and exchanges that split and join each
// pair of three dimensions, written with their parts along one of their own. All of it bit for bit.
// RUN: stablehlo-tools opt %s -p 'assign-communication-domains{against=text}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=WRITTEN < %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --floats --trials 2 | filecheck %s
// CHECK: same: 6 outputs, {{.*}} elements, bitwise
// WRITTEN-COUNT-5: scale_up_fabric

// Parts that are joined in another order are seen.
// RUN: sed 's/dims = \[1, 0, 2, 3\]/dims = [0, 1, 2, 3]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --floats --trials 1 2>&1 | filecheck %s --check-prefix=SEEN
// SEEN: {{differ|error}}

module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%a: tensor<4x6x8xi32>) -> (tensor<16x6x8xi32>, tensor<2x12x8xi32>, tensor<16x6x2xi32>, tensor<4x3x16xi32>, tensor<8x6x4xi32>, tensor<4x6x8xi32>) {
    %g = "stablehlo.all_gather"(%a) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2, 1, 3], [4, 5, 6, 7], [8, 9, 10, 11], [15, 14, 13, 12]]> : tensor<4x4xi64>, use_global_device_ids} : (tensor<4x6x8xi32>) -> tensor<16x6x8xi32>
    %b = "stablehlo.all_to_all"(%a) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>} : (tensor<4x6x8xi32>) -> tensor<2x12x8xi32>
    %c = "stablehlo.all_to_all"(%a) {split_dimension = 2 : i64, concat_dimension = 0 : i64, split_count = 4 : i64, channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, replica_groups = dense<[[3, 2, 1, 0], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]> : tensor<4x4xi64>} : (tensor<4x6x8xi32>) -> tensor<16x6x2xi32>
    %d = "stablehlo.all_to_all"(%a) {split_dimension = 1 : i64, concat_dimension = 2 : i64, split_count = 2 : i64, channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>, replica_groups = dense<[[1, 0], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>} : (tensor<4x6x8xi32>) -> tensor<4x3x16xi32>
    %e = "stablehlo.all_to_all"(%a) {split_dimension = 2 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]> : tensor<8x2xi64>} : (tensor<4x6x8xi32>) -> tensor<8x6x4xi32>
    %f = "stablehlo.all_reduce"(%a) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.add %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 6, type = 1>, replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]> : tensor<8x2xi64>, use_global_device_ids} : (tensor<4x6x8xi32>) -> tensor<4x6x8xi32>
    return %g, %b, %c, %d, %e, %f : tensor<16x6x8xi32>, tensor<2x12x8xi32>, tensor<16x6x2xi32>, tensor<4x3x16xi32>, tensor<8x6x4xi32>, tensor<4x6x8xi32>
  }
}
