// RUN: stablehlo-tools opt %s -p import-pseudo-tokens -o %t.imported.mlir
// RUN: stablehlo-tools verify %s %t.imported.mlir --backend interpreter --set 0=0 | filecheck %s
// RUN: stablehlo-tools opt %s -p 'import-pseudo-tokens{fork=preserve}' -o %t.preserved.mlir
// RUN: stablehlo-tools verify %s %t.preserved.mlir --backend interpreter --set 0=0 | filecheck %s

// Without the token every kind of collective gives what it gave, bit for bit, on both participants.
// CHECK: same: 6 outputs, 104 elements, bitwise

// That holds because the token is zero; another number would be seen.
// RUN: not stablehlo-tools verify %s %t.imported.mlir --backend interpreter --set 0=1 --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module @IrToHlo.1 attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func @main(%token: tensor<f32>, %x: tensor<4x2xf32>, %y: tensor<4xi32>) -> (
      tensor<8x2xf32>, tensor<2x2xf32>, tensor<4x2xf32>, tensor<4x2xf32>, tensor<4xi32>, tensor<12xi32>) {
    %0 = stablehlo.broadcast_in_dim %token, dims = [] : (tensor<f32>) -> tensor<4x2xf32>
    %1 = stablehlo.add %x, %0 : tensor<4x2xf32>
    %gathered = "stablehlo.all_gather"(%1) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4x2xf32>) -> tensor<8x2xf32>
    %2 = stablehlo.slice %gathered [0:1, 0:1] : (tensor<8x2xf32>) -> tensor<1x1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x1xf32>) -> tensor<f32>
    %t1 = stablehlo.multiply %token, %3 : tensor<f32>

    %4 = stablehlo.broadcast_in_dim %t1, dims = [] : (tensor<f32>) -> tensor<4x2xf32>
    %5 = stablehlo.add %x, %4 : tensor<4x2xf32>
    %scattered = "stablehlo.reduce_scatter"(%5) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %sum = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %sum : tensor<f32>
    }) {
      replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>,
      scatter_dimension = 0 : i64
    } : (tensor<4x2xf32>) -> tensor<2x2xf32>
    %scale = stablehlo.constant dense<0.5> : tensor<2x2xf32>
    %scaled = stablehlo.multiply %scattered, %scale : tensor<2x2xf32>
    %6 = stablehlo.slice %scaled [0:1, 0:1] : (tensor<2x2xf32>) -> tensor<1x1xf32>
    %7 = stablehlo.reshape %6 : (tensor<1x1xf32>) -> tensor<f32>
    %t2 = stablehlo.multiply %t1, %7 : tensor<f32>

    %8 = stablehlo.broadcast_in_dim %t2, dims = [] : (tensor<f32>) -> tensor<4x2xf32>
    %9 = stablehlo.add %x, %8 : tensor<4x2xf32>
    %exchanged = "stablehlo.all_to_all"(%9) {
      concat_dimension = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      split_count = 2 : i64,
      split_dimension = 0 : i64
    } : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %10 = stablehlo.slice %exchanged [0:1, 0:1] : (tensor<4x2xf32>) -> tensor<1x1xf32>
    %11 = stablehlo.reshape %10 : (tensor<1x1xf32>) -> tensor<f32>
    %t3 = stablehlo.multiply %t2, %11 : tensor<f32>

    %reduced:2 = "stablehlo.all_reduce"(%x, %t3) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %most = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %most : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>, tensor<f32>) -> (tensor<4x2xf32>, tensor<f32>)

    // Integers, through whose buckets the token is converted.
    %12 = stablehlo.convert %reduced#1 : (tensor<f32>) -> tensor<i32>
    %13 = stablehlo.broadcast_in_dim %12, dims = [] : (tensor<i32>) -> tensor<4xi32>
    %14 = stablehlo.add %y, %13 : tensor<4xi32>
    %permuted = "stablehlo.collective_permute"(%14) {
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    } : (tensor<4xi32>) -> tensor<4xi32>
    %15 = stablehlo.slice %permuted [0:1] : (tensor<4xi32>) -> tensor<1xi32>
    %16 = stablehlo.reshape %15 : (tensor<1xi32>) -> tensor<i32>
    %17 = stablehlo.convert %16 : (tensor<i32>) -> tensor<f32>
    %t4 = stablehlo.multiply %reduced#1, %17 : tensor<f32>
    %18 = stablehlo.convert %t4 : (tensor<f32>) -> tensor<i32>
    %19 = stablehlo.broadcast_in_dim %18, dims = [] : (tensor<i32>) -> tensor<6xi32>
    %six = stablehlo.slice %permuted [0:2] : (tensor<4xi32>) -> tensor<2xi32>
    %longer = stablehlo.concatenate %six, %y, dim = 0 : (tensor<2xi32>, tensor<4xi32>) -> tensor<6xi32>
    %20 = stablehlo.add %longer, %19 : tensor<6xi32>
    %last = "stablehlo.all_gather"(%20) {
      all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<6xi32>) -> tensor<12xi32>
    return %gathered, %scaled, %exchanged, %reduced#0, %permuted, %last
      : tensor<8x2xf32>, tensor<2x2xf32>, tensor<4x2xf32>, tensor<4x2xf32>, tensor<4xi32>, tensor<12xi32>
  }
}
