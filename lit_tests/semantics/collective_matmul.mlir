// Integers on four devices, in XLA:CPU before and after: a product of gathered rows that is scattered
// and used whole, and a gather of what is multiplied over. All of it bit for bit.
// RUN: stablehlo-tools opt %s -p 'collective-matmul{rings=all directions=both hardware=tpu-v5e}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=RINGS --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --trials 2 | filecheck %s

// RINGS-NOT: stablehlo.all_gather
// RINGS-NOT: stablehlo.reduce_scatter
// RINGS: stablehlo.collective_permute
// CHECK: identical in exact arithmetic: 3 outputs, 376 elements

// A ring that goes round the other way is seen.
// RUN: sed 's/\[\[0, 1\], \[1, 3\], \[3, 2\], \[2, 0\]\]/[[1, 0], [3, 1], [2, 3], [0, 2]]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=ROUND
// ROUND: differs in exact arithmetic: output
module @program attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<2x3xi32>, %w: tensor<3x6xi32>, %v: tensor<6x3xi32>, %a: tensor<5x8xi32>)
      -> (tensor<2x3xi32>, tensor<8x6xi32>, tensor<5x8xi32>) {
    %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x3xi32>) -> tensor<8x3xi32>
    %h = stablehlo.dot_general %g, %w, contracting_dims = [1] x [0] : (tensor<8x3xi32>, tensor<3x6xi32>) -> tensor<8x6xi32>
    %sq = stablehlo.multiply %h, %h : tensor<8x6xi32>
    %p = stablehlo.dot_general %sq, %v, contracting_dims = [1] x [0] : (tensor<8x6xi32>, tensor<6x3xi32>) -> tensor<8x3xi32>
    %y = "stablehlo.reduce_scatter"(%p) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.add %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<8x3xi32>) -> tensor<2x3xi32>
    %k = stablehlo.slice %v [0:2, 0:2] : (tensor<6x3xi32>) -> tensor<2x2xi32>
    %u = stablehlo.concatenate %k, %k, %k, %k, dim = 1 : (tensor<2x2xi32>, tensor<2x2xi32>, tensor<2x2xi32>, tensor<2x2xi32>) -> tensor<2x8xi32>
    %q = "stablehlo.all_gather"(%u) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<2x8xi32>) -> tensor<8x8xi32>
    %z = stablehlo.dot_general %a, %q, contracting_dims = [1] x [0] : (tensor<5x8xi32>, tensor<8x8xi32>) -> tensor<5x8xi32>
    return %y, %sq, %z : tensor<2x3xi32>, tensor<8x6xi32>, tensor<5x8xi32>
  }
}
