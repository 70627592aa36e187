// RUN: stablehlo-tools opt %s -p 'pipeline-collectives{direction=sink}' | tee %t.after.mlir | filecheck %s --check-prefix=SUNK
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// A bitcast between layouts that are the usual ones is a reshape, and nothing that holds it up.
// RUN: sed 's/%row = stablehlo.reshape/%row = mhlo.bitcast/' %s > %t.bitcast.mlir
// RUN: stablehlo-tools opt %t.bitcast.mlir -p 'pipeline-collectives{direction=sink}' | diff - %t.after.mlir

// Four of six rows are written, backwards: the first and the last stay what they were.
// SUNK: stablehlo.while
// SUNK: "stablehlo.reduce_scatter"
// SUNK: (tensor<4x4x2xi32>) -> tensor<4x2x2xi32>
// CHECK: same: 1 output, 48 elements, bitwise
module @rows attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%rows0: tensor<6x2x2xi32>, %xs: tensor<4x4x2xi32>) -> tensor<6x2x2xi32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %rows = %rows0) : tensor<i32>, tensor<6x2x2xi32>
  cond {
    %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %cut = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, 4, 2] : (tensor<4x4x2xi32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x2xi32>
    %x = stablehlo.reshape %cut : (tensor<1x4x2xi32>) -> tensor<4x2xi32>
    %part = "stablehlo.reduce_scatter"(%x) ({
    ^bb0(%l: tensor<i32>, %q: tensor<i32>):
      %s = stablehlo.add %l, %q : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64} : (tensor<4x2xi32>) -> tensor<2x2xi32>
    %row = stablehlo.reshape %part : (tensor<2x2xi32>) -> tensor<1x2x2xi32>
    %at = stablehlo.subtract %four, %i : tensor<i32>
    %next = stablehlo.dynamic_update_slice %rows, %row, %at, %zero, %zero : (tensor<6x2x2xi32>, tensor<1x2x2xi32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<6x2x2xi32>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %next : tensor<i32>, tensor<6x2x2xi32>
  }
  return %r#1 : tensor<6x2x2xi32>
}
}
