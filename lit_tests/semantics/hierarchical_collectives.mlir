// Integers on eight devices, in XLA:CPU before and after: a gather whose group has an order of its own,
// a scatter of maxima and a sum, in rows of two and of four. All of it bit for bit.
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=2}' -o %t.two.mlir
// RUN: stablehlo-tools verify %s %t.two.mlir --trials 2 | filecheck %s
// RUN: stablehlo-tools opt %s -p 'hierarchical-collectives{rows=4}' -o %t.four.mlir
// RUN: stablehlo-tools verify %s %t.four.mlir --trials 2 | filecheck %s
// CHECK: identical in exact arithmetic: 3 outputs, 560 elements

// Rows that are gathered in another order are seen.
// RUN: sed 's/\[\[0, 4\], \[1, 5\], \[2, 6\], \[3, 7\]\]/[[4, 0], [1, 5], [2, 6], [3, 7]]/' %t.two.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --trials 1 | filecheck %s --check-prefix=SEEN
// SEEN: differ

module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%a: tensor<3x2xi32>, %b: tensor<16x5xi32>, %c: tensor<3x4xi32>) -> (tensor<3x16xi32>, tensor<2x5xi32>, tensor<3x4xi32>) {
    %g = "stablehlo.all_gather"(%a) {all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 4, 1, 5, 2, 6, 3, 7]]> : tensor<1x8xi64>, use_global_device_ids} : (tensor<3x2xi32>) -> tensor<3x16xi32>
    %m = "stablehlo.reduce_scatter"(%b) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.maximum %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {scatter_dimension = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[7, 6, 5, 4, 3, 2, 1, 0]]> : tensor<1x8xi64>, use_global_device_ids} : (tensor<16x5xi32>) -> tensor<2x5xi32>
    %p = "stablehlo.all_reduce"(%c) ({
    ^bb0(%l: tensor<i32>, %r: tensor<i32>):
      %s = stablehlo.add %l, %r : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids} : (tensor<3x4xi32>) -> tensor<3x4xi32>
    return %g, %m, %p : tensor<3x16xi32>, tensor<2x5xi32>, tensor<3x4xi32>
  }
}
