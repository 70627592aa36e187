// RUN: stablehlo-tools opt %s -p create-reduce-scatter -o %t.after.mlir
// RUN: filecheck %s --check-prefix=REWRITTEN --input-file %t.after.mlir
// RUN: stablehlo-tools verify %s %t.after.mlir --backend interpreter | filecheck %s

// Each rewrite gives what was there before, bit for bit, on both participants.
// REWRITTEN-COUNT-2: "stablehlo.reduce_scatter"
// REWRITTEN: "stablehlo.collective_permute"
// REWRITTEN-NOT: stablehlo.all_
// CHECK: same: 6 outputs, 88 elements, bitwise

// A reduce_scatter in the wrong order is seen.
// RUN: sed 's/\[\[0, 1\]\]/[[1, 0]]/' %t.after.mlir > %t.changed.mlir
// RUN: not stablehlo-tools verify %s %t.changed.mlir --backend interpreter --trials 1 \
// RUN:   | filecheck %s --check-prefix=DIFFERS
// DIFFERS: differs: output 0,
module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<4x3xf32>, %y: tensor<4x2xi32>) -> (
      tensor<2x3xf32>, tensor<2x2xi32>, tensor<4x3xf32>, tensor<4x3xf32>, tensor<4x2xi32>, tensor<2xi32>) {
    %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xf32>) -> tensor<4x3xf32>
    %table_start = stablehlo.constant dense<[0, 2]> : tensor<2xi32>
    %device_start = stablehlo.replica_id : tensor<ui32>
    %row_start = stablehlo.dynamic_slice %table_start, %device_start, sizes = [1] : (tensor<2xi32>, tensor<ui32>) -> tensor<1xi32>
    %start = stablehlo.reshape %row_start : (tensor<1xi32>) -> tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %1 = stablehlo.dynamic_slice %0, %start, %zero, sizes = [2, 3] : (tensor<4x3xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
    // The other order, with a transpose and a value beside it.
    %2 = "stablehlo.all_reduce"(%y) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %c = stablehlo.maximum %a, %b : tensor<i32>
      stablehlo.return %c : tensor<i32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xi32>) -> tensor<4x2xi32>
    %3 = stablehlo.transpose %2, dims = [1, 0] : (tensor<4x2xi32>) -> tensor<2x4xi32>
    %beside = stablehlo.transpose %y, dims = [1, 0] : (tensor<4x2xi32>) -> tensor<2x4xi32>
    %4 = stablehlo.multiply %3, %beside : tensor<2x4xi32>
    %table_second = stablehlo.constant dense<[2, 0]> : tensor<2xi32>
    %device_second = stablehlo.replica_id : tensor<ui32>
    %row_second = stablehlo.dynamic_slice %table_second, %device_second, sizes = [1] : (tensor<2xi32>, tensor<ui32>) -> tensor<1xi32>
    %second = stablehlo.reshape %row_second : (tensor<1xi32>) -> tensor<i32>
    %5 = stablehlo.dynamic_slice %4, %zero, %second, sizes = [2, 2] : (tensor<2x4xi32>, tensor<i32>, tensor<i32>) -> tensor<2x2xi32>
    // Gathers: the own part, then the other's.
    %6 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xf32>) -> tensor<8x3xf32>
    %table_own = stablehlo.constant dense<[0, 4]> : tensor<2xi32>
    %device_own = stablehlo.replica_id : tensor<ui32>
    %row_own = stablehlo.dynamic_slice %table_own, %device_own, sizes = [1] : (tensor<2xi32>, tensor<ui32>) -> tensor<1xi32>
    %own = stablehlo.reshape %row_own : (tensor<1xi32>) -> tensor<i32>
    %table_other = stablehlo.constant dense<[4, 0]> : tensor<2xi32>
    %device_other = stablehlo.replica_id : tensor<ui32>
    %row_other = stablehlo.dynamic_slice %table_other, %device_other, sizes = [1] : (tensor<2xi32>, tensor<ui32>) -> tensor<1xi32>
    %other = stablehlo.reshape %row_other : (tensor<1xi32>) -> tensor<i32>
    %7 = stablehlo.dynamic_slice %6, %own, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    %8 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x3xf32>) -> tensor<8x3xf32>
    %9 = stablehlo.dynamic_slice %8, %other, %zero, sizes = [4, 3] : (tensor<8x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    // An exchange and its inverse; a constant.
    %10 = "stablehlo.all_to_all"(%y) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xi32>) -> tensor<2x4xi32>
    %11 = "stablehlo.all_to_all"(%10) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x4xi32>) -> tensor<4x2xi32>
    %seven = stablehlo.constant dense<7> : tensor<1xi32>
    %12 = "stablehlo.all_gather"(%seven) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<1xi32>) -> tensor<2xi32>
    return %1, %5, %7, %9, %11, %12 : tensor<2x3xf32>, tensor<2x2xi32>, tensor<4x3xf32>, tensor<4x3xf32>, tensor<4x2xi32>, tensor<2xi32>
  }
}
