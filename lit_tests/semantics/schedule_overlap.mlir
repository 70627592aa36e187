// RUN: stablehlo-tools opt %s -p 'schedule-overlap{hardware=%{inputs}/slow.toml}' -o %t.after.mlir
// RUN: filecheck %s --check-prefix=FENCED --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Layers in a loop and behind it give the same, bit for bit.
// FENCED: stablehlo.while
// FENCED-COUNT-2: stablehlo.optimization_barrier
// CHECK: same: 1 output, 128 elements, bitwise

// Another begin of a gather is seen.
// RUN: sed 's/all_gather_dim = 0 : i64, replica_groups = dense<\[\[0, 1\]\]>/all_gather_dim = 0 : i64, replica_groups = dense<[[1, 0]]>/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module @semantics attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<8x8xf32>, %w0: tensor<4x8xf32>, %w1: tensor<4x8xf32>, %w2: tensor<4x8xf32>) -> (tensor<8x8xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %w:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<8x8xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
  %g0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y0 = stablehlo.dot_general %h, %g0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y1 = stablehlo.dot_general %y0, %g1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %g2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %y2 = stablehlo.dot_general %y1, %g2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y2 : tensor<i32>, tensor<8x8xf32>
  }
  %k0 = "stablehlo.all_gather"(%w0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %z0 = stablehlo.dot_general %w#1, %k0, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %k1 = "stablehlo.all_gather"(%w1) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %z1 = stablehlo.dot_general %z0, %k1, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %k2 = "stablehlo.all_gather"(%w2) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x8xf32>) -> tensor<8x8xf32>
  %z2 = stablehlo.dot_general %z1, %k2, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %z2 : tensor<8x8xf32>
}
}
